"""Collectives among ranks of one host, through memory that all of them have mapped.

The region is a file of /dev/shm whose name is gone as soon as everyone has mapped it, so nothing is
left behind whatever happens. What is done with it is kernels/shared.cpp. Sums are formed in the
order of ranks, bfloat16 and float16 in float32 and rounded once: the bits are the same everywhere.

Whoever waits looks around twenty times a second (collectives/watch.py).
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from torch import Tensor

from outsize.collectives.collective import (
    DONE,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Call,
    Collective,
    Handle,
    ReduceScatter,
    Span,
    put,
)
from outsize.collectives.pieces import flattened, wider
from outsize.collectives.watch import Process, State, Watch
from outsize.errors import OutsizeError
from outsize.kernels import native
from outsize.torch_private import Store

MOST = 256  # workers of a group: as in shared.cpp
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2, torch.int64: 3, torch.int32: 4}
_NAMES = ("barrier", "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
_REGION = 4 << 20  # bytes of everybody's slots: most of a shared cache is left to others
_SLOT = (256 << 10, 1 << 20)  # bytes of a slot, at least and at most, two a worker
_YIELDS = 30  # times a worker gives way before it sleeps: some 10 us of an idle core
_WAIT = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32)


class Shared(Collective):
    """The workers `members` (ranks of the run) over one region; `rank`: the place of this one.

    Made by `over_memory`. An all-reduce of up to 16 KiB is one exchange of everything, quicker than
    two of parts; `received` counts it by the formula all the same.
    """

    def __init__(
        self,
        region: mmap.mmap,
        rank: int,
        members: Sequence[int],
        processes: Sequence[Process],
        patience: float,
    ) -> None:
        self.members, self.size, self.rank = tuple(members), len(members), rank
        self.received = Counter()
        self._watch = Watch(self, processes, patience)
        self._look = _WAIT(self._watch.look)
        self._region = region
        self._library = native.loaded()
        base = ctypes.addressof(ctypes.c_char.from_buffer(region))
        self._group: int | None = self._library.outsize_shared_open(
            *(base, rank, self.size, _slot(self.size), _YIELDS),
            ctypes.cast(self._look, ctypes.c_void_p),
        )

    def start(self, call: Call) -> Handle:
        """Over when this returns: the caller is who moves the bytes."""
        self.count(call)
        match call:
            case AllReduce(tensor, operation):
                wide = tensor if tensor.dtype in _DTYPES else tensor.to(wider(tensor.dtype))
                flat, back = flattened(wide)
                code = _code(flat)
                self._play(call, code, operation == "max", flat.data_ptr(), flat.numel())
                back()
                put(wide, tensor)
            case ReduceScatter(flat, spans, out):
                wide = flat if flat.dtype in _DTYPES else flat.to(wider(flat.dtype))
                sums = out if wide is flat else torch.empty_like(out, dtype=wide.dtype)
                ends = _spans(spans, 1)
                self._play(call, _code(wide), wide.data_ptr(), ends, sums.data_ptr())
                put(sums, out)
            case AllGather(mine, spans, out):
                ends = _spans(spans, out.element_size())
                self._play(call, mine.data_ptr(), ends, out.data_ptr())
            case AllToAll(given, out):
                self._play(call, *_parts(given), *_parts(out))
            case Broadcast(tensor, source):
                flat, back = flattened(tensor)
                self._play(call, flat.data_ptr(), flat.nbytes, source)
                back()
            case _:
                self._play(call)
        return DONE

    def _play(self, call: Call, *arguments: object) -> None:
        """shared.cpp's function of an operation."""
        function = getattr(self._library, f"outsize_shared_{call.name}")
        if function(self._open(), _NAMES.index(call.name), *arguments):
            assert self._watch.trouble is not None
            raise self._watch.trouble

    def states(self) -> tuple[State, ...]:
        """What every worker of the group is doing, read from the region."""
        return tuple(self.state(place) for place in range(self.size))

    def state(self, place: int) -> State:
        """What the worker at a place of the group is doing."""
        words = self._words(place)
        awaited = self.members[words[2]] if words[2] >= 0 else None
        return State(self.members[place], _NAMES[words[0]], words[1], awaited)

    def left(self, place: int) -> bool:
        """Whether that worker has closed the group."""
        return bool(self._words(place)[3])

    def aborted(self) -> bool:
        """Whether somebody has."""
        return bool(self._library.outsize_shared_aborted(self._open()))

    def abort(self, reason: str) -> None:
        """Make every worker that waits in this group, or will, fail. The reason is for this one."""
        if self._group is not None:
            self._watch.trouble = OutsizeError(reason)
            self._library.outsize_shared_abort(self._group)

    def close(self) -> None:
        """Give the memory back. No thread may be in an operation."""
        if self._group is not None:
            self._library.outsize_shared_close(self._group)
            self._group = None
            self._region.close()

    def _words(self, place: int) -> tuple[int, ...]:
        words = (ctypes.c_int32 * 4)()
        self._library.outsize_shared_state(self._open(), place, words)
        return tuple(words)

    def _open(self) -> int:
        if self._watch.trouble is not None:
            raise self._watch.trouble
        assert self._group is not None, "a group that was closed"
        return self._group


def usable() -> bool:
    """Whether this process can talk through shared memory: compiled kernels, /dev/shm."""
    return native.library() is not None and os.access("/dev/shm", os.W_OK)


def over_memory(
    store: Store,
    rank: int,
    members: Sequence[int],
    processes: Sequence[Process],
    patience: float,
) -> Shared | None:
    """The members' collective; they call this together. None, for all of them, where /dev/shm has
    no room. processes: the members', in their order."""
    native_bytes = native.loaded().outsize_shared_bytes(len(members), _slot(len(members)))
    if rank == 0:
        store.set("region", _create(native_bytes))
    path = store.get("region").decode()
    if not path:
        return None
    with open(path, "r+b") as file:
        region = mmap.mmap(file.fileno(), native_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    if store.add("mapped", 1) == len(members):
        os.unlink(path)
    return Shared(region, rank, members, processes, patience)


def _slot(size: int) -> int:
    """Bytes of a slot in a group of so many."""
    least, most = _SLOT
    return min(max(_REGION // size, least), most) // 128 * 128


def _create(size: int) -> str:
    """A new file of /dev/shm with its memory; "" where there is not enough."""
    path = Path("/dev/shm") / f"outsize-{os.getpid()}-{token_hex(8)}"
    with path.open("xb") as file:
        path.chmod(0o600)
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError:
            path.unlink()
            return ""
    return str(path)


def _code(tensor: Tensor) -> int:
    if tensor.dtype not in _DTYPES or tensor.device.type != "cpu":
        known = ", ".join(str(d).removeprefix("torch.") for d in _DTYPES)
        raise OutsizeError(
            f"a sum over shared memory of {tensor.dtype} on {tensor.device}; expected one of"
            f" {known} or float16 on cpu"
        )
    return _DTYPES[tensor.dtype]


def _spans(spans: Sequence[Span], width: int) -> ctypes.Array[ctypes.c_int64]:
    numbers = [end * width for span in spans for end in span]
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _parts(parts: Sequence[Tensor]) -> tuple[ctypes.Array[ctypes.c_void_p], ctypes.Array[Any]]:
    """Where tensors lie, and their bytes."""
    pointers, numbers = ctypes.c_void_p * len(parts), ctypes.c_int64 * len(parts)
    return pointers(*(x.data_ptr() for x in parts)), numbers(*(x.nbytes for x in parts))
