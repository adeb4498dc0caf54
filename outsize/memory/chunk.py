"""Chunk: the parameters of one segment that share dtype, trainability and the optimizer's way of
updating them, in one flat buffer.

A chunk's table says where each parameter lies; parameters, gradients, the fp32 master copy and the
optimizer's states each have one buffer in that same layout, allocated once, and what the model
and autograd see are views. Nothing is padded, so bytes follow from the shapes alone.

Decayed parameters come first, so that the optimizer updates at most two ranges a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor, nn

from outsize.models.cuts import NO_CUTS, Copies, Cut
from outsize.optim.declared import WHOLE, StateSpec


def is_layer(name: str, dims: int) -> bool:
    """Whether a parameter is a layer's weight: a matrix, an embedding, a norm; a bias is none."""
    return dims > 1 or name.rpartition(".")[2] == "weight"


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in its chunk: [offset, offset + numel) elements."""

    name: str
    shape: tuple[int, ...]
    offset: int
    group: int  # index of the optimizer's parameter group
    # Elements of what each of its cuts is of, of the whole parameter first; () where all lie here.
    cut_of: tuple[int, ...] = ()
    whole_shape: tuple[int, ...] = ()  # of the whole parameter; () where all of it lies here

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def whole(self) -> int:
        """Elements of the whole parameter."""
        return self.cut_of[0] if self.cut_of else self.numel

    @property
    def parted(self) -> bool:
        """Whether others have the rest of the parameter."""
        return self.whole != self.numel

    def elements(self, state: StateSpec) -> int:
        """How many a state has here: one of the parameter's shape is cut as it is, any other is
        whole on every worker."""
        return self.numel if state.shaped else state.elements(self.whole_shape or self.shape)

    def of(self, flat: Tensor) -> Tensor:
        """The view of this parameter in a flat buffer."""
        return flat[self.offset : self.offset + self.numel].view(self.shape)


@dataclass(frozen=True)
class ChunkTable:
    """The layout of one chunk. segment: index of the model's segment that owns it; wide: held in
    float32 at least, whatever the others are held in; main: the optimizer updates them itself and
    does not leave them to its `rest`; grain: elements of a parameter, counted from its first, that
    are updated together, or WHOLE (outsize/optim/optimizer.py): cuts of the chunk keep to it.
    copies: who holds these elements too, on the axes along which they are cut. codes: its
    parameters are bytes, which weights are decoded from, whatever weights are held in."""

    segment: int
    trainable: bool
    slots: tuple[Slot, ...]
    wide: bool = False
    main: bool = False
    copies: tuple[Copies, ...] = ()
    grain: int = 1
    codes: bool = False

    def on(self, axis: str) -> bool:
        """Whether it is cut along an axis."""
        return any(axis == one.axis for one in self.copies)

    @property
    def partial(self) -> bool:
        """Whether some of those have parts of the gradient."""
        return any(one.partial for one in self.copies)

    @cached_property
    def numel(self) -> int:
        return sum(slot.numel for slot in self.slots)

    def whole(self, slot: Slot) -> bool:
        """Whether a parameter is updated as a whole, so that no cut of the chunk may part it."""
        return self.grain == WHOLE or (self.grain > 1 and slot.parted)

    @property
    def joint(self) -> tuple[Slot, ...]:
        """Parameters that are updated as wholes by workers of whom each has a part."""
        return tuple(slot for slot in self.slots if slot.parted and self.whole(slot))

    @property
    def open(self) -> frozenset[int]:
        """Where parameters begin that may be cut, at multiples of the grain in them."""
        return frozenset(slot.offset for slot in self.slots if not self.whole(slot))

    def before(self, place: int, state: StateSpec) -> int:
        """Elements of a state before an element of the chunk, one at which cuts may be."""
        if state.shaped:
            return place
        ends = ((slot, place - slot.offset) for slot in self.slots if slot.offset < place)
        return sum(s.elements(state) if at >= s.numel else at // state.per for s, at in ends)

    def part(self, slot: Slot, flat: Tensor, state: StateSpec) -> Tensor:
        """The view of a parameter's part of a whole state: in its shape where it has that, else
        1-D."""
        if state.shaped:
            return slot.of(flat)
        first = self.before(slot.offset, state)
        return flat[first : first + slot.elements(state)]

    @property
    def edges(self) -> tuple[int, ...]:
        """Where its parameters begin."""
        return tuple(slot.offset for slot in self.slots)

    @property
    def marks(self) -> dict[int, int]:
        """By where its parameters begin, and its end: elements of whole parameters before it."""
        sizes = [slot.whole for slot in self.slots]
        places = (*self.edges, self.numel)
        return dict(zip(places, accumulate(sizes, initial=0), strict=True))

    def cuts(self, part: int, align: int, span: tuple[int, int]) -> tuple[int, ...]:
        """Offsets (first, ..., last) of parts of a span, of at most `part` elements, multiples of
        `align` from its beginning. Where elements are updated together they stay in one part, which
        is larger if need be."""
        first, last = span
        if self.grain == 1:
            return (*range(first, last, part), last)
        offsets = [first]
        for edge, end in pairwise((*self._borders(align, first, last), last)):
            if edge > offsets[-1] and end - offsets[-1] > part:
                offsets.append(edge)
        return (*offsets, last)

    def _borders(self, align: int, first: int, last: int) -> Iterator[int]:
        """Where parts of a span may begin: multiples of `align` from its beginning, at which
        parameters begin or may be cut."""
        for slot in self.slots:
            at = max(slot.offset, first) - first
            begin, end = first - (-at // align) * align, min(slot.offset + slot.numel, last)
            solid = self.whole(slot) or align % self.grain or (begin - slot.offset) % self.grain
            if solid:
                yield from (begin,) if begin == slot.offset < end else ()
            else:
                yield from range(begin, end, align)


def tables(
    segments: Sequence[Sequence[tuple[str, nn.Parameter]]],
    group_of: Mapping[str, int],
    wide: Collection[str] = (),
    main: Collection[str] = (),
    cuts: Mapping[str, Cut] = NO_CUTS,
    grains: tuple[int, int] = (1, WHOLE),
) -> tuple[ChunkTable, ...]:
    """Chunk tables of a model given as named parameters by segment. A parameter that several
    segments share belongs to the first. wide: names of those held in float32 at least; main: of
    those that the optimizer does not leave to its `rest`; grains: of that rest, and of the
    optimizer; cuts: which part of a parameter lies here, where not all of it does."""
    seen: set[int] = set()
    made: list[ChunkTable] = []
    for index, named in enumerate(segments):
        fresh = [(n, p) for n, p in named if not (id(p) in seen or seen.add(id(p)))]  # type: ignore[func-returns-value]
        kinds = {n: _kind(n, p, wide, main, cuts) for n, p in fresh}
        for kind in sorted(set(kinds.values())):
            mine = [(n, p) for n, p in fresh if kinds[n] == kind]
            frozen, large, other, copies, codes = kind
            slots = _slots(mine, group_of, cuts)
            grain = 1 if frozen else grains[not other]  # what nobody updates may be cut anywhere
            table = ChunkTable(index, not frozen, slots, large, not other, copies, grain, codes)
            made.append(table)
    return tuple(made)


Kind = tuple[bool, bool, bool, tuple[Copies, ...], bool]  # frozen, wide, not main, copies, codes


def _kind(
    name: str,
    parameter: nn.Parameter,
    wide: Collection[str],
    main: Collection[str],
    cuts: Mapping[str, Cut],
) -> Kind:
    """Parameters of one kind share a chunk."""
    trainable, copies = parameter.requires_grad, cuts[name].copies if name in cuts else ()
    if not trainable:
        copies = tuple(one._replace(partial=False) for one in copies)
    codes = parameter.dtype == torch.uint8
    return not trainable, name in wide, not (trainable and name in main), copies, codes


def _slots(
    named: Iterable[tuple[str, nn.Parameter]],
    group_of: Mapping[str, int],
    cuts: Mapping[str, Cut],
) -> tuple[Slot, ...]:
    # Large first within a group: sizes of matrices keep what follows aligned without padding. By
    # their whole sizes: workers whose parts are uneven have them in one order all the same.
    def slot(name: str, parameter: nn.Parameter) -> Slot:
        own = (name, tuple(parameter.shape), 0, group_of[name])
        if name not in cuts:
            return Slot(*own)
        return Slot(*own, tuple(prod(cut.shape) for cut in cuts[name].levels), cuts[name].whole)

    slots = sorted((slot(*item) for item in named), key=lambda s: (s.group, -s.whole))
    offsets = accumulate((s.numel for s in slots), initial=0)
    return tuple(replace(s, offset=at) for s, at in zip(slots, offsets, strict=False))


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
