"""Stores: where bytes rest while no computation uses them. Here the protocol, and those in memory.

A store is one tier at run time. Its places are reserved before work starts, next to one another in
one region that is made once: nothing is allocated, rounded up or split while steps run, so nothing
fragments (MemAscend, 2025). A region of a file or device that is memory (`/dev/shm`, a DAX device)
makes CXL memory or the memory of another NUMA node a tier of its own.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from outsize import accelerator
from outsize.errors import OutsizeError
from outsize.hardware.disk import preallocate, unnamed

ALIGN = 4096  # direct I/O's and the page's
BLOCK = 1 << 20  # what one checksum covers
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14, which Python 3.11 has no name for


@dataclass(frozen=True)
class Place:
    """Where some bytes rest on one store: offset is a multiple of ALIGN, bytes as asked for."""

    offset: int
    bytes: int


class Store(Protocol):
    """A tier at run time. Reads and writes may run at the same time from several threads; those of
    the same bytes are ordered by the caller."""

    @property
    def name(self) -> str:
        """ "host", "disk", or the name of a declared tier."""
        ...

    @property
    def bytes_read(self) -> int:
        """Payload read since the store was made."""
        ...

    @property
    def bytes_written(self) -> int:
        """Payload written since the store was made."""
        ...

    def reserve(self, nbytes: int) -> Place:
        """A place of its own for nbytes. OutsizeError with what is missing when it is full."""
        ...

    def write(self, place: Place, data: Tensor, at: int = 0) -> None:
        """The bytes of data (contiguous, of any dtype) to the place, from byte `at` on.

        at is a multiple of BLOCK; the data end at a multiple of BLOCK or where the place ends.
        Blocks until the data may be changed.
        """
        ...

    def read(self, place: Place, out: Tensor, at: int = 0) -> None:
        """What was written there, by the same rules. OutsizeError where a byte is another one."""
        ...

    def close(self) -> None:
        """Let the bytes go. Nothing may be read or written after."""
        ...


@runtime_checkable
class Addressed(Store, Protocol):
    """A tier whose bytes can be computed with where they rest."""

    def view(self, place: Place) -> Tensor:
        """The bytes of a place where they rest, 1-D uint8."""
        ...


class Counts:
    """Free bytes and payload of one store, safe among threads."""

    def __init__(self, name: str, capacity: int) -> None:
        self.name, self.capacity = name, rounded(capacity)
        self.read = self.written = self._taken = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Place:
        """The next place of nbytes. OutsizeError when they are not there."""
        with self._lock:
            wanted, free = rounded(nbytes), self.capacity - self._taken
            if wanted > free:
                raise OutsizeError(
                    f"tier {self.name!r}: {nbytes:,} bytes wanted, {free:,} of {self.capacity:,}"
                    f" free, {wanted - free:,} missing; declare a larger tier or another one"
                )
            self._taken += wanted
            return Place(self._taken - wanted, nbytes)

    def count(self, *, read: int = 0, written: int = 0) -> None:
        """Add payload."""
        with self._lock:
            self.read += read
            self.written += written


def rounded(nbytes: int) -> int:
    """Up to a multiple of ALIGN."""
    return -(-nbytes // ALIGN) * ALIGN


def check_span(place: Place, tensor: Tensor, at: int) -> None:
    """Assert what read and write ask of their callers."""
    end = at + tensor.nbytes
    assert tensor.is_contiguous(), "stores move contiguous tensors"
    assert at % BLOCK == 0 and end <= place.bytes, (place, at, tensor.nbytes)
    assert end % BLOCK == 0 or end == place.bytes, (place, at, tensor.nbytes)


def pool(nbytes: int, pinned: bool = False, what: str = "a buffer") -> Tensor:
    """One buffer of nbytes, 1-D uint8, zero, starting at a multiple of ALIGN.

    A mapping of its own: exactly these bytes (PyTorch's pinned allocator would round them up to a
    power of two), given back to the system when the last view goes. Every page is touched now, as
    a huge one where the system has them: memory that is not there is an error before the work, and
    no step pays for page faults. pinned: page-locked, for copies beside computation.
    """
    if pinned and not accelerator.registers():
        return accelerator.pinned(nbytes, what)
    region, buffer = _region(nbytes)
    populate(region, buffer, 0, nbytes, what)
    return accelerator.registered(buffer, what) if pinned else buffer


class MemoryStore:
    """A tier in memory that this process addresses: RAM, or the file or device at `path`.

    path: a folder on a memory file system (an unnamed file is made there), a name in one that is
    not taken yet, or a DAX device. pinned: page-locked, all of it now, where the device's runtime
    can do that to such memory. Pages are touched when they are reserved. Memory has its own error
    correction: nothing is checksummed.
    """

    def __init__(
        self, name: str, capacity: int, pinned: bool = False, path: Path | None = None
    ) -> None:
        self.name, self._counts = name, Counts(name, capacity)
        self._map: Any = None
        self._buffer: Tensor | None
        if pinned and path is None and not accelerator.registers():
            self._buffer = accelerator.pinned(rounded(capacity), f"tier {name!r}")
            return
        self._map, buffer = _region(capacity) if path is None else _mapped(name, path, capacity)
        lock = pinned and accelerator.registers()
        self._buffer = accelerator.registered(buffer, f"tier {name!r}") if lock else buffer

    @property
    def bytes_read(self) -> int:
        return self._counts.read

    @property
    def bytes_written(self) -> int:
        return self._counts.written

    def reserve(self, nbytes: int) -> Place:
        place = self._counts.take(nbytes)
        if self._map is not None:
            what = f"tier {self.name!r}"
            populate(self._map, self._held(), place.offset, rounded(nbytes), what)
        return place

    def view(self, place: Place) -> Tensor:
        """The bytes of a place where they rest, 1-D uint8: for what is computed there."""
        return self._held()[place.offset : place.offset + place.bytes]

    def write(self, place: Place, data: Tensor, at: int = 0) -> None:
        check_span(place, data, at)
        move(self._held(), place.offset + at, data, inward=True)
        self._counts.count(written=data.nbytes)

    def read(self, place: Place, out: Tensor, at: int = 0) -> None:
        check_span(place, out, at)
        move(self._held(), place.offset + at, out, inward=False)
        self._counts.count(read=out.nbytes)

    def close(self) -> None:
        self._buffer = None
        self._map = None

    def _held(self) -> Tensor:
        if self._buffer is None:
            raise OutsizeError(f"tier {self.name!r} is closed; open it again before using it")
        return self._buffer


def move(buffer: Tensor, offset: int, other: Tensor, inward: bool) -> None:
    """Between [offset, offset + other.nbytes) of the buffer and a tensor; done when it returns.

    On the CPU a plain memmove without the interpreter's lock: a lane that copies takes one core
    and leaves the others, and PyTorch's threads, to the computation beside it.
    """
    if other.nbytes == 0:
        return
    if other.device.type == "cpu":
        there, here = buffer.data_ptr() + offset, other.data_ptr()
        ctypes.memmove(*((there, here) if inward else (here, there)), other.nbytes)
        return
    mine = buffer[offset : offset + other.nbytes]
    theirs = other.detach().reshape(-1).view(torch.uint8)
    to, source = (mine, theirs) if inward else (theirs, mine)
    to.copy_(source, non_blocking=True)
    accelerator.settle(other.device)


def _region(nbytes: int) -> tuple[Any, Tensor]:
    """Anonymous memory, not touched yet. Private: shared memory gets no huge pages."""
    size = max(rounded(nbytes), ALIGN)
    try:
        region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise OutsizeError(
            f"cannot allocate {nbytes:,} bytes of memory ({error}); plan with less"
        ) from None
    with suppress(OSError):  # a kernel without huge pages
        region.madvise(mmap.MADV_HUGEPAGE)
    return region, _tensor(region, nbytes)


def _tensor(region: mmap.mmap, nbytes: int) -> Tensor:
    """The first nbytes of a mapping, which lives as long as a view of the tensor."""
    return torch.from_numpy(np.frombuffer(region, np.uint8, nbytes))


def _mapped(name: str, path: Path, nbytes: int) -> tuple[Any, Tensor]:
    """A file without a name, or a device, as memory; its space is taken now."""
    try:
        handle = _opened(path)
        try:
            if not stat.S_ISCHR(os.fstat(handle).st_mode):
                preallocate(handle, 0, max(rounded(nbytes), ALIGN))
            region = mmap.mmap(handle, max(rounded(nbytes), ALIGN))
        finally:
            os.close(handle)
    except (OSError, ValueError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise OutsizeError(
            f"tier {name!r}: {path} cannot be mapped with {nbytes:,} bytes ({why}); name a folder"
            " of a memory file system with that much free, or a DAX device"
        ) from None
    return region, _tensor(region, nbytes)


def _opened(path: Path) -> int:
    """A descriptor for reading and writing; nothing that has a name is left behind."""
    if path.is_dir():
        return unnamed(path)
    if stat.S_ISCHR(path.stat().st_mode) if path.exists() else False:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.unlink(path)
    return handle


def populate(region: Any, buffer: Tensor, start: int, nbytes: int, what: str) -> None:
    """Touch pages. start: a multiple of the page."""
    if nbytes == 0:
        return
    try:
        region.madvise(_POPULATE_WRITE, start, nbytes)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise OutsizeError(
                f"{what}: {nbytes:,} bytes of memory are not there ({error.strerror}); plan with"
                " less"
            ) from None
        # An older kernel, or a device that has no pages to fault in.
        ctypes.memset(buffer.data_ptr() + start, 0, min(nbytes, buffer.nbytes - start))
