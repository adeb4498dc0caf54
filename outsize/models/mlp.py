"""The feed-forward network of a block, plain or gated (Shazeer, "GLU variants", 2020).

T tokens, D hidden, F feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize.models.linear import Linear
from outsize.models.seams import Context

aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """y = forward(x) and gx = backward(gy, x)."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


_SILU = Activation(F.silu, lambda g, x: aten.silu_backward(g, x))
_GELU = Activation(F.gelu, lambda g, x: aten.gelu_backward(g, x))
_GELU_TANH = Activation(
    lambda x: F.gelu(x, approximate="tanh"),
    lambda g, x: aten.gelu_backward(g, x, approximate="tanh"),
)
_RELU = Activation(F.relu, lambda g, x: aten.threshold_backward(g, x, 0))

ACTIVATIONS: Mapping[str, Activation] = {  # by the names that config.json files use
    "silu": _SILU,
    "swish": _SILU,
    "gelu": _GELU,
    "gelu_python": _GELU,
    "gelu_new": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
    "relu": _RELU,
}


class _Gate(torch.autograd.Function):
    """activation(gate) * up, keeping gate and up only: the activation is made again."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return activation.forward(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        gup = ctx.activation.forward(gate).mul_(g)
        return ctx.activation.backward(g * up, gate), gup, None


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up, elementwise."""
    y: Tensor = _Gate.apply(gate, up, activation)  # type: ignore[no-untyped-call]
    return y


class MLP(nn.Module):
    """x_TD -> y_TD: down(activation(gate(x)) * up(x)), or down(activation(up(x)))."""

    def __init__(
        self, hidden: int, inner: int, activation: str, has_gate: bool = True, bias: bool = False
    ) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.gate = Linear(hidden, inner, bias, use="column") if has_gate else None
        self.up = Linear(hidden, inner, bias, use="column")
        self.down = Linear(inner, hidden, bias, use="row")

    def forward(self, x_TD: Tensor, ctx: Context | None = None) -> Tensor:
        up_TF = self.up(x_TD)
        if self.gate is None:
            inner_TF = self.activation.forward(up_TF)
        else:
            inner_TF = gated(self.gate(x_TD), up_TF, self.activation)
        y_TD: Tensor = self.down(inner_TF)
        return y_TD
