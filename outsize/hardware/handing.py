"""What an operator of a training step takes of the host, beside its work.

The host runs ahead of a device with queues and puts one operator after the other on its stream; on
a processor the call is a part of the operator's time. An operator in a tight loop says little of
either: those of a step come from modules, from autograd's Functions and from its backward thread.
So a chain of tiny layers, whose kernels take next to no time, goes forwards and backwards, and what
that takes is divided by its operators. On a processor the layers are blocks of a decoder, by the
kernels that a run has there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize import accelerator
from outsize.hardware.hardware import Rate
from outsize.kernels import attention
from outsize.kernels.gate import SILU, gated
from outsize.kernels.linear import linear
from outsize.kernels.norm import rms_norm
from outsize.kernels.rope import turn
from outsize.torch_private import DispatchMode, gradient

if TYPE_CHECKING:
    from outsize.hardware.measure import Timer

LAYERS, TOKENS, WIDTH = 16, 8, 16
BLOCKS, HEADS = 1, 2  # a block is a stage, whose backward pass begins by itself
_FREE = ("empty", "_unsafe_view", "detach")  # names of what starts no work, beside views


def handed(device: torch.device, timer: Timer, date: str) -> Rate:
    """Seconds of the host for each operator of a training step."""
    apart = accelerator.queues(device)
    bf16 = apart and accelerator.computes_in(device, torch.bfloat16)
    dtype = torch.bfloat16 if bf16 else torch.float32
    layers = [
        _Layer(dtype, device) if apart else _Block() for _ in range(LAYERS if apart else BLOCKS)
    ]
    chain = _Chain(layers, dtype, device)
    chain.step()
    with _Calls() as calls:
        chain.step()
    note = f"a chain of small {'layers' if apart else 'blocks'}, forwards and backwards"
    return Rate(timer(chain.step, device) / calls.count, "s", "probe", date, note=note)


class _Layer(nn.Module):
    """A product whose weight's gradient goes to a buffer of its own, and small operators."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        weight_DD = torch.full((WIDTH, WIDTH), 1 / WIDTH, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight_DD)
        self.total_DD = torch.zeros(WIDTH, WIDTH, device=device)

    def forward(self, x_TD: Tensor) -> Tensor:
        y_TD = linear(x_TD, self.weight, None, self._take)
        return x_TD + (F.silu(y_TD.float()) * 0.5).to(x_TD.dtype)

    def _take(self, weight: Tensor, compute: Callable[[Tensor], None]) -> None:
        compute(self.total_DD)


class _Product(nn.Module):
    """One weight whose gradient goes to a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 1 / WIDTH))
        self.total_DD = torch.zeros(WIDTH, WIDTH)

    def forward(self, x_TD: Tensor) -> Tensor:
        return linear(x_TD, self.weight, None, self._take)

    def _take(self, weight: Tensor, compute: Callable[[Tensor], None]) -> None:
        compute(self.total_DD)


class _Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, self.weight, 1e-5, 0.0)


class _Block(nn.Module):
    """Norms, seven products, rotations, attention and a gate, as a decoder's block has them."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(_Norm() for _ in range(2))
        self.products = nn.ModuleList(_Product() for _ in range(7))
        self.angles = (
            torch.ones(TOKENS, WIDTH // HEADS // 2),
            torch.zeros(TOKENS, WIDTH // HEADS // 2),
        )

    def forward(self, x_TD: Tensor) -> Tensor:
        q, k, v, out, gate, up, down = self.products
        n_TD = self.norms[0](x_TD)
        q_THK, k_THK, v_THK = (each(n_TD).view(TOKENS, HEADS, -1) for each in (q, k, v))
        q_THK, k_THK = (turn(each, *self.angles, False) for each in (q_THK, k_THK))
        x_TD = x_TD + out(self._attended(q_THK, k_THK, v_THK).reshape(TOKENS, WIDTH))
        n_TD = self.norms[1](x_TD)
        made: Tensor = x_TD + down(gated(gate(n_TD), up(n_TD), SILU))
        return made

    def _attended(self, q_THK: Tensor, k_THK: Tensor, v_THK: Tensor) -> Tensor:
        if attention.fits(q_THK, k_THK, v_THK):
            return attention.attend(q_THK, k_THK, v_THK, (0, TOKENS), 1.0, None)
        q, k, v = (x_THK.transpose(0, 1)[None] for x_THK in (q_THK, k_THK, v_THK))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)


class _Chain:
    def __init__(
        self, layers: Iterable[nn.Module], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers = nn.Sequential(*layers)
        self.x_TD = torch.ones(TOKENS, WIDTH, dtype=dtype, device=device, requires_grad=True)
        self.gy_TD = torch.ones(TOKENS, WIDTH, dtype=dtype, device=device)

    def step(self) -> None:
        """Forwards and backwards."""
        with torch.enable_grad():
            gradient(self.layers(self.x_TD), self.gy_TD, (self.x_TD,))


class _Calls(DispatchMode):
    """Counts the operators that start work while entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        self.count += not (func.is_view or name.startswith(_FREE))
        return func(*args, **(kwargs or {}))
