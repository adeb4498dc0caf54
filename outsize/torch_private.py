"""Every private name of PyTorch that Outsize uses, so that a new release is checked in one place.

`tests/test_torch_private.py` calls each of them. What takes long to import (fake tensors bring
sympy) is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import GradientEdge
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

if TYPE_CHECKING:
    from torch._C._distributed_c10d import PrefixStore as PrefixStore
    from torch._C._distributed_c10d import ProcessGroupGloo as ProcessGroupGloo
    from torch._C._distributed_c10d import ReduceOp as ReduceOp
    from torch._C._distributed_c10d import Store as Store
    from torch._C._distributed_c10d import TCPStore as TCPStore
    from torch._C._distributed_c10d import Work as Work
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException as DataDependentOutputException,
    )
    from torch._subclasses.fake_tensor import (
        DynamicOutputShapeException as DynamicOutputShapeException,
    )
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorConverter as FakeTensorConverter
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily

_FAKE, _C10D = "torch._subclasses.fake_tensor", "torch._C._distributed_c10d"
_LATER = {
    "DataDependentOutputException": _FAKE,
    "DynamicOutputShapeException": _FAKE,
    "FakeTensor": _FAKE,
    "FakeTensorConverter": _FAKE,
    "FakeTensorMode": _FAKE,
    "unset_fake_temporarily": _FAKE,
    "PrefixStore": _C10D,
    "ProcessGroupGloo": _C10D,
    "ReduceOp": _C10D,
    "Store": _C10D,
    "TCPStore": _C10D,
    "Work": _C10D,
}

disable_current_modes = _python_dispatch._disable_current_modes
flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
safe_softmax = torch.ops.aten._safe_softmax.default
grouped_product = torch.ops.aten._grouped_mm.default
device_asked = torch.ops.prim.device.default  # as tensors that have no memory say where they lie
disabled_torch_function = torch._C._disabled_torch_function_impl
DisableTorchFunction = torch._C.DisableTorchFunctionSubclass
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
fused_adamw_ = torch._fused_adamw_


class DispatchMode(TorchDispatchMode):
    """A TorchDispatchMode that is called as it is.

    PyTorch wraps `__torch_dispatch__` into what switches torch.compile off: the first call imports
    the compiler, a second, and each takes as long as a small operator. Under a mode that calls its
    operators torch.compile traces nothing anyway.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def __getattr__(name: str) -> Any:
    """What is imported when it is asked for."""
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def extension() -> str:
    """The kind of device that some package has registered; "privateuseone" where none has."""
    return str(torch._C._get_privateuse1_backend_name())


def has_kernel(operator: str, key: str) -> bool:
    """Whether an operator ("library::name") does something under a key of the dispatcher."""
    return bool(torch._C._dispatch_has_computed_kernel_for_dispatch_key(operator, key))


def clear_workspaces(device: torch.device) -> None:
    """Have a device's library let go of the memory that it keeps for products to come, of every
    thread and stream; nothing where PyTorch has no word for that."""
    clear = getattr(torch._C, f"_{device.type}_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def rehearsing() -> bool:
    """Whether tensors that are made here have no memory."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(torch.empty(0), FakeTensor)


def fake_device(tensor: Tensor) -> torch.device | None:
    """Where a tensor seems to lie that has no memory; None where its mode is to be asked."""
    from torch._subclasses.fake_tensor import FakeTensor

    if type(tensor) is not FakeTensor or tensor.fake_mode.in_kernel_invocation:
        return None
    return tensor.fake_device


def fake_as(known: Mapping[str, Any], meta: Tensor, mode: FakeTensorMode) -> FakeTensor:
    """FakeTensor(mode, meta, device), which asks much of its arguments and sets each of twenty
    attributes by itself: they are known, of another that was made so."""
    from torch._subclasses.fake_tensor import FakeTensor

    device = known["_fake_device" if "_fake_device" in known else "fake_device"]  # before 2.12
    made: FakeTensor = torch.Tensor._make_subclass(
        FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
    )
    torch._C._set_throw_on_mutable_data_ptr(made)
    vars(made).update(known, fake_mode=mode)
    return made


def watched() -> bool:
    """Whether a mode of this thread sees what operators give."""
    return torch._C._len_torch_dispatch_stack() > 0


def unseen() -> bool:
    """Whether nobody sees the operators that this thread calls: no mode, transform or profiler."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._autograd._profiler_enabled()
    )


def enter(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """function.apply(*inputs), without a look at each input for what a transform of torch.func that
    has ended left behind: that has no memory, and our operators say so."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*inputs)
    return super(torch.autograd.Function, function).apply(*inputs)  # type: ignore[misc]


cdata: Callable[[UntypedStorage], int] = attrgetter("_cdata")  # what tells a storage from others


def storage_key(of: Tensor | UntypedStorage) -> int:
    """What tells a storage from all others that live, of fake tensors too."""
    return cdata(of.untyped_storage() if isinstance(of, Tensor) else of)


class StorageWatch:
    """Keeps the key of a storage from being another's; its bytes may go."""

    def __init__(self, of: Tensor) -> None:
        self._held = of.untyped_storage()._weak_ref()
        self._free: Any = torch.UntypedStorage._free_weak_ref  # torch may go before this does

    def __del__(self) -> None:
        self._free(self._held)


def storage_uses(of: Tensor) -> int:
    """How many references C++ and Python hold on a tensor's storage."""
    return int(torch._C._storage_Use_Count(of.untyped_storage()._cdata))


def differentiate(edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
    """torch.autograd.backward from edges of a graph, without its questions to each of them."""
    torch.autograd.Variable._execution_engine.run_backward(
        tuple(edges), tuple(gradients), False, False, (),
        allow_unreachable=True, accumulate_grad=True,
    )  # fmt: skip


def gradient(
    of: Tensor, gradient: Tensor, inputs: Sequence[Tensor], retain_graph: bool = False
) -> tuple[Tensor, ...]:
    """torch.autograd.grad of one output, without its questions, for which it imports sympy."""
    found: tuple[Tensor, ...] = torch.autograd.Variable._execution_engine.run_backward(
        (of,), (gradient,), retain_graph, False, tuple(inputs),
        allow_unreachable=False, accumulate_grad=False,
    )  # fmt: skip
    return found


def warm_fake_tensors() -> None:
    """Import what fake tensors bring along, which takes half a second."""
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
    leave_compiler_out()


class _Compiler:
    """Stands for torch._dynamo as long as nobody asks it for more than its settings."""

    def __init__(self, config: ModuleType) -> None:
        self.config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("torch._dynamo"), name)


def meta_kernels() -> None:
    """Have PyTorch compute with tensors that have no memory, where it was imported without."""
    importlib.import_module("outsize.torch_later").come()


def leave_compiler_out() -> None:
    """Let fake tensors do without torch.compile, whose import takes more than a second: they read
    its settings, and many operators of theirs are decorated to be let alone by it. It is imported
    when anything else of it is asked for, with these very settings, and then lets them alone."""
    with _LEAVING:  # another thread would find half of the settings
        _leave_compiler_out()


_LEAVING = threading.RLock()


@cache
def _leave_compiler_out() -> None:
    meta_kernels()
    name = "torch._dynamo"
    if name in sys.modules:
        return
    source = Path(torch.__file__).parent / "_dynamo" / "config.py"
    spec = importlib.util.spec_from_file_location(f"{name}.config", source)
    if spec is None or spec.loader is None:
        return
    config = sys.modules[f"{name}.config"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(config)
    torch._dynamo = _Compiler(config)
    plain = importlib.import_module("torch._compile")._disable_dynamo
    inner = plain(leave_compiler_out).__code__
    left, seen = list(_decorated()), set[int]()
    while left:
        function = left.pop()
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        inside = inspect.getclosurevars(function).nonlocals if function.__closure__ else {}
        if function.__code__ is inner and (own := inside.get("fn")) is not None:
            own.__dynamo_disable = _let_alone(function, own)
        left += inside.values()


def _decorated() -> Iterator[Any]:
    """Where functions are that the compiler shall let alone."""
    tables = importlib.import_module("torch._decomp").global_decomposition_table
    for table in tables.values():
        yield from table.values()
    fake = importlib.import_module(_FAKE)
    for space in (importlib.import_module("torch._refs"), fake.FakeTensor, fake.FakeTensorMode):
        yield from vars(space).values()


def _let_alone(decorated: Callable[..., Any], plain: Any) -> Callable[..., Any]:
    """What the decorator of `plain` calls: that itself, until there is a compiler."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not hasattr(sys.modules.get("torch._dynamo"), "disable"):
            return plain(*args, **kwargs)
        if getattr(plain, "__dynamo_disable", None) is call:
            del plain.__dynamo_disable  # the decorator asks the compiler now
        return decorated(*args, **kwargs)

    return call


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning-rate schedulers that the optimizer has made a step."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def hooks_of_steps(optimizer: torch.optim.Optimizer) -> int:
    """How many hooks an optimizer has that its own step would call."""
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def within(module: torch.nn.Module) -> torch.nn.Module:
    """The module that takes the arguments: of one that torch.compile or DataParallel has wrapped,
    whose own forward takes any."""
    name = "module" if isinstance(module, torch.nn.DataParallel) else "_orig_mod"
    inner = dict(module.named_children()).get(name)
    return module if inner is None else within(inner)


def transforming() -> bool:
    """Whether a transform of torch.func is under way, or forward-mode differentiation."""
    forward = torch.autograd.forward_ad._current_level >= 0
    return forward or torch._C._functorch.peek_interpreter_stack() is not None


def hooked(one: Tensor | torch.nn.Module) -> bool:
    """Whether a parameter, or a module, has hooks that see or change its gradients."""
    kinds = ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(one, kind, None) for kind in kinds)


def changes(tensor: Tensor) -> int:
    """How often a tensor has been changed in place, whatever else has the same memory."""
    return tensor._version


def parameters_here(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """A module's own parameters by name: the dict that it looks them up in."""
    return module._parameters


def buffers_here(module: torch.nn.Module) -> dict[str, Tensor | None]:
    """A module's own buffers by name: the dict that it looks them up in."""
    return module._buffers


def gloo_options(hostname: str, timeout: timedelta) -> Any:
    """Options of a gloo process group that listens on an interface, by its address or name."""
    gloo = importlib.import_module(_C10D).ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=hostname)]
    options._timeout = timeout
    return options


def device_transport(kind: str, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """What torch.distributed has for the tensors of a kind of accelerator, as a process group
    without a name: NCCL, XCCL, or what a device's own package has registered.

    Raises ValueError where nothing is registered.
    """
    dist = importlib.import_module("torch.distributed")
    name = dist.get_default_backend_for_device(kind).upper()
    if own := getattr(dist, f"ProcessGroup{name}", None):
        options = own.Options()
        options._timeout = timeout
        return own(store, rank, size, options)
    plugin = dist.Backend._plugins.get(name)
    if plugin is None:  # "mps" has gloo, by way of the host
        raise ValueError(f"torch.distributed has nothing for the tensors of {kind!r}")
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    options = importlib.import_module(_C10D)._DistributedBackendOptions()
    options.store, options.timeout = store, timeout
    options.group_rank, options.group_size = rank, size
    return plugin.creator_fn(options, None)


def start_coalescing(group: Any) -> None:
    """Messages of a process group from now on begin together, at `end_coalescing`."""
    group._start_coalescing()


def end_coalescing(group: Any) -> Work:
    """Begin them; gives the one handle of all."""
    work: Work = group._end_coalescing()
    return work


def sums_of_parts(group: Any, out: Tensor, flat: Tensor) -> Work:
    """A process group's own reduce-scatter of equal parts, in the order of ranks."""
    options = importlib.import_module(_C10D).ReduceScatterOptions()
    work: Work = group._reduce_scatter_base(out, flat, options)
    return work


def sums_of_uneven_parts(group: Any, out: Tensor, parts: list[Tensor]) -> Work:
    """A process group's own reduce-scatter of parts of several lengths, in the order of ranks."""
    options = importlib.import_module(_C10D).ReduceScatterOptions()
    work: Work = group.reduce_scatter([out], [parts], options)
    return work


def parts_of_all(group: Any, out: Tensor, mine: Tensor) -> Work:
    """A process group's own all-gather of equal parts, in the order of ranks."""
    work: Work = group._allgather_base(out, mine, importlib.import_module(_C10D).AllgatherOptions())
    return work
