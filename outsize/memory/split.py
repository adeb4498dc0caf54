"""A linear layer shared by two executors (Zhao et al., "HeteGen", 2024).

A weight that rests where a slower processor reaches it is either brought to the device, which a
link limits, or multiplied where it is, which that processor limits. Both can be done at once: the
first rows of the weight are multiplied by the host while the others are brought to the device and
multiplied there. The share of the host is the one with which both end together.

O outputs, I inputs.
"""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize.errors import OutsizeError
from outsize.memory.store import Place, Store
from outsize.models.linear import Linear


@dataclass(frozen=True)
class Rates:
    """Bytes of weight a second, all for the same number of tokens: multiplied by the host where
    they rest, brought to the device, multiplied by the device."""

    host: float
    link: float
    device: float

    def __post_init__(self) -> None:
        for name in ("host", "link", "device"):
            if not getattr(self, name) > 0:
                raise OutsizeError(
                    f"rates: {name} {getattr(self, name)} B/s, expected a positive number; measure "
                    "it with this machine's probe"
                )

    def seconds(self, nbytes: float, share: float) -> float:
        """Time of a weight of nbytes of which the host multiplies `share`. A weight is whole on
        the device before it is multiplied there."""
        rest = (1 - share) * nbytes
        return max(share * nbytes / self.host, rest / self.link + rest / self.device)


def split(rates: Rates) -> float:
    """The host's share, between 0 and 1, with which both end together:

    share / host = (1 - share) * (1 / link + 1 / device), the paper's T_CPU = T_COM + T_GPU.
    """
    away = 1 / rates.link + 1 / rates.device
    return away / (away + 1 / rates.host)


def host_rows(rates: Rates, outputs: int, row_bytes: int) -> int:
    """The same in whole rows: of the two numbers next to it the one foretold to be faster."""
    low = int(split(rates) * outputs)
    choices = [rows for rows in (low, low + 1) if rows <= outputs]
    return min(choices, key=lambda rows: rates.seconds(outputs * row_bytes, rows / outputs))


class SplitLinear(nn.Module):
    """x (..., I) -> (..., O), in the place of a Linear; no gradients.

    The first `rows` rows of its weight stay in the host's memory and are multiplied by `host`, a
    thread of its own; the others rest on `store` and are read into `room` (uint8, shared by layers
    that do not run at once, on the device) for every call. Each output is made whole by one of
    the two, so nothing is summed across them.
    """

    def __init__(
        self, linear: Linear, rows: int, store: Store, room: Tensor, host: Executor
    ) -> None:
        super().__init__()
        weight = linear.weight.detach()
        outputs, inputs = weight.shape
        needed = (outputs - rows) * inputs * weight.itemsize
        if not 0 <= rows <= outputs or room.nbytes < needed:
            raise OutsizeError(
                f"{rows} rows of {outputs} on the host with a room of {room.nbytes:,} bytes; "
                f"expected 0 to {outputs} rows and a room of at least {needed:,} bytes"
            )
        self.linear, self.store, self.host = linear, store, host
        self.rows = rows
        bias = None if linear.bias is None else linear.bias.detach()
        self._far_bias = None if bias is None else bias[rows:]
        self._host_bias = None if bias is None else bias[:rows].to("cpu")
        self._host_weight = weight[:rows].to("cpu", copy=True)
        self._away = room[:needed].view(weight.dtype).view(outputs - rows, inputs)
        self._place = self._put(weight[rows:])
        linear.weight.data = weight.new_empty(0)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        near = self.host.submit(self._near, x)
        try:
            self._fetch(self._away)
            far = F.linear(x, self._away, self._far_bias)
        finally:
            first = near.result()  # also where reading failed: nothing may go on behind
        return torch.cat((first.to(x.device), far), dim=-1)

    def restore(self) -> Linear:
        """The Linear with its whole weight again. Raises OutsizeError where it cannot be read."""
        away = torch.empty_like(self._away)
        self._fetch(away)
        self.linear.weight.data = torch.cat((self._host_weight.to(away.device), away))
        return self.linear

    @torch.no_grad()
    def _near(self, x: Tensor) -> Tensor:
        return F.linear(x.to("cpu"), self._host_weight, self._host_bias)

    def _put(self, away: Tensor) -> Place:
        place = self.store.reserve(away.nbytes)
        if away.nbytes:
            self.store.write(place, away.contiguous())
        return place

    def _fetch(self, out: Tensor) -> None:
        if out.nbytes:
            self.store.read(self._place, out)
