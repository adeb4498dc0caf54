"""The `Optimizer` seam: updates a range of a chunk, with PyTorch's fused kernels.

An element-wise optimizer sees 1-D ranges that may begin and end inside a parameter; `layout` says
so. A matrix optimizer says "matrix" and receives one whole parameter at a time, in its shape; what
is no matrix of a block goes to its `rest`.

AdamW: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, as torch.optim.AdamW.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from outsize.kernels.pieces import pieces


class Optimizer(Protocol):
    """Updates weights from gradients, one range (or one matrix) at a time."""

    @property
    def lr(self) -> float: ...

    @property
    def weight_decay(self) -> float: ...

    @property
    def layout(self) -> Literal["elementwise", "matrix"]: ...

    @property
    def rest(self) -> Optimizer | None:
        """What updates the parameters that are no matrices of blocks; None: it does so itself."""

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the buffers it keeps, each as large as the weights."""

    def update(
        self,
        weights: Tensor,
        gradients: Tensor,
        state: Mapping[str, Tensor],
        step: int,
        lr: float,
        weight_decay: float,
    ) -> None:
        """Update `weights` in place. step: 1 at the first update of these weights."""


@dataclass(frozen=True)
class AdamW:
    """lr: step size; betas: decay of the two moments; eps: added to the denominator;
    weight_decay: decoupled, a fraction of lr."""

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    layout: Literal["elementwise"] = "elementwise"

    @property
    def rest(self) -> None:
        return None

    @property
    def states(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def update(
        self,
        weights: Tensor,
        gradients: Tensor,
        state: Mapping[str, Tensor],
        step: int,
        lr: float,
        weight_decay: float,
    ) -> None:
        count = torch.tensor(float(step), dtype=torch.float32, device=weights.device)
        tensors = (weights, gradients, state["exp_avg"], state["exp_avg_sq"])
        if len({tensor.dtype for tensor in tensors}) == 1:
            self._fused(*tensors, count, lr, weight_decay)
            return
        # The kernel wants one dtype. The widest is that of a state, which is then no copy.
        wide = torch.promote_types(weights.dtype, state["exp_avg"].dtype)
        for parts in zip(*map(pieces, tensors), strict=True):
            w, g, first, second = (part.to(wide) for part in parts)
            self._fused(w, g, first, second, count, lr, weight_decay)
            for part, copy in ((parts[0], w), (parts[2], first), (parts[3], second)):
                if copy is not part:
                    part.copy_(copy)

    def _fused(
        self,
        weights: Tensor,
        gradients: Tensor,
        first: Tensor,
        second: Tensor,
        count: Tensor,
        lr: float,
        weight_decay: float,
    ) -> None:
        torch._fused_adamw_(
            [weights],
            [gradients],
            [first],
            [second],
            [],
            [count],
            lr=lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with heavy-ball momentum, as torch.optim.SGD."""

    lr: float = 1e-2
    momentum: float = 0.0
    weight_decay: float = 0.0
    layout: Literal["elementwise"] = "elementwise"

    @property
    def rest(self) -> None:
        return None

    @property
    def states(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def update(
        self,
        weights: Tensor,
        gradients: Tensor,
        state: Mapping[str, Tensor],
        step: int,
        lr: float,
        weight_decay: float,
    ) -> None:
        direction = gradients.to(weights.dtype)
        if weight_decay:
            direction = direction.add(weights, alpha=weight_decay)
        if self.momentum:
            # The first step's buffer is the gradient itself; zeros times momentum add nothing.
            direction = state["momentum"].mul_(self.momentum).add_(direction)
        weights.add_(direction, alpha=-lr)


def taker(optimizer: Optimizer, matrices: bool) -> Optimizer:
    """What updates the matrices of blocks, or (False) all other parameters."""
    return optimizer if matrices or optimizer.rest is None else optimizer.rest
