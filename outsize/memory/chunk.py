"""Chunk: the parameters of one segment that share dtype and trainability, in one flat buffer.

A chunk's table says where each parameter lies; parameters, gradients, the fp32 master copy and the
optimizer's states each have one buffer in that same layout, allocated once, and what the model
and autograd see are views. Nothing is padded, so bytes follow from the shapes alone.

Decayed parameters come first, so that the optimizer updates at most two ranges a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import product
from math import prod

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in its chunk: [offset, offset + numel) elements."""

    name: str
    shape: tuple[int, ...]
    offset: int
    group: int  # index of the optimizer's parameter group

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def of(self, flat: Tensor) -> Tensor:
        """The view of this parameter in a flat buffer."""
        return flat[self.offset : self.offset + self.numel].view(self.shape)


@dataclass(frozen=True)
class ChunkTable:
    """The layout of one chunk. segment: index of the model's segment that owns it; wide: held in
    float32 at least, whatever the others are held in."""

    segment: int
    trainable: bool
    slots: tuple[Slot, ...]
    wide: bool = False

    @property
    def numel(self) -> int:
        return sum(slot.numel for slot in self.slots)


def tables(
    segments: Sequence[Sequence[tuple[str, nn.Parameter]]],
    group_of: Mapping[str, int],
    wide: Collection[str] = (),
) -> tuple[ChunkTable, ...]:
    """Chunk tables of a model given as named parameters by segment. A parameter that several
    segments share belongs to the first. wide: names of those held in float32 at least."""
    seen: set[int] = set()
    made: list[ChunkTable] = []
    for index, named in enumerate(segments):
        fresh = [(n, p) for n, p in named if not (id(p) in seen or seen.add(id(p)))]  # type: ignore[func-returns-value]
        for trainable, large in product((True, False), (False, True)):
            mine = [
                (n, p) for n, p in fresh if p.requires_grad is trainable and (n in wide) is large
            ]
            if mine:
                made.append(ChunkTable(index, trainable, _slots(mine, group_of), large))
    return tuple(made)


def _slots(
    named: Iterable[tuple[str, nn.Parameter]], group_of: Mapping[str, int]
) -> tuple[Slot, ...]:
    # Large first within a group: sizes of matrices keep what follows aligned without padding.
    order = sorted(named, key=lambda item: (group_of[item[0]], -item[1].numel()))
    slots, offset = [], 0
    for name, parameter in order:
        slots.append(Slot(name, tuple(parameter.shape), offset, group_of[name]))
        offset += parameter.numel()
    return tuple(slots)


@dataclass
class Chunk:
    """The buffers of one chunk: 1-D, all of table.numel elements."""

    table: ChunkTable
    parameters: Tensor
    gradients: Tensor | None = None
    master: Tensor | None = None
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)  # updates that each parameter has had


@dataclass(frozen=True)
class Dtypes:
    """What each kind of state is held in; master None: parameters are their own master."""

    parameters: torch.dtype
    gradients: torch.dtype
    master: torch.dtype | None
    optimizer: torch.dtype


Account = Callable[[str], AbstractContextManager[None]]
