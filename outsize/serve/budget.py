"""What of a model in files can be where within a budget, and what is predicted of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from outsize import accelerator
from outsize.decode.generate import PREFILL_TOKENS, Request
from outsize.errors import OutsizeError, counted
from outsize.memory.ledger import in_grains
from outsize.memory.sizes import format_bytes
from outsize.memory.store import rounded
from outsize.runtime.tokens.cycle import Known, Layout, smallest
from outsize.simulate.tokens import LEAST_SLICE, Held, Needs, Seconds, Share, needs, needs_of_rows


class Room(NamedTuple):
    """What a request leaves for the pool, in bytes. missing: of the least pool; slice: as in
    Needs."""

    missing: int
    slice: int
    memory: int
    least: int
    cache: int
    work: int

    def refusal(self, tokens: int) -> OutsizeError:
        """Where something is missing for so many tokens."""
        return OutsizeError(
            f"--memory {format_bytes(self.memory)}: {counted(self.missing, 'byte', ',')}"
            f" missing; the layers at work need {self.least:,} bytes, the cache of"
            f" {counted(tokens, 'token', ',')} {self.cache:,}, a step {self.work:,}: give"
            f" {self.memory + self.missing:,} bytes, or fewer tokens"
        )


@dataclass(frozen=True)
class Budget:
    """Of `memory` bytes, what of a worker's model in files can be where. reads: what reads them, or
    will."""

    memory: int
    held: Held
    reads: Known

    @property
    def buffers(self) -> int:
        """Bytes to read through, where they are the device's."""
        return 0 if accelerator.queues(self.held.device) else self.reads.bytes_held

    @cached_property
    def least(self) -> int:
        return smallest(self.reads)

    def room(self, request: Request) -> Room:
        """With the longest slices of the prompt that leave room for the least pool; with the
        shortest where there are none."""
        length = PREFILL_TOKENS
        while True:
            found = needs(self.held, request, length)
            room = self.short(found)
            if not room.missing or length <= LEAST_SLICE or len(request.ids) <= LEAST_SLICE:
                break
            length = max(LEAST_SLICE, min(length, len(request.ids)) // 2)
        return room

    def room_for_rows(self, rows: int, length: int) -> tuple[Needs, Room]:
        """For the logits of all tokens of rows."""
        found = Needs(0, needs_of_rows(self.held, rows, length), length)
        return found, self.short(found)

    def short(self, found: Needs) -> Room:
        """What such needs leave."""
        missing, work = self.missing(found), found.work + self.buffers
        return Room(missing, found.slice, self.memory, self.least, found.cache, work)

    def missing(self, found: Needs) -> int:
        """Bytes of the least pool."""
        return max(0, self.least - self.left(found))

    def left(self, found: Needs) -> int:
        """What the pool may have."""
        left = self.memory - found.cache - found.work - self.buffers
        return left // self.held.grain * self.held.grain

    def pool(self, found: Needs) -> int:
        """What it has: no more than all weights."""
        return min(self.left(found), sum(rounded(stage.bytes) for stage in self.reads.stages))

    def share(self, layout: Layout, found: Needs) -> Share:
        """What is on the device."""
        return Share(in_grains(layout.pool, self.held.grain), found, self.buffers)


@dataclass(frozen=True)
class Outlook:
    """What is predicted of a request on this worker. weights: bytes of all that it has, in so many
    parts; computing: seconds of one token, beside which it reads. mesh: of all workers; peaks: of
    the first worker of each stage of a pipeline; token: seconds of all of them."""

    share: Share
    layout: Layout
    stages: int
    weights: int
    read_rate: float
    computing: float
    mesh: str = ""
    peaks: tuple[int, ...] = ()
    token: float = 0.0

    @property
    def reading(self) -> float:
        """Seconds, in every step."""
        return self.layout.read / self.read_rate

    def staying(self) -> tuple[str, ...]:
        """What is read in every step, in a line."""
        if not self.layout.read:
            return ()
        return (
            f"of {format_bytes(self.weights)} of weights {format_bytes(self.layout.read)} stay in"
            " their files and are read in each step, whatever it feeds, at"
            f" {format_bytes(self.read_rate)}/s",
        )

    def __str__(self) -> str:
        kept, read, needs = self.layout.kept, format_bytes(self.layout.read), self.share.needs
        where = f" on a worker of {self.mesh}" if self.mesh else ""
        peaks = ", ".join(map(format_bytes, self.peaks or (self.share.peak,)))
        token = self.token or max(self.reading, self.computing)
        return (
            f"weights {format_bytes(self.weights)}{where}, {kept} of {self.stages} parts stay in a"
            f" pool of {format_bytes(self.layout.pool)}; cache {format_bytes(needs.cache)},"
            f" a step {format_bytes(needs.work)}; {read} read a token at"
            f" {format_bytes(self.read_rate)}/s; predicted {peaks}, {token:.3g} s a token"
        )


def outlook(
    budget: Budget, found: Needs, layout: Layout, read_rate: float, computing: float
) -> Outlook:
    """Of a request that needs so much."""
    sizes = [stage.bytes for stage in budget.reads.stages]
    share = budget.share(layout, found)
    return Outlook(share, layout, sum(map(bool, sizes)), sum(sizes), read_rate, computing)


def over_stages(found: Sequence[Seconds], steps: int) -> Seconds:
    """Of a pipeline whose stages take so long each, one behind the other, for a prompt in so many
    steps: who has handed one on begins with the next."""
    each = [one.prompt / steps for one in found]
    return Seconds(sum(one.token for one in found), sum(each) + (steps - 1) * max(each))
