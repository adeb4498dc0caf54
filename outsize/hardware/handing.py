"""How fast the host hands out a training step to a device with queues.

The host runs ahead of such a device and puts one operator after the other on its stream. An
operator in a tight loop says little of that: those of a step come from modules, from autograd's
Functions and from its backward thread. So a chain of tiny layers, whose kernels take next to no
time, goes forwards and backwards, and what that takes is divided by its operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize import accelerator
from outsize.hardware.hardware import Rate
from outsize.kernels.linear import linear
from outsize.torch_private import DispatchMode

if TYPE_CHECKING:
    from outsize.hardware.measure import Timer

LAYERS, TOKENS, WIDTH = 16, 8, 16
_FREE = ("empty", "_unsafe_view", "detach")  # names of what starts no work, beside views


def handed(device: torch.device, timer: Timer, date: str) -> Rate:
    """Seconds of the host for each operator of a training step."""
    bf16 = accelerator.computes_in(device, torch.bfloat16)
    chain = _Chain(torch.bfloat16 if bf16 else torch.float32, device)
    chain.step()
    with _Calls() as calls:
        chain.step()
    note = "a chain of small layers, forwards and backwards"
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


class _Chain:
    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.layers = nn.Sequential(*(_Layer(dtype, device) for _ in range(LAYERS)))
        self.x_TD = torch.ones(TOKENS, WIDTH, dtype=dtype, device=device, requires_grad=True)
        self.gy_TD = torch.ones(TOKENS, WIDTH, dtype=dtype, device=device)

    def step(self) -> None:
        """Forwards and backwards."""
        with torch.enable_grad():
            torch.autograd.grad(self.layers(self.x_TD), self.x_TD, self.gy_TD)


class _Calls(DispatchMode):
    """Counts the operators that start work while entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        self.count += not (func.is_view or name.startswith(_FREE))
        return func(*args, **(kwargs or {}))
