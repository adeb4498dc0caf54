"""Bytes that a job holds while the first values of its parameters are written.

States are made chunk by chunk (`Job`, `States.replace`). Values that are drawn come through a
buffer, stored tensors that must be converted through whole tensors; states that rest below the
device and do not fit in its pool are put together beside it. A model of few tokens a step can hold
more then than in any step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from outsize.kernels.pieces import PIECE_ELEMENTS
from outsize.memory import ChunkTable
from outsize.memory.store import rounded
from outsize.plan import DEVICE
from outsize.schedule.kept import MASTER, PARAMETERS
from outsize.schedule.layout import Placement
from outsize.schedule.staying import stays

_WIDEST = 8  # bytes of an element of a buffer: values are drawn in float64


@dataclass(frozen=True)
class Filling:
    """How first values come. buffered: through a buffer of at most PIECE_ELEMENTS elements (drawn,
    or read in another type); converted: by parameter, the bytes of the tensors that it is made of,
    where those in the files are others; lying: as Chunks has it."""

    buffered: bool = True
    converted: Mapping[str, int] = field(default_factory=dict)
    lying: Mapping[str, torch.dtype] = field(default_factory=dict)

    def bytes(self, name: str, elements: int) -> int:
        """Held beside a parameter of so many elements while its values are written."""
        if name in self.converted:
            return self.converted[name]
        return _WIDEST * min(elements, PIECE_ELEMENTS) if self.buffered else 0


OWN = Filling(buffered=False)  # a module that has its values already


def starting(placement: Placement, filling: Filling) -> int:
    """The most bytes beside all states and the pool."""
    every = range(len(placement.chunks.tables))
    return max((of_chunk(placement, index, filling) for index in every), default=0)


def of_chunk(placement: Placement, index: int, filling: Filling) -> int:
    """The same while the values of one chunk are written."""
    table = placement.chunks.tables[index]
    if stays(placement.chunks, index):
        return 0
    held = [(what, dtype.itemsize) for what, dtype in placement.chunks.held(index)]
    wide = dict(held)
    staged, pooled = 0, 0
    for what, size in held:
        if what not in (MASTER, PARAMETERS):
            continue
        first, last = placement.chunks.extent(index, what)
        if placement.chunks.tier(index, what) != DEVICE:
            pooled += rounded(table.numel * size)
        elif last - first < table.numel:
            staged += table.numel * size
    if pooled > placement.pool:
        staged += pooled
    return staged + _of_slots(table, wide[MASTER if MASTER in wide else PARAMETERS], filling)


def _of_slots(table: ChunkTable, size: int, filling: Filling) -> int:
    """The most that the values of one parameter take; of what is cut over the tensor axis, the
    whole parameter is made first."""
    most = 0
    for slot in table.slots:
        cut = slot.whole * size if slot.parted else 0
        most = max(most, cut + filling.bytes(slot.name, slot.whole))
    return most
