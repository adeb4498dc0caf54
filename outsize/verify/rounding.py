"""What rounding may do to a plain run: the run in float64, where every result is moved at random by
as much as it may be off in another precision. docs/verify.md derives by how much.

A result is rounded once, by at most u of its size, and a sum of n terms n times more on its way, in
float32 at least. These errors are independent and of either sign, so that they grow with the square
root of n (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019). What
becomes of them in a whole model is seen by computing on with them (Parker, "Monte Carlo
arithmetic", 1997).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import log
from typing import Any

import torch
from torch import Tensor, nn

from outsize.plan import Precision
from outsize.torch_private import DispatchMode, tree_leaves

# What a rounding is off by, as a part of u: the root of the mean square. It is even within a unit
# of the last place, (1/3)^(1/2), and that unit is an octave's, (3 / (8 log 2))^(1/2).
USUAL = (1 / (8 * log(2))) ** 0.5
SUMS = torch.finfo(torch.float32).eps / 2  # u of what products and sums add up in, at least
# By name of the operator: which of its arguments are the two sides of a product.
_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
# What moves numbers and computes none.
_MOVES = {
    "clone", "copy_", "cat", "stack", "index", "index_select", "index_copy_", "gather",
    "embedding", "where", "masked_fill", "masked_fill_", "zero_", "fill_", "zeros",
    "zeros_like", "ones_like", "full", "full_like", "scalar_tensor", "new_zeros", "new_full",
    "empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "arange",
    "_to_copy", "repeat", "slice_backward", "select_backward", "constant_pad_nd", "neg", "abs",
    "relu", "max", "amax", "maximum", "threshold_backward", "sign", "detach", "_unsafe_view",
    "nll_loss_forward", "nll_loss_backward",
}  # fmt: skip
# What adds up along the last dim, or over tokens, in ways of its own.
_WITHIN = {
    "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data",
    "logsumexp", "cumsum", "native_layer_norm", "native_layer_norm_backward", "convolution",
    "convolution_backward", "linalg_vector_norm", "embedding_dense_backward", "index_add",
    "index_add_", "index_put", "index_put_", "scatter_add", "scatter_add_", "_index_put_impl_",
    "native_batch_norm", "native_batch_norm_backward",
}  # fmt: skip


def roundoff(dtype: str) -> float:
    """u: what a result is rounded by at most, as a part of it."""
    return float(torch.finfo(getattr(torch, dtype)).eps) / 2


class Rounding(DispatchMode):
    """Moves every result while it is entered. precision: the one that is meant; another seed moves
    them in other ways. side: to which one looks from a border, -1 or 1."""

    def __init__(self, precision: Precision, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.compute = roundoff(precision.compute)
        self.master = roundoff(precision.master or precision.compute)
        self.unit, self.side = self.compute, 2 * (seed % 2) - 1
        self.generator = torch.Generator().manual_seed(seed)
        self.computes: dict[Any, bool] = {}  # by operator, once it was met

    @contextmanager
    def at(self, unit: float) -> Iterator[None]:
        """Results in it are rounded to another unit."""
        before, self.unit = self.unit, unit
        try:
            yield
        finally:
            self.unit = before

    def begin(self, model: nn.Module, masters: Mapping[str, Tensor]) -> None:
        """First values are rounded to what the optimizer updates."""
        for master in masters.values():
            self._move(master.data, self.master)
        self.copied(model, masters)

    def copied(self, model: nn.Module, masters: Mapping[str, Tensor]) -> None:
        """What is computed with was rounded from what the optimizer updates."""
        for name, parameter in model.named_parameters():
            if masters.get(name) is not parameter:
                self._move(parameter.data, self.compute)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        computes = self.computes.get(func)
        if computes is None:
            computes = self.computes[func] = _computes(func)
        if computes:
            for y in (out,) if isinstance(out, Tensor) else tree_leaves(out):
                if isinstance(y, Tensor) and y.dtype == torch.float64 and y.numel():
                    self._rounded(y, func.overloadpacket.__name__, func, args, kwargs or {})
        return out

    def _rounded(self, y: Tensor, name: str, func: Any, args: Any, kwargs: Any) -> None:
        """Move a result. count, squares_: of each sum, its terms and the sum of their squares."""
        if name in _PRODUCTS:
            a, b = (args[i] for i in _PRODUCTS[name])
            count, squares = a.shape[-1], a.square() @ b.square()
        elif name in ("sum", "mean"):
            count = max(1, args[0].numel() // y.numel())
            squares = func(args[0].square(), *args[1:], **kwargs)
            squares = squares / count if name == "mean" else squares
        elif name in _WITHIN:
            count = y.shape[-1] if y.dim() else 1
            squares = y.square().mean(-1, keepdim=True) if y.dim() else y.square()
        else:
            self._move(y, self.unit)
            return
        unit = (self.unit**2 + count * min(self.unit, SUMS) ** 2) ** 0.5
        moved = (squares + y.square()).sqrt_().mul_(self._draw(y)).mul_(unit * USUAL)
        y.add_(moved.nan_to_num_(0.0, 0.0, 0.0))

    def _move(self, y: Tensor, unit: float) -> None:
        if not y.is_floating_point():  # codes, which nothing rounds
            return
        y.mul_(self._draw(y).mul_(unit * USUAL).add_(1))

    def _draw(self, y: Tensor) -> Tensor:
        # Normal to seven figures, which are drawn in a quarter of the time of sixteen.
        return torch.randn(y.shape, generator=self.generator).to(y.dtype)


def at(rounding: Rounding | None, unit: float) -> AbstractContextManager[None]:
    """`rounding.at`, where there is any."""
    return nullcontext() if rounding is None else rounding.at(unit)


def _computes(func: Any) -> bool:
    """Whether an operator gives numbers that were not there: no view, nothing that moves them."""
    views = (r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    return func.overloadpacket.__name__ not in _MOVES and not any(views)
