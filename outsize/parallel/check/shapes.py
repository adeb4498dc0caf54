"""Shapes of operators that work element by element, without running them.

PyTorch runs these on the meta device by Python code that is slow, and whose first call imports the
compiler, which takes seconds. A checker that always runs cannot wait for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor

_POINTWISE_NAMES = (
    "abs add addcdiv addcmul bitwise_and bitwise_not bitwise_or ceil clamp clamp_max "
    "clamp_min copy cos div eq erf exp expm1 fill floor ge gelu gt hardtanh isfinite "
    "isinf isnan le leaky_relu log log1p logical_and logical_not logical_or lt "
    "masked_fill maximum minimum mish mul nan_to_num native_dropout ne pow reciprocal "
    "relu remainder rsqrt rsub sigmoid sign silu sin softplus sqrt square sub tanh "
    "where zero elu threshold bernoulli dropout gated"
)
POINTWISE = frozenset(_POINTWISE_NAMES.split())
_OTHERS = frozenset({"native_dropout", "masked_fill", "where", "copy", "bernoulli"})
_COMPARE = frozenset(
    {"eq", "ge", "gt", "isfinite", "isinf", "isnan", "le", "logical_and", "logical_not", "lt", "ne"}
)


def shaped(op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """An empty tensor like the one that an operator gives, or None where it has to be run."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    if not tensors or kwargs.get("dtype") is not None or not tensors[0].is_meta:
        return None
    if op in POINTWISE and op not in _OTHERS:
        return _pointwise(op, tensors)
    if op in ("linalg_vector_norm", "mean"):
        return _reduced(op, args, tensors[0])
    if op == "empty_like":  # PyTorch's own imports sympy for it: 0.4 s of each worker
        return torch.empty(tensors[0].shape, dtype=tensors[0].dtype, device="meta")
    return None


def _pointwise(op: str, tensors: list[Tensor]) -> Tensor | None:
    if not all(t.is_floating_point() for t in tensors):
        return None
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    if op in _COMPARE:
        return torch.empty(shape, dtype=torch.bool, device="meta")
    dtype = reduce(torch.promote_types, {t.dtype for t in tensors if t.dim()} or {tensors[0].dtype})
    return torch.empty(shape, dtype=dtype, device="meta")


def _reduced(op: str, args: tuple[Any, ...], x: Tensor) -> Tensor | None:
    _, *rest = args[1:] if op == "linalg_vector_norm" else args
    if not rest or rest[0] is None:
        return None
    dims, keep = rest[0], len(rest) > 1 and rest[1]
    gone = {d % x.dim() for d in dims}
    sizes = [1 if d in gone else s for d, s in enumerate(x.shape) if keep or d not in gone]
    return torch.empty(sizes, dtype=x.dtype, device="meta")
