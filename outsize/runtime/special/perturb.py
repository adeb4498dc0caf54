"""Random directions that are never stored, and the perturbed copies that a model computes with.

An element of a direction is a function of (seed, step, parameter name, element index): what one
action adds, a later one can take away, on any tier and in any order (outsize/models/random.py).

The weights themselves are never perturbed. A stage computes with a copy that holds w + eps z, and
then its mirror image 2 w - (w + eps z): nothing drifts by rounding however many steps are made,
each direction is drawn once for both signs, and weights may be wider than what is computed with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from outsize import accelerator
from outsize.kernels.pieces import pieces
from outsize.memory.chunk import Account, ChunkTable
from outsize.memory.store import rounded
from outsize.models.cuts import Span, inside
from outsize.models.random import Floats, normal
from outsize.runtime.storage.weight_pool import WeightPool
from outsize.torch_private import FakeTensor

PLUS, NONE, MINUS = 1, 0, -1


def all_of_it(name: str) -> Sequence[Span]:
    """Parameters are whole here."""
    return ()


@dataclass(frozen=True)
class Direction:
    """z of one step: normal, one number for every element of every parameter. runs_of: gives the
    elements of a whole parameter that lie here, where not all do."""

    seed: int
    step: int
    runs_of: Callable[[str], Sequence[Span]] = all_of_it

    def _values(self, name: str, first: int, last: int) -> Floats:
        """Of the elements [first, last) of what lies here of a parameter."""
        stream, runs = f"direction {self.step} {name}", self.runs_of(name)
        mine = inside(runs, first, last) if runs else ((first, last),)
        return np.concatenate([normal(self.seed, stream, *run) for run in mine])

    def add(
        self, base: Tensor, name: str, scale: float, out: Tensor, keep: float = 1.0, at: int = 0
    ) -> None:
        """out = keep * base + scale * z of the parameter `name`, rounded once; out may be base. at:
        the first element of what lies here of the parameter that base has."""
        for piece, to in zip(pieces(base), pieces(out), strict=True):
            end = at + piece.numel()
            if not isinstance(out, FakeTensor):  # a rehearsal has nothing to add to
                values = self._values(name, at, end)
                values *= scale
                z = accelerator.sent(torch.from_numpy(values).view(piece.shape), piece.device)
                to.copy_(z.add_(piece, alpha=keep))
            at = end


@dataclass(frozen=True)
class Move:
    """What a step has found and the weights have not had yet: keep * w + scale * z."""

    direction: Direction
    scale: float
    decay: float

    def apply(self, table: ChunkTable, flat: Tensor, first: int = 0) -> None:
        """On a chunk's weights from its element `first` on."""
        for slot in table.slots:
            begin = max(slot.offset, first)
            end = min(slot.offset + slot.numel, first + flat.numel())
            if begin < end:
                keep = 1.0 - self.decay * (len(slot.shape) > 1)
                here, at = flat[begin - first : end - first], begin - slot.offset
                self.direction.add(here, slot.name, self.scale, here, keep, at)


def mirror(about: Tensor, x: Tensor, out: Tensor) -> None:
    """out = 2 * about - x, rounded once; out may be x."""
    for a, b, to in zip(pieces(about), pieces(x), pieces(out), strict=True):
        to.copy_((2 * a.double()).sub_(b))


class Perturbed:
    """The copies that a model's parameters point to.

    weight_pool: has the weights. owners: the parameters by name. learns: by chunk, whether it is
    perturbed. uses: by stage, the stages whose parameters it computes with. compute: what it
    computes in. Stages that nobody else uses share the bytes of one copy; a stage that others use
    (a tied head, the code between an adopted module's blocks) has a copy of either sign.
    """

    def __init__(
        self,
        weight_pool: WeightPool,
        owners: Mapping[str, nn.Parameter],
        learns: Sequence[bool],
        uses: Sequence[Sequence[int]],
        compute: torch.dtype,
        account: Account,
    ) -> None:
        self.weight_pool, self.owners, self.learns, self.uses = weight_pool, owners, learns, uses
        self.shared = {other for s, used in enumerate(uses) for other in used if other != s}
        self._compute = compute
        placement = weight_pool.placement
        sizes = [
            sum(rounded(self._bytes(c)) for c in chunks)
            for s, chunks in enumerate(placement.chunks.of_stage)
            if s not in self.shared
        ]
        with account("workspace"):
            self._room = torch.empty(
                max(sizes, default=0), dtype=torch.uint8, device=weight_pool.device
            )
            self._copies = dict(self._made())
        self._at: dict[int, int] = {}  # the sign that a stage's copy has; of a shared one: both

    # -- what is there ----------------------------------------------------------------------------

    def _dtype(self, chunk: int) -> torch.dtype:
        wide = self.weight_pool.placement.chunks.tables[chunk].wide
        return torch.promote_types(torch.float32, self._compute) if wide else self._compute

    def _bytes(self, chunk: int) -> int:
        return self.weight_pool.placement.chunks.tables[chunk].numel * self._dtype(chunk).itemsize

    def _made(self) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        """(chunk, copies at + and -): views of the common room, or buffers of their own."""
        placement, device = self.weight_pool.placement, self.weight_pool.device
        for stage, chunks in enumerate(placement.chunks.of_stage):
            offset = 0
            for chunk in chunks:
                dtype, numel = self._dtype(chunk), placement.chunks.tables[chunk].numel
                if stage not in self.shared:
                    view = self._room[offset : offset + self._bytes(chunk)].view(dtype)
                    offset += rounded(self._bytes(chunk))
                    yield chunk, (view, view)
                    continue
                plus = torch.empty(numel, dtype=dtype, device=device)
                yield chunk, (plus, torch.empty_like(plus) if self.learns[chunk] else plus)

    # -- a pass over the stages -------------------------------------------------------------------

    def begin(self) -> None:
        """Nothing that the copies hold is of use any more."""
        self._at.clear()

    def enter(self, stage: int, sign: int, direction: Direction, epsilon: float) -> None:
        """Have a stage compute with w + sign * epsilon * z; PLUS comes before MINUS. Its own
        weights must be present, and those of a shared stage where it is entered first."""
        for used in self.uses[stage]:
            self._bring(used, sign, direction, epsilon)
            for chunk in self.weight_pool.placement.chunks.of_stage[used]:
                self._point(chunk, self._copies[chunk][sign == MINUS])

    def _bring(self, stage: int, sign: int, direction: Direction, epsilon: float) -> None:
        shared = stage in self.shared
        if stage in self._at and (shared or self._at[stage] == sign):
            return
        flip = self._at.get(stage) == PLUS
        for chunk in self.weight_pool.placement.chunks.of_stage[stage]:
            plus, minus = self._copies[chunk]
            if not flip:
                self._fill(chunk, plus, sign, direction, epsilon)
            if self.learns[chunk] and (flip or (shared and sign == PLUS)):
                mirror(self.weight_pool.chunks[chunk].parameters, plus, minus)
        if not shared:  # the room holds nothing else now
            self._at = {s: at for s, at in self._at.items() if s in self.shared}
        self._at[stage] = sign

    def _fill(
        self, chunk: int, out: Tensor, sign: int, direction: Direction, epsilon: float
    ) -> None:
        assert sign != MINUS, "a stage is entered with PLUS before MINUS"
        weights = self.weight_pool.chunks[chunk].parameters
        if sign == NONE or not self.learns[chunk]:
            out.copy_(weights)
            return
        for slot in self.weight_pool.placement.chunks.tables[chunk].slots:
            direction.add(slot.of(weights), slot.name, epsilon, slot.of(out))

    def _point(self, chunk: int, flat: Tensor) -> None:
        for slot in self.weight_pool.placement.chunks.tables[chunk].slots:
            self.owners[slot.name].data = slot.of(flat)
