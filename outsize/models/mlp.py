"""The feed-forward network of a block, plain or gated.

T tokens, D hidden, F feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize.kernels.gate import SILU, Activation, gated
from outsize.kernels.rows import by_element
from outsize.models.declared import Unit
from outsize.models.linear import Linear
from outsize.models.seams import Context

__all__ = ["ACTIVATIONS", "MLP", "Activation", "gated"]

aten = torch.ops.aten


_GELU = Activation(F.gelu, lambda g, x: aten.gelu_backward(g, x))
_GELU_TANH = Activation(
    lambda x: F.gelu(x, approximate="tanh"),
    lambda g, x: aten.gelu_backward(g, x, approximate="tanh"),
)
_RELU = Activation(F.relu, lambda g, x: aten.threshold_backward(g, x, 0))

ACTIVATIONS: Mapping[str, Activation] = {  # by the names that config.json files use
    "silu": SILU,
    "swish": SILU,
    "gelu": _GELU,
    "gelu_python": _GELU,
    "gelu_new": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
    "relu": _RELU,
}


class MLP(nn.Module):
    """x_TD -> y_TD: down(activation(gate(x)) * up(x)), or down(activation(up(x))). gating: how the
    former product is made. mixture: what an adapter puts in the place of all that."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        activation: str,
        has_gate: bool = True,
        bias: bool = False,
        unit: Unit = "inner",
    ) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.gate = Linear(hidden, inner, bias, "column", unit) if has_gate else None
        self.up = Linear(hidden, inner, bias, "column", unit)
        self.down = Linear(inner, hidden, bias, "row", unit)
        self.gating = gated
        self.mixture: Callable[[MLP, Tensor, Context], Tensor] | None = None

    def forward(self, x_TD: Tensor, ctx: Context | None = None) -> Tensor:
        if self.mixture is not None:
            assert ctx is not None, "a branch of a block has one"
            return self.mixture(self, x_TD, ctx)
        y_TD: Tensor = self.down(self.inner(x_TD))
        return y_TD

    def inner(self, x_TD: Tensor) -> Tensor:
        """(T, F): what `down` takes."""
        up_TF, gate = self.up(x_TD), self.gate
        if gate is None:
            return by_element(self.activation.forward, up_TF)
        return self.gating(gate(x_TD), up_TF, self.activation)
