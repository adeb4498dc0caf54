"""Address space that is reserved at once and becomes memory where it is said to."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from outsize.errors import OutsizeError
from outsize.memory.store import populate

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # of Linux, which Python 3.11 has no name for


class Reserved:
    """So many bytes of addresses, none of them memory yet. tensor: all of them, 1-D uint8; what was
    never committed must not be touched, or it is counted nowhere. Ranges are of whole system pages.

    OutsizeError where the system has no such addresses to give.
    """

    def __init__(self, nbytes: int) -> None:
        self.bytes = nbytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        try:
            self._map = mmap.mmap(-1, nbytes, flags=flags)
        except (OSError, ValueError, OverflowError) as error:
            raise OutsizeError(
                f"cannot reserve {nbytes:,} bytes of addresses ({error}); ask for fewer requests at"
                " once, for shorter ones, or lift the limit (ulimit -v)"
            ) from None
        with suppress(OSError):  # a huge page would be more than was asked for
            self._map.madvise(mmap.MADV_NOHUGEPAGE)
        self.tensor: Tensor = torch.from_numpy(np.frombuffer(self._map, np.uint8, nbytes))

    def commit(self, first: int, stop: int) -> None:
        """Have memory there now, with whatever numbers. OutsizeError where there is none."""
        assert first % mmap.PAGESIZE == 0 and stop % mmap.PAGESIZE == 0
        populate(self._map, self.tensor, first, stop - first, "reserved addresses")

    def release(self, first: int, stop: int) -> None:
        """Give memory back, with what it holds."""
        assert first % mmap.PAGESIZE == 0 and stop % mmap.PAGESIZE == 0
        if stop > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, stop - first)
