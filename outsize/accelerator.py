"""Accelerators: devices with memory and queues of work of their own, whoever makes them.

What Outsize asks of one goes through torch.accelerator, and through this module where that has no
word; nothing else names a maker's devices. Host threads run ahead of such a device: they put work
on a stream and marks (events) between, and a mark orders streams without holding up a thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from outsize.errors import OutsizeError
from outsize.torch_private import FakeTensor, disable_current_modes

ALIGN = 4096  # bytes: of pinned memory's beginning


def there() -> str:
    """The kind of accelerator that PyTorch finds here ("cuda", "xpu", "mps", ...; AMD's are "cuda"
    to PyTorch), or ""."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "" if found is None else found.type


def find(name: str | None = None) -> torch.device:
    """The device of this process: "cpu", or an accelerator by its kind, with its index.

    name: None or "auto" is the accelerator where there is one. OutsizeError where it is not there.
    """
    kind = there()
    if name == "cpu" or (name in (None, "auto") and not kind):
        return torch.device("cpu")
    if name not in (None, "auto", kind):
        has = f"only {kind!r}" if kind else "none"
        raise OutsizeError(
            f"device is {name!r}, and PyTorch finds {has} here; use 'cpu'"
            + (f", {kind!r} or 'auto'" if kind else " or 'auto'")
        )
    return torch.device(kind, torch.accelerator.current_device_index())


def named(device: torch.device | str | None) -> torch.device:
    """The device that a caller names: None is the CPU, "auto" an accelerator where there is one.
    OutsizeError where it is not there."""
    if device is None or device == "auto":
        return find("cpu" if device is None else None)
    wanted = torch.device(device)
    if wanted.type == "meta" or (wanted.index is not None and wanted.type in ("cpu", there())):
        return wanted
    return find(wanted.type)


def queues(device: torch.device) -> bool:
    """Whether a device has streams, so that the host runs ahead of it."""
    return device.type not in ("cpu", "meta")


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device computes in bfloat16, as far as its module in PyTorch says."""
    asked = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    return not queues(device) or asked is None or bool(asked())


# -- streams --------------------------------------------------------------------------------------


def stream(device: torch.device) -> torch.Stream | None:
    """A new stream; None where the host itself computes."""
    return torch.Stream(device=device) if queues(device) else None


def on(given: torch.Stream | None) -> AbstractContextManager[Any]:
    """What the calling thread hands out goes to a stream; None: as it is."""
    return nullcontext() if given is None else given


def mark(device: torch.device) -> torch.Event | None:
    """Where the calling thread's stream is now; None where nothing is ever behind."""
    if not queues(device):
        return None
    made = torch.Event(device)
    made.record(torch.accelerator.current_stream(device))
    return made


def follow(made: torch.Event | None, device: torch.device) -> None:
    """Have what the calling thread hands out from now on come behind a mark."""
    if made is not None:
        torch.accelerator.current_stream(device).wait_event(made)


def settle(device: torch.device) -> None:
    """Hold the calling thread up until its stream has done all that it was given."""
    if queues(device):
        torch.accelerator.current_stream(device).synchronize()


def keep(tensors: Iterable[Tensor]) -> None:
    """Have memory that was made for another stream wait for the calling thread's before somebody
    else gets it."""
    for x in tensors:
        if queues(x.device):
            x.record_stream(torch.accelerator.current_stream(x.device))


# -- memory ---------------------------------------------------------------------------------------


def grain(device: torch.device) -> int:
    """Bytes of which the device's allocator gives, and counts, whole multiples."""
    if not queues(device):
        return 1
    with disable_current_modes():  # not of a fake tensor, which takes nothing
        before = torch.accelerator.memory_allocated(device)
        one = torch.empty(1, dtype=torch.uint8, device=device)
        return max(one.nbytes, torch.accelerator.memory_allocated(device) - before)


def registers() -> bool:
    """Whether the accelerator's runtime can page-lock memory that is there."""
    return there() == "cuda"


def pinned(nbytes: int) -> Tensor:
    """Page-locked host memory for copies beside the computation: 1-D uint8, zero, from a multiple
    of ALIGN on. The runtime's own allocator may round it up."""
    room = torch.empty(nbytes + ALIGN, dtype=torch.uint8, pin_memory=True)
    start = -room.data_ptr() % ALIGN
    return room[start : start + nbytes].zero_()


def pin(tensor: Tensor) -> Tensor:
    """A host tensor in page-locked memory; one without values stays as it is."""
    there = isinstance(tensor, FakeTensor) or tensor.is_pinned()
    return tensor if there else tensor.pin_memory()


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor's values on a device, behind what the calling thread has handed out; it does
    not wait for them. Where the host computes, and of one that is there, the tensor."""
    if not queues(device) or tensor.device == device:
        return tensor.to(device)
    return pin(tensor).to(device, non_blocking=True)


def registered(buffer: Tensor, what: str) -> Tensor:
    """The same host bytes (1-D uint8), page-locked for as long as they live.

    what: they are, for OutsizeError where the system does not allow it.
    """
    runtime = torch.cuda.cudart()
    address = buffer.data_ptr()
    code = int(runtime.cudaHostRegister(address, max(buffer.nbytes, 1), 0))
    if code != 0:
        raise OutsizeError(
            f"{what}: {buffer.nbytes:,} bytes cannot be page-locked (CUDA error {code}); raise"
            " `ulimit -l` or plan with less host memory"
        )
    # The array dies before the mapping under it: it is unregistered while the bytes are there.
    array = buffer.numpy()
    weakref.finalize(array, runtime.cudaHostUnregister, address)
    return torch.from_numpy(array)


# -- random numbers -------------------------------------------------------------------------------


def drawing(tensors: Iterable[Tensor]) -> tuple[torch.device, ...]:
    """The accelerators on which tensors are, each once: they draw random numbers of their own."""
    return tuple(dict.fromkeys(x.device for x in tensors if queues(x.device)))


def random_state(device: torch.device) -> Tensor:
    """The state of an accelerator's generator: uint8, on the host."""
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Set what `random_state` gives."""
    torch.get_device_module(device).set_rng_state(state, device)


def undrawn(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """As if no random number had been drawn within, on the host and where tensors are."""
    devices = drawing(tensors)
    if not devices:
        return torch.random.fork_rng(())
    return torch.random.fork_rng(devices, device_type=devices[0].type)
