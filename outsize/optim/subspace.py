"""Subspaces: what optimizers share that keep their states of a part of each matrix's gradient.

A matrix lies with its shorter side as M rows and its longer one as N columns. A projector P (M, K)
has K columns, orthogonal to one another; P' G (K, N) is the gradient in the subspace. Every so
many updates of a matrix a new P is made, of the gradient or of numbers that follow from the
parameter's name and the update: the same on every worker, who all update the whole matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod, sqrt
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from outsize.models.random import fill_normal, uniform
from outsize.optim.declared import WHOLE, Shape, StateSpec
from outsize.optim.optimizer import AdamW

MOMENTS, PROJECTOR = ("exp_avg", "exp_avg_sq"), "projector"
SEED = 0  # of projectors: names and updates tell them apart
_SMALL = 1e-8  # beside norms that are divided by


def rank_of(shape: Shape, rank: int | None) -> int:
    """K for the matrices of a parameter; None: a quarter of their shorter side."""
    return max(1, min(shape[-2:]) // 4) if rank is None else rank


def takes(shape: Shape, rank: int | None) -> bool:
    """Matrices and stacks of matrices, whose shorter side is longer than K."""
    return len(shape) in (2, 3) and min(shape[-2:]) > rank_of(shape, rank)


@dataclass(frozen=True)
class Long:
    """The size of a state of the subspace: K times the longer side of each matrix."""

    rank: int | None

    def __call__(self, shape: Shape) -> int:
        return prod(shape[:-2]) * rank_of(shape, self.rank) * max(shape[-2:])


@dataclass(frozen=True)
class Short:
    """The size of a projector: K times the shorter side of each matrix."""

    rank: int | None

    def __call__(self, shape: Shape) -> int:
        return prod(shape[:-2]) * rank_of(shape, self.rank) * min(shape[-2:])


class Ranked(Protocol):
    """Settings of an optimizer in subspaces. rank: K; None: as rank_of has it."""

    @property
    def rank(self) -> int | None: ...


@dataclass(frozen=True)
class Subspaced:
    """What such optimizers have in common: they take matrices, each as a whole, and lr, betas, eps
    and weight_decay are those of `rest`, the AdamW of all other parameters."""

    rest: AdamW
    settings: Ranked
    grain: ClassVar[int] = WHOLE

    @property
    def lr(self) -> float:
        return self.rest.lr

    @property
    def weight_decay(self) -> float:
        return self.rest.weight_decay

    def takes(self, shape: tuple[int, ...]) -> bool:
        return takes(shape, self.settings.rank)

    @property
    def moments(self) -> tuple[StateSpec, ...]:
        """Both of the subspace: numbers of K N for each matrix."""
        return tuple(StateSpec(name, size=Long(self.settings.rank)) for name in MOMENTS)

    @property
    def projector(self) -> StateSpec:
        """One that is kept: numbers of M K for each matrix."""
        return StateSpec(PROJECTOR, size=Short(self.settings.rank))


def one(shape: Shape) -> int:
    """A number for each matrix."""
    return prod(shape[:-2])


class Matrix(NamedTuple):
    """One matrix of a parameter, as it lies: a view of the weights (M, N); its gradient, as wide as
    states are; its part of each state, 1-D; its name."""

    weights_MN: Tensor
    gradient_MN: Tensor
    states: Mapping[str, Tensor]
    name: str

    @property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Both of the subspace, (K, N)."""
        mean, square = (self.states[name].view(-1, self.gradient_MN.shape[1]) for name in MOMENTS)
        return mean, square

    @property
    def projector(self) -> Tensor:
        """The one that is kept, (M, K)."""
        return self.states[PROJECTOR].view(self.gradient_MN.shape[0], -1)

    def move(self, towards_MN: Tensor, rate: float, decay: float) -> None:
        """Decay the weights by a part, and move them against a direction."""
        w = self.weights_MN
        w.mul_(1 - decay).add_(towards_MN.to(w.dtype), alpha=-rate)


def matrices(
    weights: Tensor, gradients: Tensor, state: Mapping[str, Tensor], name: str
) -> Iterator[Matrix]:
    """Those of a parameter (R, C), or (E, R, C)."""
    rows, columns = weights.shape[-2:]
    wide = next(iter(state.values())).dtype
    all_w, all_g = (x.view(-1, rows, columns) for x in (weights, gradients))
    parts = {key: flat.view(len(all_w), -1) for key, flat in state.items()}
    for i, (w, g) in enumerate(zip(all_w, all_g, strict=True)):
        w, g = (w.T, g.T) if rows >= columns else (w, g)
        yield Matrix(w, g.to(wide), {k: part[i] for k, part in parts.items()}, f"{name}.{i}")


def leading(gradient_MN: Tensor, rank: int) -> Tensor:
    """P of the K left singular vectors of a gradient that belong to its largest values. Rounding
    decides their signs, and moments outlive a subspace: each one's largest number is positive, so
    that any mesh goes on alike."""
    left: Tensor = torch.linalg.svd(gradient_MN, full_matrices=False).U[:, :rank]
    return left * left.gather(0, left.abs().argmax(0, keepdim=True)).sign()


def gaussian(like_MN: Tensor, rank: int, name: str) -> Tensor:
    """(M, K) of normal numbers with a deviation of 1 / sqrt(K), that follow from a name: no
    projector, its columns are orthogonal in the mean alone."""
    made = like_MN.new_empty(like_MN.shape[0], rank)
    return fill_normal(made, SEED, name, std=1 / sqrt(rank))


def orthogonal(like_MN: Tensor, rank: int, name: str) -> Tensor:
    """P whose columns span a subspace drawn evenly, by a name."""
    basis: Tensor = torch.linalg.qr(gaussian(like_MN, rank, name)).Q
    return basis


def chosen(like_MN: Tensor, rank: int, name: str) -> Tensor:
    """P of K unit vectors, drawn by a name: K rows of a matrix as it lies."""
    rows = like_MN.shape[0]
    order = sorted(uniform(SEED, name, 0, rows).argsort()[:rank].tolist())
    made = like_MN.new_zeros(rows, rank)
    made[order, list(range(rank))] = 1
    return made


def begins(step: int, gap: int) -> bool:
    """Whether an update, counted from 1, has a new subspace."""
    return (step - 1) % gap == 0


def adam(matrix: Matrix, low_KN: Tensor, own: AdamW) -> Tensor:
    """Move both moments by a gradient of the subspace; the direction (K, N), whose start is not
    corrected (`correction` does)."""
    mean, square = matrix.moments
    mean.lerp_(low_KN, 1 - own.betas[0])
    square.mul_(own.betas[1]).addcmul_(low_KN, low_KN, value=1 - own.betas[1])
    return mean / (square.sqrt() + own.eps)


def correction(own: AdamW, step: int) -> float:
    """What makes a direction of `adam` as large as it will be, at an update counted from 1."""
    return sqrt(1 - own.betas[1] ** step) / (1 - own.betas[0] ** step)


def growing(scaled_MN: Tensor, last: Tensor, most: float, first: bool) -> Tensor:
    """A direction that is at most `most` times as long as the last one. last: its length, one
    element, which is set; first: there is none."""
    length = scaled_MN.norm()
    over = torch.ones_like(length)
    if not first:
        over = (length / (last[0] + _SMALL)).clamp(min=most) / most
    last[0] = length / over
    return scaled_MN / over


def ratio(new: Tensor, old: Tensor, dim: int | None) -> Tensor:
    """How much longer columns (dim 0) are, or all of it (None)."""
    found: Tensor = new.norm(dim=dim) / (old.norm(dim=dim) + _SMALL)
    return found
