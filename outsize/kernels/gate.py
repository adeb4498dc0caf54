"""The gate of a feed-forward network: activation(gate) * up (Shazeer, "GLU variants", 2020).

Kept for the backward are gate and up only; the activation is made again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outsize.kernels import native
from outsize.kernels.rows import by_element
from outsize.torch_private import enter


@dataclass(frozen=True)
class Activation:
    """y = forward(x) and gx = backward(gy, x). A copied model has a copy: compare by ==."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


SILU = Activation(F.silu, lambda g, x: torch.ops.aten.silu_backward(g, x))


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up, elementwise; two tensors of one shape and dtype."""
    if not torch.is_grad_enabled():
        return _made(gate, up, activation)
    y: Tensor = enter(_Gate, gate, up, activation)
    return y


def _made(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    if activation == SILU and native.alike(gate, up, by="gate"):
        made = _run if native.bare(gate) else torch.ops.outsize.gate.default
        y: Tensor = made(gate, up)
        return y
    return plain(gate, up, activation)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _made(gate, up, activation)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        if ctx.activation == SILU and native.alike(g, gate, up, by="gate_backward"):
            fused = torch.ops.outsize.gate_backward.default
            ggate, gup = (_run_backward if native.bare(g) else fused)(g, gate, up)
            return ggate, gup, None
        return *plain_backward(g, gate, up, ctx.activation), None


def plain(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """The twin of outsize_gate."""
    return by_element(activation.forward, gate).mul_(up)


def plain_backward(
    g: Tensor, gate: Tensor, up: Tensor, activation: Activation
) -> tuple[Tensor, Tensor]:
    """(ggate, gup): the twin of outsize_gate_backward."""
    gup = activation.forward(gate).mul_(g)
    return activation.backward(g * up, gate), gup


def _allocate(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate)


def _run(gate: Tensor, up: Tensor) -> Tensor:
    y = _allocate(gate, up)
    native.loaded().outsize_gate(
        *(native.CODES[gate.dtype], gate.data_ptr(), up.data_ptr(), y.data_ptr()),
        *(gate.numel(), native.threads()),
    )
    return y


def _run_there(gate: Tensor, up: Tensor) -> Tensor:
    y = _allocate(gate, up)
    native.kernels().gate(gate, up, y)
    return y


def _allocate_backward(g: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate), torch.empty_like(up)


def _run_backward(g: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    ggate, gup = _allocate_backward(g, gate, up)
    native.loaded().outsize_gate_backward(
        *(native.CODES[gate.dtype], g.data_ptr(), gate.data_ptr(), up.data_ptr()),
        *(ggate.data_ptr(), gup.data_ptr(), gate.numel(), native.threads()),
    )
    return ggate, gup


def _run_backward_there(g: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    ggate, gup = _allocate_backward(g, gate, up)
    native.kernels().gate_backward(g, gate, up, ggate, gup)
    return ggate, gup


_OPERATORS = (
    native.define("gate(Tensor gate, Tensor up) -> Tensor", _run, _allocate, _run_there),
    native.define(
        "gate_backward(Tensor g, Tensor gate, Tensor up) -> (Tensor, Tensor)",
        _run_backward,
        _allocate_backward,
        _run_backward_there,
    ),
)
