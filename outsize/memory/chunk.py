"""Chunk: the parameters of one segment that share dtype, trainability and the optimizer's way of
updating them, in one flat buffer.

A chunk's table says where each parameter lies; parameters, gradients, the fp32 master copy and the
optimizer's states each have one buffer in that same layout, allocated once, and what the model
and autograd see are views. Nothing is padded, so bytes follow from the shapes alone.

Decayed parameters come first, so that the optimizer updates at most two ranges a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor, nn

from outsize.models.cuts import NO_CUTS, Cut


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in its chunk: [offset, offset + numel) elements."""

    name: str
    shape: tuple[int, ...]
    offset: int
    group: int  # index of the optimizer's parameter group
    whole: int = 0  # elements of the whole parameter, where a part of it lies here; 0: all do

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def of(self, flat: Tensor) -> Tensor:
        """The view of this parameter in a flat buffer."""
        return flat[self.offset : self.offset + self.numel].view(self.shape)


@dataclass(frozen=True)
class ChunkTable:
    """The layout of one chunk. segment: index of the model's segment that owns it; wide: held in
    float32 at least, whatever the others are held in; matrices: each is updated as a whole.

    shared: how many neighbours on the tensor axis hold these elements too (1: none); partial: the
    gradient is the sum of theirs. piped: every worker of a pipeline has elements of its own."""

    segment: int
    trainable: bool
    slots: tuple[Slot, ...]
    wide: bool = False
    matrices: bool = False
    shared: int = 1
    partial: bool = False
    piped: bool = False

    @property
    def numel(self) -> int:
        return sum(slot.numel for slot in self.slots)

    @property
    def edges(self) -> tuple[int, ...]:
        """Where its parameters begin."""
        return tuple(slot.offset for slot in self.slots)

    @property
    def marks(self) -> dict[int, int]:
        """By where its parameters begin, and its end: elements of whole parameters before it."""
        sizes = [slot.whole or slot.numel for slot in self.slots]
        places = (*self.edges, self.numel)
        return dict(zip(places, accumulate(sizes, initial=0), strict=True))

    def cuts(self, part: int, grain: int, span: tuple[int, int]) -> tuple[int, ...]:
        """Offsets (first, ..., last) of parts of a span, of at most `part` elements, multiples of
        `grain` from its beginning. Where matrices are updated as wholes, parts begin where matrices
        do, and are larger if need be."""
        first, last = span
        if not self.matrices:
            return (*range(first, last, part), last)
        offsets = [first]
        edges = [e for e in self.edges if first <= e < last and (e - first) % grain == 0]
        for edge, end in pairwise((*edges, last)):
            if edge > offsets[-1] and end - offsets[-1] > part:
                offsets.append(edge)
        return (*offsets, last)


def tables(
    segments: Sequence[Sequence[tuple[str, nn.Parameter]]],
    group_of: Mapping[str, int],
    wide: Collection[str] = (),
    matrices: Collection[str] = (),
    cuts: Mapping[str, Cut] = NO_CUTS,
) -> tuple[ChunkTable, ...]:
    """Chunk tables of a model given as named parameters by segment. A parameter that several
    segments share belongs to the first. wide: names of those held in float32 at least; matrices: of
    those updated as wholes; cuts: which part of a parameter lies here, where not all of it does."""
    seen: set[int] = set()
    made: list[ChunkTable] = []
    for index, named in enumerate(segments):
        fresh = [(n, p) for n, p in named if not (id(p) in seen or seen.add(id(p)))]  # type: ignore[func-returns-value]
        kinds = {n: _kind(n, p, wide, matrices, cuts) for n, p in fresh}
        for kind in sorted(set(kinds.values())):
            mine = [(n, p) for n, p in fresh if kinds[n] == kind]
            frozen, large, single, shared, partial, piped = kind
            slots = _slots(mine, group_of, cuts)
            made.append(
                ChunkTable(index, not frozen, slots, large, not single, shared, partial, piped)
            )
    return tuple(made)


Kind = tuple[bool, bool, bool, int, bool, bool]  # frozen, wide, no matrix, shared, partial, piped


def _kind(
    name: str,
    parameter: nn.Parameter,
    wide: Collection[str],
    matrices: Collection[str],
    cuts: Mapping[str, Cut],
) -> Kind:
    """Parameters of one kind share a chunk."""
    cut, trainable = cuts.get(name), parameter.requires_grad
    whole = trainable and name in matrices
    shared, partial = (1, False) if cut is None else (cut.shared, cut.partial and trainable)
    piped = cut is not None and cut.piped
    return not trainable, name in wide, not whole, shared, partial, piped


def _slots(
    named: Iterable[tuple[str, nn.Parameter]],
    group_of: Mapping[str, int],
    cuts: Mapping[str, Cut],
) -> tuple[Slot, ...]:
    # Large first within a group: sizes of matrices keep what follows aligned without padding. By
    # their whole sizes: workers whose parts are uneven have them in one order all the same.
    def size(name: str, parameter: nn.Parameter) -> int:
        return prod(cuts[name].shape) if name in cuts else parameter.numel()

    order = sorted(named, key=lambda item: (group_of[item[0]], -size(*item)))
    slots, offset = [], 0
    for name, parameter in order:
        whole = size(name, parameter) if name in cuts else 0
        slots.append(Slot(name, tuple(parameter.shape), offset, group_of[name], whole))
        offset += parameter.numel()
    return tuple(slots)


@dataclass
class Chunk:
    """The buffers of one chunk: 1-D, of table.numel elements; where its states are cut over
    workers, master and optimizer have this worker's elements alone. shards: by state, this worker's
    elements of parameters and gradients, where the whole ones are in the pool at times only."""

    table: ChunkTable
    parameters: Tensor
    gradients: Tensor | None = None
    master: Tensor | None = None
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)  # updates that each parameter has had
    shards: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Dtypes:
    """What each kind of state is held in; master None: parameters are their own master."""

    parameters: torch.dtype
    gradients: torch.dtype
    master: torch.dtype | None
    optimizer: torch.dtype


Account = Callable[[str], AbstractContextManager[None]]
