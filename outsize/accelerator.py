"""Accelerators: devices with memory and queues of work of their own, whoever makes them.

What Outsize asks of one goes through torch.accelerator, and through this module where that has no
word; nothing else names a maker's devices. Host threads run ahead of such a device: they put work
on a stream and marks (events) between, and a mark orders streams without holding up a thread.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from outsize.errors import OutsizeError, counted
from outsize.torch_private import (
    DispatchMode,
    FakeTensor,
    clear_workspaces,
    disable_current_modes,
    extension,
    has_kernel,
    tree_leaves,
)

ALIGN = 4096  # bytes: of pinned memory's beginning
COMPILED = {"cuda": "CUDA", "xpu": "XPU"}  # devices Triton compiles for: how PyTorch keys kernels
MASKS = (  # what makers' runtimes read to say which devices a process sees
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK",
    "ONEAPI_DEVICE_SELECTOR",
)  # fmt: skip


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
        masks = [f"{mask} is {os.environ[mask]!r}" for mask in MASKS if mask in os.environ]
        where = f"here, where {' and '.join(masks)}" if masks else "here"
        raise OutsizeError(
            f"device is {name!r}, and PyTorch finds {has} {where}; use 'cpu'"
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


def take(name: str | None, index: int, workers: int) -> str:
    """The kind of device (as `find` has it) of one of the workers of this machine, which has that
    of its number to itself from now on. OutsizeError where there are fewer than workers."""
    kind = find(name).type
    if kind == "cpu":
        return kind
    if (count := torch.accelerator.device_count()) < workers:
        raise OutsizeError(
            f"device is {kind!r}, and {workers} workers share {counted(count, 'device')} of that"
            " kind; expected one each: start fewer, or set device=cpu"
        )
    torch.accelerator.set_device_index(index)
    return kind


def identity(device: torch.device) -> str:
    """What tells a device from others of its machine: processes that say the same have the same
    one. Where it has no number of its own, it is one of those that a process sees, so that two who
    see others may say different things of one device."""
    asked = getattr(torch.get_device_module(device), "get_device_properties", None)
    own = str(getattr(asked(device), "uuid", "")) if asked else ""
    if own.strip("0-"):  # some drivers give zeros
        return f"{device.type} {own}"
    seen = (f"{name}={os.environ[name]}" for name in MASKS if name in os.environ)
    return ", ".join((str(device), *seen))


def apart(device: torch.device) -> bool:
    """Whether a device's memory is not the host's, so that batches are copied there."""
    return device.type != "cpu"


def queues(device: torch.device) -> bool:
    """Whether a device has streams, so that the host runs ahead of it."""
    return device.type not in ("cpu", "meta")


def computes_in(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device multiplies and adds numbers of a type: its module in PyTorch is asked about
    bfloat16, which some imitate, and the device itself about any other."""
    asked = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    if not queues(device) or (dtype is torch.bfloat16 and asked is not None):
        return not queues(device) or bool(asked and asked())
    try:
        one = torch.ones(1, 1, dtype=dtype, device=device)
        return bool(torch.addmm(one, one, one).item() == 2)
    except (RuntimeError, TypeError):  # what PyTorch says of a type that is not there
        return False


def runs(operator: str, device: torch.device) -> bool:
    """Whether a device has a kernel for an operator of Outsize's own. One of PyTorch's extension
    kind may have one for all operators that it does not know."""
    key = "PrivateUse1" if device.type == extension() else COMPILED.get(device.type)
    return key is not None and has_kernel(operator, key)


@cache
def adds_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device adds products of half precision to float32 as they are, not rounded: it is
    asked once."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    with disable_current_modes():
        total, half = (torch.ones(8, 8, dtype=x, device=device) for x in (torch.float32, dtype))
        try:
            add_wide(total, half.t(), half)
        except (AttributeError, RuntimeError):  # no such operator; none for this device
            return False
        return bool((total == 9).all())


def add_wide(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where `adds_wide`. Not for autograd to record."""
    torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)


def groups(x: Tensor) -> bool:
    """Whether PyTorch's grouped_mm reads on the device where groups of such rows end: bfloat16's on
    NVIDIA's Hopper. Elsewhere it has the host wait for that."""
    if x.device.type != "cuda" or x.dtype is not torch.bfloat16 or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(x.device)[0] == 9


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


def later(numbers: Tensor) -> Callable[[], list[float]]:
    """A few numbers as they are now, 1-D, on their way to the host. Who calls what this gives, when
    the device has come past them, has them without a wait."""
    there = numbers.to("cpu", non_blocking=True)  # PyTorch makes the memory pinned
    made = mark(numbers.device)

    def read() -> list[float]:
        if made is not None and not made.query():
            made.synchronize()
        found: list[float] = there.tolist()
        return found

    return read


class Keeping(DispatchMode):
    """What the calling thread makes while this is on goes to a stream of another thread: memory
    that it lets go waits for that stream before somebody else gets it."""

    def __init__(self, stream: torch.Stream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        keep((x for x in tree_leaves(result) if isinstance(x, Tensor)), self._stream)
        return result


def keep(tensors: Iterable[Tensor], stream: torch.Stream) -> None:
    """Have memory that was made for another stream wait for this one before somebody gets it."""
    for x in tensors:
        if queues(x.device):
            x.record_stream(stream)


def keeping(device: torch.device) -> AbstractContextManager[Any]:
    """For a thread beside this one: what it makes is kept for what this one computes."""
    return Keeping(torch.accelerator.current_stream(device)) if queues(device) else nullcontext()


# -- recordings -----------------------------------------------------------------------------------


def records(device: torch.device) -> bool:
    """Whether work can be recorded on a device and played again without the host's part in it."""
    return device.type == "cuda" and not torch.version.hip


class Recorded:
    """What a call hands out to a device, recorded; the call runs while that is done, and must have
    run before, so that nothing is set up in it. It may neither wait nor read what lies on the host.
    made: what it gave, which each playing writes again."""

    def __init__(self, call: Callable[[], Any], device: torch.device) -> None:
        module = torch.get_device_module(device)
        self._graph = module.CUDAGraph()
        settle(device)
        with module.graph(self._graph, capture_error_mode="thread_local"):
            self.made = call()

    def play(self) -> None:
        """Behind what the calling thread has handed out."""
        self._graph.replay()


# -- memory ---------------------------------------------------------------------------------------


def grain(device: torch.device) -> int:
    """Bytes of which the device's allocator gives, and counts, whole multiples."""
    if not queues(device):
        return 1
    with disable_current_modes():  # not of a fake tensor, which takes nothing
        before = torch.accelerator.memory_allocated(device)
        one = torch.empty(1, dtype=torch.uint8, device=device)
        return max(one.nbytes, torch.accelerator.memory_allocated(device) - before)


@cache
def reserved(device: torch.device) -> int:
    """Bytes of a device that libraries of products take at their first call and keep: a share for
    each thread that multiplies, which are the calling one and autograd's. They hold these bytes
    from here on."""
    if not queues(device):
        return 0
    with disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        settle(device)
        clear_workspaces(device)
        before = torch.accelerator.memory_allocated(device)
        multiply(device)
        settle(device)
        return max(0, torch.accelerator.memory_allocated(device) - before)


def multiply(device: torch.device) -> None:
    """Products and their gradients, with and without a bias, in the types of training."""
    for dtype in (torch.float32, torch.bfloat16):
        if computes_in(device, dtype):
            x = torch.ones(64, 64, dtype=dtype, device=device, requires_grad=True)
            (x @ x + torch.addmm(x[0], x, x)).sum().backward()


def registers() -> bool:
    """Whether the accelerator's runtime can page-lock memory that is there."""
    return there() == "cuda"


def pinned(nbytes: int, what: str) -> Tensor:
    """Page-locked host memory for copies beside the computation: 1-D uint8, zero, from a multiple
    of ALIGN on. The runtime's own allocator may round it up.

    what: it is, for NotLocked where there is not as much.
    """
    try:
        room = torch.empty(nbytes + ALIGN, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:  # of each runtime its own, MemoryError's kin among them
        raise _unlocked(what, nbytes, str(error).partition("\n")[0]) from error
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


class NotLocked(OutsizeError):
    """Host memory is there and cannot be page-locked. found: so, without what to do."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"{found}; raise `ulimit -l`, plan with less host memory, let states rest on a disk, or"
            " say SIZE:pageable where its size is, which makes copies slower"
        )
        self.found = found


def _unlocked(what: str, nbytes: int, why: str) -> NotLocked:
    return NotLocked(f"{what}: {nbytes:,} bytes cannot be page-locked ({why})")


def registered(buffer: Tensor, what: str) -> Tensor:
    """The same host bytes (1-D uint8), page-locked for as long as they live.

    what: they are, for NotLocked where the system does not allow it.
    """
    runtime = torch.cuda.cudart()
    address = buffer.data_ptr()
    code = int(runtime.cudaHostRegister(address, max(buffer.nbytes, 1), 0))
    if code != 0:
        # The runtime would tell whoever launches next: let that be this, and forget it.
        with suppress(RuntimeError, AssertionError):
            torch.zeros(1, device="cuda")
        raise _unlocked(what, buffer.nbytes, f"CUDA error {code}")
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
