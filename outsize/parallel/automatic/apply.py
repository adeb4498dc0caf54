"""Leave of somebody else's model this worker's part, as derived by
outsize/parallel/automatic/derive.py.

Its code stays as it is: weights become parts, counts of heads become smaller, rows sum their
product over the axis before their bias, and what the columns take has its gradient summed once for
all that take the same tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from outsize.collectives import Collective
from outsize.models.cuts import Cut
from outsize.parallel.automatic.derive import Derived, Group
from outsize.parallel.automatic.local import change_all
from outsize.parallel.check.trace import with_mask
from outsize.parallel.layouts import REPLICATED, Layout, Sharded, part_of, spans
from outsize.parallel.sums import cross


class Row(nn.Module):
    """x (..., part of d_in) -> (..., d_out), summed over the axis, and then the bias. outer: the
    dim of the weight that has d_out rows."""

    def __init__(self, like: nn.Module, outer: int, axis: Collective) -> None:
        super().__init__()
        self.outer, self.axis = outer, axis
        for name, parameter in like.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self.train(like.training)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.get_parameter("weight")
        y = F.linear(x, weight if self.outer == 0 else weight.t())
        y = cross(y, ("all_reduce", "none"), self.axis)
        bias = self._parameters.get("bias")
        return y if bias is None else y + bias


class Fan:
    """What several layers take, fanned out once: the first one's call makes it, the last one's lets
    it go."""

    def __init__(self, count: int, axis: Collective) -> None:
        self._count, self._axis = count, axis
        self._taken: Tensor | None = None
        self._given: Tensor | None = None
        self._left, self._learns = 0, False

    def hook(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Of a linear layer, which takes one tensor."""
        if args:
            return (self(args[0]), *args[1:]), kwargs
        return args, {name: self(value) for name, value in kwargs.items()}

    def __call__(self, x: Tensor) -> Tensor:
        # A part that is computed again takes the same tensor first without gradients.
        learns = torch.is_grad_enabled()
        if self._taken is not x or self._given is None or self._learns != learns:
            self._taken, self._left, self._learns = x, self._count, learns
            self._given = cross(x, ("none", "all_reduce"), self._axis)
        y, self._left = self._given, self._left - 1
        if not self._left:
            self._taken = self._given = None
        return y


class _Masks(TorchFunctionMode):
    """Attention takes this worker's heads of a mask that has all. Their gradient is gathered."""

    def __init__(self, axis: Collective) -> None:
        super().__init__()
        self._axis = axis

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            args, kwargs = with_mask(args, kwargs, self._taken)
        return func(*args, **kwargs)

    def _taken(self, mask: Tensor) -> Tensor:
        dim = mask.dim() - 3
        return cross(mask, ("take", "all_gather"), self._axis, dim, mask.shape[dim])


def _take_masks(module: nn.Module, axis: Collective) -> None:
    begun: list[ExitStack] = []  # of calls that have not ended

    def enter(*_: Any) -> None:
        begun.append(ExitStack())
        begun[-1].enter_context(_Masks(axis))

    def leave(*_: Any) -> None:
        begun.pop().close()

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


def spread(model: nn.Module, derived: Mapping[str, Derived], axis: Collective) -> dict[str, Cut]:
    """Leave this worker's part of the blocks; gives how each parameter of the model lies, by name.

    derived: by path of a block, as `derive` gives it, for axis.size workers. Every worker of the
    axis calls it, and then the model with the same inputs. What is not a derived block's stays
    whole: its gradients are the same on all workers.
    """
    cuts = {name: Cut(tuple(p.shape), shared=axis.size) for name, p in model.named_parameters()}
    for path, found in derived.items():
        assert found.size == axis.size, f"derived for {found.size} workers, not {axis.size}"
        block = model.get_submodule(path)
        for name, parameter in block.named_parameters():
            layout = found.parameters.get(name, REPLICATED)
            partial = name in found.reduced
            cuts[f"{path}.{name}"] = _cut(tuple(parameter.shape), layout, partial, axis)
        _spread(block, found, axis)
    return cuts


def _cut(shape: tuple[int, ...], layout: Layout, partial: bool, axis: Collective) -> Cut:
    if not isinstance(layout, Sharded):
        return Cut(shape, shared=axis.size, partial=partial)
    here = spans(shape[layout.dim], layout, axis.size, axis.rank)
    return Cut(shape, layout.dim, here, partial=partial)


def _spread(block: nn.Module, derived: Derived, axis: Collective) -> None:
    for name, layout in derived.parameters.items():
        whole = block.get_parameter(name)
        part = part_of(whole.detach(), layout, axis.size, axis.rank).clone()
        whole.data, whole.grad = part, None  # whoever else has the parameter has the part too
    change_all(block, derived.changes)
    for group in derived.groups:
        _connect(block, group, axis)


def _connect(block: nn.Module, group: Group, axis: Collective) -> None:
    parent, _, name = group.row.module.rpartition(".")
    row = block.get_submodule(group.row.module)
    setattr(block.get_submodule(parent), name, Row(row, group.row.outer, axis))
    for paths in group.fans:
        fan = Fan(len(paths), axis)
        for path in paths:
            block.get_submodule(path).register_forward_pre_hook(fan.hook, with_kwargs=True)
    for path, _ in group.masks:
        _take_masks(block.get_submodule(path), axis)
