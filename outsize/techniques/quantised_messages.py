"""Messages of 8 or 4 bits, of parameters that are gathered and of gradients whose sums are cut.

Wang et al., "ZeRO++", 2023: blocks of numbers travel as whole numbers and one scale each. Weights
are gathered so that all workers compute with the same rounded ones, the worker that holds a shard
too; the shard itself stays as it is. Gradients go from everybody to who needs the sum, which is
formed in float32 and rounded no further. Over several levels of the network that is done once for
each ("Scaling Large Language Model Training on Frontier with Low-Bandwidth Partitioning", 2025).
Updated parameters are collected so too where they have a master copy, which stays as it is: those
that a machine holds beside it are ZeRO++'s second shards. Of these, gathers stay within a machine,
whose links may be quicker than a processor writes codes: `gather_bits: 32` has them as they are
while `collect_bits: 8` has codes between machines.

    plan: {approximate: [quantised-messages], zero: 3}
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outsize import accelerator
from outsize.collectives import Collective, Span
from outsize.collectives.axes import Clash
from outsize.collectives.collective import (
    DONE,
    AllGather,
    Call,
    Handle,
    ReduceScatter,
    length,
)
from outsize.collectives.hierarchical import Hierarchical
from outsize.collectives.pieces import wider
from outsize.parallel.messages import CODES, Way
from outsize.plan import Plan
from outsize.plan.settings import PLAN_SETTINGS, PlanSetting
from outsize.registry import technique

NAME = "quantised-messages"
AS_IT_IS = 32
BITS = (4, 8, AS_IT_IS)
BLOCK = 128  # numbers that share a scale
SCALE = torch.float32
_PIECE, _LAUNCHED = 1 << 20, 1 << 24  # numbers of all messages of a piece: as of a transport
_TINY = 2.0**-126  # the least normal number of float32: its inverse is finite


@dataclass(frozen=True)
class Blocks:
    """Whole numbers of so many bits, and for each block of BLOCK one float32 that they are times.

    A message has the scales first, and ends at a whole scale. Two numbers of 4 bits share a byte,
    the first in its lower half.
    """

    bits: int

    @property
    def most(self) -> int:
        """The largest whole number; as large below zero."""
        return (1 << (self.bits - 1)) - 1

    @property
    def memory(self) -> int:
        """PyTorch's operators pass eight times over float32 to write a number and to read it."""
        return 16 * SCALE.itemsize

    def bytes(self, numel: int) -> int:
        codes = -(-numel * self.bits // 8)
        return (-(-numel // BLOCK) + -(-codes // SCALE.itemsize)) * SCALE.itemsize

    def over(self, group: Collective, way: Way) -> Collective:
        """Sums over several hosts are coded for each level, gathers once."""
        if way == "reduce" and isinstance(group, Hierarchical):
            return group.through(lambda level: Coded(level, self))
        return Coded(group, self)

    def write(self, x: Tensor, message: Tensor) -> None:
        """x: 1-D, of floats. message: uint8, of `bytes(len(x))`. What is no finite number makes its
        block one that is none."""
        numel, blocks = len(x), -(-len(x) // BLOCK)
        rows = x.to(wider(x.dtype))
        if numel % BLOCK:
            rows = torch.nn.functional.pad(rows, (0, blocks * BLOCK - numel))
        rows = rows.view(blocks, BLOCK)
        largest = rows.abs().amax(1, keepdim=True)
        scales, codes = self._parts(message, blocks)
        scales.copy_(largest.view(-1) / self.most)
        whole = (rows * (self.most / largest.clamp(min=_TINY))).round_().to(torch.int8).view(-1)
        if self.bits == 4:
            low, high = (whole.view(-1, 2) + self.most).to(torch.uint8).unbind(1)
            codes.copy_((low | (high << 4))[: len(codes)])
        else:
            codes.copy_(whole[: len(codes)].view(torch.uint8))

    def read(self, message: Tensor, out: Tensor, add: bool = False) -> None:
        """The numbers of a message, written to or added to `out`."""
        numel, blocks = len(out), -(-len(out) // BLOCK)
        scales, codes = self._parts(message, blocks)
        if self.bits == 4:
            whole = torch.stack((codes & 15, codes >> 4), 1).view(torch.int8).view(-1) - self.most
        else:
            whole = codes.view(torch.int8)
        numbers = whole[:numel].to(wider(out.dtype)) * scales.repeat_interleave(BLOCK)[:numel]
        if add:
            out += numbers
        else:
            out.copy_(numbers)

    def _parts(self, message: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        cut = blocks * SCALE.itemsize
        return message[:cut].view(SCALE), message[cut:]


class Coded(Collective):
    """Gathers and sums by messages of a code, over a group that carries and counts them.

    An operation is over when `start` returns, and holds the messages of a piece at a time.
    """

    def __init__(self, group: Collective, code: Blocks) -> None:
        self.size, self.rank, self.received = group.size, group.rank, Counter()
        self._group, self._code = group, code
        self._rooms: dict[tuple[str, torch.device], Tensor] = {}

    def start(self, call: Call) -> Handle:
        match call:
            case AllGather(mine, spans, out):
                for at, step in self._pieces(spans, out.device):
                    self._gather(mine, [_piece(span, at, step) for span in spans], out, at)
            case ReduceScatter(flat, spans, out):
                for at, step in self._pieces(spans, flat.device):
                    self._reduce(flat, [_piece(span, at, step) for span in spans], out, at)
            case _:
                return self._group.start(call)
        return DONE

    def _pieces(self, spans: Sequence[Span], device: torch.device) -> Sequence[tuple[int, int]]:
        """(first, how many) of the numbers of each span that go at once: whole blocks."""
        most = _LAUNCHED if accelerator.queues(device) else _PIECE
        step = max(1, most // self.size // BLOCK) * BLOCK
        return [(at, step) for at in range(0, max(map(length, spans)), step)]

    def _gather(self, mine: Tensor, spans: Sequence[Span], out: Tensor, at: int) -> None:
        messages = self._messages("gather", [length(span) for span in spans], out.device)
        self._code.write(mine[at : at + length(spans[self.rank])], messages[self.rank])
        ends = list(itertools.accumulate(map(len, messages), initial=0))
        every = self._rooms["gather", out.device][: ends[-1]]
        self._group.all_gather(messages[self.rank], list(itertools.pairwise(ends)), every)
        for message, span in zip(messages, spans, strict=True):
            self._code.read(message, out[slice(*span)])

    def _reduce(self, flat: Tensor, spans: Sequence[Span], out: Tensor, at: int) -> None:
        """Everybody's part is added in the order of ranks; this worker's own is not rounded."""
        others = [0 if r == self.rank else length(span) for r, span in enumerate(spans)]
        given = self._messages("given", others, flat.device)
        for r, span in enumerate(spans):
            if r != self.rank:
                self._code.write(flat[slice(*span)], given[r])
        own = length(spans[self.rank])
        had = self._messages("had", [own * (r != self.rank) for r in range(self.size)], flat.device)
        self._group.all_to_all(given, had)
        mine = flat[slice(*spans[self.rank])]
        total = torch.zeros(own, dtype=wider(flat.dtype), device=flat.device)
        for r, message in enumerate(had):
            if r == self.rank:
                total += mine
            else:
                self._code.read(message, total, add=True)
        out[at : at + own] = total

    def _messages(self, use: str, numels: Sequence[int], device: torch.device) -> list[Tensor]:
        """Room for messages of so many numbers each, one behind another; kept for the next ones."""
        sizes = [self._code.bytes(numel) for numel in numels]
        room = self._rooms.get((use, device))
        if room is None or len(room) < sum(sizes):
            room = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
            self._rooms[use, device] = room
        return list(room[: sum(sizes)].split(sizes))


def _piece(span: Span, at: int, step: int) -> Span:
    first, last = span
    return min(first + at, last), min(first + at + step, last)


# -- settings --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """None: how many bits is said in the plan."""


@dataclass(frozen=True)
class Message:
    """What is said by messages of few bits. usual: of a number, where nobody says."""

    setting: PlanSetting
    usual: int

    def bits(self, plan: Plan) -> int:
        return self.setting.of(plan) or self.usual


def _message(
    name: str, usual: int, meaning: str, whole: Callable[[Plan], bool], remedy: str, default: str
) -> Message:
    setting = PlanSetting(
        name,
        f"bits of a number in messages of {meaning}: 4, 8, or {AS_IT_IS}: as it is; 0: {default},"
        f" where plan.approximate holds {NAME}",
        (
            Clash(
                f"expected 4, 8 or {AS_IT_IS}",
                lambda plan: setting.of(plan) not in BITS,
                f"such as {usual}",
            ),
            Clash(
                "and nothing would be done: no state is cut that they bring",
                lambda plan: setting.of(plan) != AS_IT_IS and plan.mesh.data > 1 and whole(plan),
                remedy,
            ),
        ),
        quicker=lambda plan: () if whole(plan) else (AS_IT_IS,),
        approximate=NAME,
    )
    return Message(PLAN_SETTINGS.add(name, setting), usual)


def _collected(plan: Plan) -> bool:
    """Whether parameters are updated elsewhere, and what is updated has a copy of its own."""
    return plan.precision.master is not None and plan.shards.optimizer > plan.shards.parameters


def _code(plan: Plan, way: Way) -> Blocks | None:
    match way:
        case "gather":
            bits = GATHERED.bits(plan)
        case "reduce":
            bits = REDUCED.bits(plan)
        case "collect" if _collected(plan):
            bits = COLLECTED.setting.of(plan) or GATHERED.bits(plan)
        case _:
            bits = AS_IT_IS
    return None if bits == AS_IT_IS else Blocks(bits)


GATHERED = _message(
    "gather_bits",
    8,
    "parameters that are cut over workers, or have a master copy that is",
    lambda plan: plan.shards.parameters == 1 and not _collected(plan),
    "set plan.zero to 3",
    "8",
)
COLLECTED = _message(
    "collect_bits",
    8,
    "updated parameters to others that hold them, where they have a master copy",
    lambda plan: not _collected(plan),
    "set precision to bfloat16, and plan.zero to stages of which parameters have fewer shards",
    "as gather_bits",
)
REDUCED = _message(
    "reduce_bits",
    4,
    "gradients whose sums are cut over workers",
    lambda plan: plan.shards.optimizer == 1,
    "set plan.zero to 1, 2 or 3",
    "4",
)

technique(
    NAME,
    Settings,
    "messages of parameters in 8 bits and of gradients in 4, or as plan.gather_bits,"
    " plan.collect_bits and plan.reduce_bits say (ZeRO++)",
    exact=False,
    axis="data",
    clashes=(
        (
            "states that are whole on every worker of the data axis: nothing would be done",
            lambda plan: plan.mesh.data > 1 and plan.shards.optimizer == 1,
        ),
    ),
)
CODES.add(NAME, _code)
