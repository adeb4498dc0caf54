"""A model that generates within a memory budget: its weights stay in its files.

What fits beside keys, values and activations stays in memory from the first token on; the rest is
read again in every step, beside the computation. Logits are those of the whole model in memory, bit
for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import gettempdir

import torch

from outsize import accelerator
from outsize.checkpoint.hub import Described
from outsize.decode.generate import PREFILL_TOKENS, Request
from outsize.errors import OutsizeError, counted
from outsize.memory.ledger import in_grains
from outsize.memory.sizes import format_bytes
from outsize.memory.store import rounded
from outsize.runtime.session import Session
from outsize.runtime.tokens.cycle import Known, Layout, layout_of, smallest
from outsize.runtime.tokens.pooled import PooledFiles
from outsize.runtime.tokens.source import Source
from outsize.simulate.tokens import (
    LEAST_SLICE,
    Held,
    Needs,
    Share,
    needs,
    needs_of_rows,
    pace,
    probed,
    seconds,
)

NEAR = 0.9  # of the pool that could be had: one as large is kept for the next request


@dataclass(frozen=True)
class Budget:
    """Of `memory` bytes, what of a model in files can be where. reads: what reads them, or will."""

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

    def fit(self, request: Request) -> Needs:
        """With the longest slices of the prompt that leave room for the least pool. OutsizeError
        where there are none, with what is missing."""
        length = PREFILL_TOKENS
        while True:
            found = needs(self.held, request, length)
            left = self.left(found)
            if left >= self.least:
                return found
            if length <= LEAST_SLICE or len(request.ids) <= LEAST_SLICE:
                break
            length = max(LEAST_SLICE, min(length, len(request.ids)) // 2)
        raise OutsizeError(
            f"--memory {format_bytes(self.memory)}: {counted(self.least - left, 'byte', ',')}"
            f" missing; the layers at work need {self.least:,} bytes, the cache of"
            f" {counted(request.capacity, 'token', ',')} {found.cache:,}, a step"
            f" {found.work + self.buffers:,}: give"
            f" {self.memory + self.least - left:,} bytes, or fewer tokens"
        )

    def left(self, found: Needs) -> int:
        """What the pool may have."""
        left = self.memory - found.cache - found.work - self.buffers
        return left // self.held.grain * self.held.grain

    def pool(self, found: Needs) -> int:
        """What it has: no more than all weights."""
        return min(self.left(found), sum(rounded(stage.bytes) for stage in self.reads.stages))


@dataclass(frozen=True)
class Outlook:
    """What is predicted of a request. weights: bytes of all of them; computing: seconds of one
    token, beside which it reads."""

    share: Share
    layout: Layout
    stages: int
    weights: int
    read_rate: float
    computing: float

    @property
    def reading(self) -> float:
        """Seconds, in every step."""
        return self.layout.read / self.read_rate

    def __str__(self) -> str:
        kept, read, needs = self.layout.kept, format_bytes(self.layout.read), self.share.needs
        return (
            f"weights {format_bytes(self.weights)}, {kept} of {self.stages} parts stay in a pool of"
            f" {format_bytes(self.layout.pool)}; cache {format_bytes(needs.cache)},"
            f" a step {format_bytes(needs.work)}; {read} read a token at"
            f" {format_bytes(self.read_rate)}/s; predicted {format_bytes(self.share.peak)},"
            f" {max(self.reading, self.computing):.3g} s a token"
        )


def outlook(
    budget: Budget, found: Needs, layout: Layout, read_rate: float, computing: float
) -> Outlook:
    """Of a request that needs so much."""
    sizes = [stage.bytes for stage in budget.reads.stages]
    share = Share(in_grains(layout.pool, budget.held.grain), found, budget.buffers)
    return Outlook(share, layout, sum(map(bool, sizes)), sum(sizes), read_rate, computing)


class InFiles:
    """The Home (outsize/serve/model.py) of a described model of whose tensors no more than `memory`
    bytes are on the device at a time.

    dtype None keeps that of the files. disk: the folder where weights that rest transposed or in
    another dtype are converted to, by default the system's for temporary files. sparse: weights of
    pruned models are kept there as bitmap images where that is smaller by a fifth. OutsizeError
    where the folder has not the room.
    """

    what = "memory"

    def __init__(
        self,
        found: Described,
        memory: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        disk: str | Path | None = None,
        sparse: bool = False,
    ) -> None:
        dtypes = found.dtypes(dtype)
        self.device, self.model = accelerator.named(device), found.model
        self.source = Source(found, dtype, Path(disk or gettempdir()), sparse)
        self.pooled: PooledFiles | None = None
        self.session: Session | None = None
        self.outlook: Outlook | None = None
        self._request: Request | None = None
        stored = self.source.table.dtype
        held = Held(found.model.config, dtypes, stored=stored, device=self.device)
        self.budget = Budget(memory, held, self.source)

    @property
    def buffers(self) -> int:
        return self.source.bytes_held

    def ready(self, request: Request) -> tuple[Session, int]:
        """What plays the steps of a request, its pool filled, and how many tokens of a prompt it
        is fed at once; `outlook` says what to expect.

        OutsizeError where the budget is too small, with what is missing.
        """
        found, self._request = self.budget.fit(request), request
        return self._with(found), found.slice

    def peak(self, request: Request) -> int:
        self.ready(request)
        assert self.outlook is not None
        return self.outlook.share.peak

    def ready_for_rows(self, rows: int, length: int) -> Session:
        """The same for the logits of all tokens of rows."""
        budget = self.budget
        found = Needs(0, needs_of_rows(budget.held, rows, length), length)
        missing = budget.least - budget.left(found)
        if missing > 0:
            raise OutsizeError(
                f"memory of {format_bytes(budget.memory)}: {counted(missing, 'byte', ',')} missing"
                f" for logits of {rows} x {length} tokens; give {budget.memory + missing:,} bytes,"
                " or fewer tokens"
            )
        return self._with(found)

    def __str__(self) -> str:
        return str(self.outlook)

    def timing(self) -> str:
        session, outlook, request = self.session, self.outlook, self._request
        assert session is not None and outlook is not None and request, "asked after a request"
        length, layout = outlook.share.needs.slice, outlook.layout
        some = pace(self.model, layout.filled, probed(request, length)).whole(self.model)
        token, prompt = seconds(request, length, outlook.computing, some, outlook.reading)
        steps = sum(map(len, session.seconds.values()))
        return (
            f"{session.timing(outlook.share.peak, prompt, token)};"
            f" {format_bytes(layout.read)} read in each of {counted(steps, 'step')}"
        )

    def close(self, faulty: bool = False) -> None:
        """Let files and memory go."""
        self._release()
        self.source.close()

    def _with(self, found: Needs) -> Session:
        """Over a filled pool as large as the needs allow, or nearly so."""
        most, wanted = self.budget.left(found), self.budget.pool(found)
        old = None if self.pooled is None else self.pooled.layout
        if old is None or old.pool > most or old.capacity < NEAR * wanted:
            self._release()  # before the next pool is there
            layout = layout_of(self.source, wanted)
            self.pooled = PooledFiles(self.model, self.source, layout, self.device)
            lists = layout.schedules.__getitem__
            self.session = Session(self.model, self.pooled, lists)
        assert self.pooled is not None and self.session is not None
        self.session.forget()
        before = self.source.bytes_read
        spent = 0.0 if self.pooled.filled else self.session.fill()
        read = self.source.bytes_read - before
        self.outlook = self._outlook(found, self.pooled, read / spent if read else None)
        return self.session

    def _release(self) -> None:
        """Nothing of the model is a view of a pool any more."""
        if self.session is not None:
            self.session.close()
        if self.pooled is not None:
            self.pooled.close()
        self.session = self.pooled = None

    def _outlook(self, found: Needs, pooled: PooledFiles, rate: float | None) -> Outlook:
        """rate None: the pool was full already, and rates are those found before."""
        past = self.outlook
        if rate is None:
            assert past is not None, "a pool that is full has been filled"
            return replace(past, share=replace(past.share, needs=found))
        computing = pace(self.model, pooled.layout.filled).whole(self.model)
        return outlook(self.budget, found, pooled.layout, rate, computing)
