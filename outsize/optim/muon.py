"""Muon: momentum whose direction is the nearest orthogonal matrix, for the matrices of blocks.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; the factor that lets
one learning rate serve Muon and AdamW: Liu et al., "Muon is Scalable for LLM Training", 2025.

R rows, C columns, E matrices of a stack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import ClassVar, Literal

import torch
from torch import Tensor

from outsize.optim.declared import WHOLE, StateSpec, check_numbers
from outsize.optim.optimizer import AdamW, Optimizer, Rates

# Of the quintic whose slope at zero is steepest while singular values end near 1 (Jordan's).
_A, _B, _C = 3.4445, -4.7750, 2.0315
QUICK = {"cpu": torch.float32}  # what directions are computed in, where it is not bfloat16
_FLOOR = 1e-7  # of the norm that a direction is divided by

Scale = Literal["original", "match_rms_adamw"]


@dataclass(frozen=True)
class Muon:
    """Updates a matrix (R, C) or each of a stack (E, R, C) as torch.optim.Muon does.

    scale: the factor on lr, sqrt(max(1, R / C)) as its author has it, or 0.2 sqrt(max(R, C)), which
    makes steps as large as AdamW's. rest: for embeddings, heads and vectors; its own lr and weight
    decay are not used: a job gives both optimizers those of its groups.

    Keeps one buffer for matrices where AdamW keeps two. Orthogonal directions are computed in
    bfloat16; on processors, of which many multiply that far slower, in float32; in float64 for
    weights in float64, so that layouts can be compared. An update needs 1.5 to 2 times the bytes of
    one matrix of that dtype beside it.
    """

    lr: float = 3e-4
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    scale: Scale = "match_rms_adamw"
    iterations: int = 5
    rest: Optimizer = field(default_factory=AdamW)

    def __post_init__(self) -> None:
        check_numbers(lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)

    grain: ClassVar[int] = WHOLE
    approximate: ClassVar[None] = None

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return (StateSpec("momentum"),)

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Matrices, and stacks of matrices."""
        return len(shape) in (2, 3) and min(shape[-2:]) > 1

    def update(
        self, weights: Tensor, gradients: Tensor, state: Mapping[str, Tensor], rates: Rates
    ) -> None:
        """weights: (R, C) or (E, R, C); the others have its shape."""
        mean = state["momentum"]
        gradients = gradients.to(mean.dtype)
        mean.lerp_(gradients, 1 - self.momentum)
        direction = gradients.lerp(mean, self.momentum) if self.nesterov else mean
        quick = QUICK.get(weights.device.type, torch.bfloat16)
        dtype = torch.float64 if weights.dtype == torch.float64 else quick
        rate = rates.lr * self._factor(*weights.shape[-2:])
        weights.mul_(1 - rates.lr * rates.weight_decay)
        shape = (-1, *weights.shape[-2:])
        for matrix, towards in zip(weights.view(shape), direction.view(shape), strict=True):
            matrix.add_(orthogonal(towards, dtype, self.iterations), alpha=-rate)

    def _factor(self, rows: int, columns: int) -> float:
        if self.scale == "original":
            return sqrt(max(1.0, rows / columns))
        return 0.2 * sqrt(max(rows, columns))


def orthogonal(matrix_RC: Tensor, dtype: torch.dtype, iterations: int) -> Tensor:
    """About U V' of the matrix U S V', in `dtype`: singular values within 0.7 .. 1.2 after five
    Newton-Schulz iterations, but for those that are nothing beside the largest."""
    tall = matrix_RC.shape[0] > matrix_RC.shape[1]
    x = (matrix_RC.T if tall else matrix_RC).to(dtype)
    x = x / x.norm().clamp(min=_FLOOR)  # then no singular value is above 1
    for _ in range(iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if tall else x
