"""Which chunks stay in the files of their model, where they would rest on a disk."""

from __future__ import annotations

import torch

from outsize.plan import DISK
from outsize.schedule.chunks import Chunks
from outsize.schedule.kept import PARAMETERS


def may_stay(chunks: Chunks, chunk: int) -> bool:
    """Whether all of a chunk can be read there: frozen parameters that are whole here, in their
    type there or in one that holds the same numbers."""
    table = chunks.tables[chunk]
    if table.trainable or not chunks.lying:
        return False
    ((_, dtype),) = chunks.held(chunk)
    own = (None if slot.parted else chunks.lying.get(slot.name) for slot in table.slots)
    return all(x is not None and torch.promote_types(x, dtype) == dtype for x in own)


def stays(chunks: Chunks, chunk: int) -> bool:
    """Whether a chunk is read there in every step."""
    return chunks.tier(chunk, PARAMETERS) == DISK and may_stay(chunks, chunk)


def bytes_below(chunks: Chunks, chunk: int, what: str, first: int, last: int) -> int:
    """Bytes of elements of a state where they rest."""
    if what != PARAMETERS or not stays(chunks, chunk):
        return (last - first) * dict(chunks.held(chunk))[what].itemsize
    slots = chunks.tables[chunk].slots
    counts = (min(last, s.offset + s.numel) - max(first, s.offset) for s in slots)
    both = zip(slots, counts, strict=True)
    return sum(max(0, count) * chunks.lying[slot.name].itemsize for slot, count in both)
