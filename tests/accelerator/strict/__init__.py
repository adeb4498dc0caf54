"""The accelerator of the tests: a device of PyTorch's extension kind, stricter than a GPU.

    import strict
    strict.start(order="random", seed=3)
    x = torch.ones(8, device="strict")

Operators run the CPU's kernels. Memory, streams, events, copies and waits are as hard as on a GPU,
and harder where a GPU lets an error pass most of the time: docs/accelerator.md.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, ModuleType

import torch

from strict import group
from strict.building import NoCompiler, build, cache_folder
from strict.notes import Notes

__all__ = [
    "GIB", "ORDERS", "NoCompiler", "Notes", "begins", "load", "notes", "pieces_run",
    "pieces_waiting", "start", "waits",
]  # fmt: skip

GIB = 1 << 30
MOST_DEVICES = 8  # as in streams.h
_ORDERS = {"eager": 0, "random": 1, "last": 2, "demand": 3}

# Twenty ways in which a device may lag behind the host: (order, stream that is last, seed).
ORDERS: tuple[tuple[str, int, int], ...] = (
    ("demand", 0, 0),
    *(("last", stream, 0) for stream in range(4)),
    *(("random", 0, seed) for seed in range(15)),
)

_Callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_INSIDE = ("torch", "strict", "contextlib")  # modules whose lines are never the user's

_counts: list[tuple[Counter[tuple[str, str]], int]] = []  # and of which thread; 0: of all


@functools.cache
def load() -> ctypes.CDLL:
    """Build the device, if that was not done before, and make it known to PyTorch.

    Raises NoCompiler.
    """
    library = ctypes.CDLL(str(build(cache_folder())))
    library.strict_configure.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    library.strict_order.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_uint64]
    for name in ("strict_mark", "strict_gate", "strict_before", "strict_named"):
        getattr(library, name).restype = ctypes.c_void_p
    for name in ("reach", "forget", "open", "before", "named"):
        getattr(library, f"strict_{name}").argtypes = [ctypes.c_void_p]
    for name in ("strict_pieces_run", "strict_pieces_waiting", "strict_count_notes"):
        getattr(library, name).restype = ctypes.c_int64
    library.strict_say.argtypes = [ctypes.c_int64, ctypes.c_int64]
    library.strict_label.argtypes = [ctypes.c_int64]
    library.strict_copy_notes.argtypes = [ctypes.c_void_p]
    torch.utils.rename_privateuse1_backend("strict")
    torch._register_device_module("strict", _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    library.strict_on_wait(_on_wait)
    group.register(library)
    return library


def start(
    order: str = "random",
    last: int = 0,
    seed: int = 0,
    *,
    devices: int = 1,
    device_bytes: int = 2 * GIB,
    pinned_bytes: int = GIB,
) -> None:
    """Begin anew: what is queued runs, cached memory is given back, statistics are zero.

    order: "eager", "random", "last" (the stream numbered `last` runs only when the host waits for
    it; 0 is the default stream, others follow as they are asked for) or "demand" (nothing runs
    before the host waits). seed: of the order in which pieces of streams run. devices: 0 is as on
    a machine whose devices are all hidden from the process.
    """
    if order not in _ORDERS:
        raise ValueError(f"order is {order!r}; expected one of {', '.join(_ORDERS)}")
    library = load()
    if not 0 <= devices <= MOST_DEVICES:
        raise ValueError(f"devices is {devices}; expected 0 to {MOST_DEVICES}")
    library.strict_configure(devices, device_bytes, pinned_bytes)
    library.strict_order(_ORDERS[order], last, seed)
    for index in range(devices):
        torch.accelerator.reset_peak_memory_stats(index)
        torch.accelerator.reset_accumulated_memory_stats(index)


def begins(
    device: str, orders: Sequence[tuple[str, int, int]] = ORDERS, device_bytes: int = 2 * GIB
) -> Iterator[tuple[str, int, int]]:
    """Begin anew in each of the orders, which a test goes through; once on a device that is a real
    one and has an order of its own."""
    for order in orders if device == "strict" else orders[:1]:
        if device == "strict":
            start(*order, device_bytes=device_bytes)
        yield order


def loaded_by_itself() -> None:
    """Called by PyTorch in every process that has tests/accelerator and its folder `autoload` on
    its path. STRICT_ORDER: "random", or "last" with STRICT_LAST; where it is not set, nothing is
    done. STRICT_SEED, STRICT_DEVICES, STRICT_BYTES as `start` has them."""
    order = os.environ.get("STRICT_ORDER")
    if order:
        last, seed, devices = (
            int(os.environ.get(f"STRICT_{name}", default))
            for name, default in (("LAST", 0), ("SEED", 0), ("DEVICES", 1))
        )
        limit = int(os.environ.get("STRICT_BYTES", 2 * GIB))
        start(order, last, seed, devices=devices, device_bytes=limit)


def pieces_run() -> int:
    """How many pieces of work have run since the process began."""
    return int(load().strict_pieces_run())


def pieces_waiting() -> int:
    """How many pieces of work streams were given that have not run yet."""
    return int(load().strict_pieces_waiting())


def notes() -> Notes:
    """Of what must come before what, of the work that is given while they are taken."""
    return Notes(load())


@contextmanager
def waits(mine: bool = False) -> Iterator[Counter[tuple[str, str]]]:
    """How often the host waits for the device within: {(kind, "file:line"): times}. mine: in the
    calling thread alone."""
    counted: Counter[tuple[str, str]] = Counter()
    _counts.append((counted, threading.get_ident() if mine else 0))
    try:
        yield counted
    finally:
        _counts[:] = [each for each in _counts if each[0] is not counted]


@_Callback
def _on_wait(what: bytes) -> None:
    if _counts:
        where = _line(sys._getframe(1))
        for counted, thread in _counts:
            if thread in (0, threading.get_ident()):
                counted[what.decode(), where] += 1


def _line(frame: FrameType | None) -> str:
    """The innermost line outside PyTorch and this package."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _INSIDE:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "a thread of autograd's"


def _module() -> ModuleType:
    """torch.strict: what PyTorch asks of a device's module."""
    made = ModuleType("torch.strict")
    made.__dict__.update(
        is_available=lambda: load().strict_devices() > 0,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: load().strict_devices(),
        current_device=torch._C._accelerator_getDeviceIndex,
        set_device=torch._C._accelerator_setDeviceIndex,
        manual_seed=_manual_seed,
        manual_seed_all=_manual_seed_all,
        get_rng_state=_get_rng_state,
        set_rng_state=_set_rng_state,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    )
    return made


def _generator(device: torch.device | str | int) -> torch.Generator:
    index = device if isinstance(device, int) else torch.device(device).index
    index = torch.accelerator.current_device_index() if index is None else index
    return torch.ops.strict.default_generator(index)


def _manual_seed(seed: int) -> None:
    _generator(torch.accelerator.current_device_index()).manual_seed(seed)


def _manual_seed_all(seed: int) -> None:
    for index in range(torch.accelerator.device_count()):
        _generator(index).manual_seed(seed)


def _get_rng_state(device: torch.device | str | int = "strict") -> torch.Tensor:
    return _generator(device).get_state()


def _set_rng_state(state: torch.Tensor, device: torch.device | str | int = "strict") -> None:
    _generator(device).set_state(state)
