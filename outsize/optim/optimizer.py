"""The `Optimizer` seam: updates a range of a chunk, with PyTorch's fused kernels.

An optimizer declares its states (outsize/optim/declared.py) and its grain: how many elements of a
parameter, counted from its first, must be updated together. At grain 1 it sees 1-D ranges that may
begin and end anywhere, and may hold several parameters. At grain n it sees 1-D ranges of one
parameter each that begin at a multiple of n in it. At grain WHOLE it receives one whole parameter
at a time, in its shape, and so it does at any grain but 1 where the tensor axis cuts a parameter.
What it does not take goes to its `rest`.

AdamW: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, as torch.optim.AdamW.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from outsize.kernels.pieces import pieces
from outsize.optim.declared import StateSpec, check_numbers
from outsize.plan import Precision
from outsize.torch_private import fused_adamw_


class Rates(NamedTuple):
    """Of one update. step: 1 at the first of these weights. name: of the parameter that is updated
    as a whole; of a range, of the first in it."""

    step: int
    lr: float
    weight_decay: float
    name: str = ""


@runtime_checkable
class Optimizer(Protocol):
    """Updates weights from gradients, one range (or one matrix) at a time."""

    @property
    def lr(self) -> float: ...

    @property
    def weight_decay(self) -> float: ...

    @property
    def grain(self) -> int:
        """Elements of a parameter that are updated together: 1, a number, or WHOLE."""

    @property
    def rest(self) -> Optimizer | None:
        """What updates the parameters that this one does not take; None: it takes all."""

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether it updates a block's parameter of such a shape itself; where `rest` is not None.
        Parameters outside of blocks (embeddings, the head, the last norm) are always the rest's."""

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """What it keeps of every parameter that it takes."""

    @property
    def approximate(self) -> str | None:
        """What a plan must name under `approximate` for it; None: its maths is the plain one."""

    def update(
        self, weights: Tensor, gradients: Tensor, state: Mapping[str, Tensor], rates: Rates
    ) -> None:
        """Update `weights` in place."""


@runtime_checkable
class Apart(Optimizer, Protocol):
    """An optimizer that updates other weights than those that gradients are taken at. Evaluations,
    generation and files have the weights that it updates: a plan's master copy, which is there in
    any precision. The parameters of a forward pass in training follow from them and its states."""

    def taken_at(self, weights: Tensor, state: Mapping[str, Tensor], out: Tensor) -> None:
        """Write where gradients are taken, element by element, of any range, 1-D. out: in the
        precision that a plan computes in. State may hold more than its own."""


class OfAll:
    """Of an optimizer that takes all parameters, element by element where it says nothing else."""

    grain: ClassVar[int] = 1
    rest: ClassVar[None] = None
    approximate: ClassVar[str | None] = None

    def takes(self, shape: tuple[int, ...]) -> bool:
        return True


@dataclass(frozen=True)
class AdamW(OfAll):
    """lr: step size; betas: decay of the two moments; eps: added to the denominator;
    weight_decay: decoupled, a fraction of lr."""

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        check_numbers(lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return StateSpec("exp_avg"), StateSpec("exp_avg_sq")

    def update(
        self, weights: Tensor, gradients: Tensor, state: Mapping[str, Tensor], rates: Rates
    ) -> None:
        tensors = (weights, gradients, state["exp_avg"], state["exp_avg_sq"])
        if len({tensor.dtype for tensor in tensors}) == 1:
            self._fused(*tensors, rates)
            return
        # The kernel wants one dtype. The widest is that of a state, which is then no copy.
        wide = torch.promote_types(weights.dtype, state["exp_avg"].dtype)
        for parts in zip(*map(pieces, tensors), strict=True):
            w, g, first, second = (part.to(wide) for part in parts)
            self._fused(w, g, first, second, rates)
            for part, copy in ((parts[0], w), (parts[2], first), (parts[3], second)):
                if copy is not part:
                    part.copy_(copy)

    def _fused(
        self, weights: Tensor, gradients: Tensor, first: Tensor, second: Tensor, rates: Rates
    ) -> None:
        step = torch.full((), rates.step, dtype=torch.float32, device=weights.device)
        fused_adamw_(
            *([weights], [gradients], [first], [second], [], [step]),
            lr=rates.lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=rates.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )


@dataclass(frozen=True)
class SGD(OfAll):
    """Stochastic gradient descent with heavy-ball momentum, as torch.optim.SGD."""

    lr: float = 1e-2
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return (StateSpec("momentum"),) if self.momentum else ()

    def update(
        self, weights: Tensor, gradients: Tensor, state: Mapping[str, Tensor], rates: Rates
    ) -> None:
        direction = gradients.to(weights.dtype)
        if rates.weight_decay:
            direction = direction.add(weights, alpha=rates.weight_decay)
        if self.momentum:
            # The first step's buffer is the gradient itself; zeros times momentum add nothing.
            direction = state["momentum"].mul_(self.momentum).add_(direction)
        weights.add_(direction, alpha=-rates.lr)


def taker(optimizer: Optimizer, main: bool) -> Optimizer:
    """What updates the parameters that an optimizer takes, or (False) all others."""
    return optimizer if main or optimizer.rest is None else optimizer.rest


def precision_for(optimizer: Optimizer, precision: Precision) -> Precision:
    """A precision with the master copy that an optimizer needs, as wide as its states."""
    if precision.master is not None or not isinstance(optimizer, Apart):
        return precision
    return replace(precision, master=precision.optimizer)
