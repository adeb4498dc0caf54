"""Low-rank predictors of active neurons (Alizadeh et al., "LLM in a flash", 2023, section 3.1).

Which neurons a ReLU passes is guessed from the layer's input by two thin matrices. They start as
the best approximation, of that rank, of ReLU's input over a sample of the model's own inputs (the
sample's principal directions), go on by logistic regression, and end with a threshold for each
neuron that keeps the wanted part of its active tokens.

N tokens of the sample, T tokens, D hidden, F neurons, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize.errors import OutsizeError
from outsize.models.decoder import Decoder
from outsize.models.mlp import MLP


@dataclass(frozen=True)
class Predictor:
    """Neuron f is active for x where narrow, then wide, give it a score above 0."""

    narrow_RD: Tensor
    wide_FR: Tensor
    bias_F: Tensor

    def __call__(self, x_TD: Tensor) -> Tensor:
        """active_TF, bool."""
        return F.linear(F.linear(x_TD, self.narrow_RD), self.wide_FR, self.bias_F) > 0

    @property
    def nbytes(self) -> int:
        return self.narrow_RD.nbytes + self.wide_FR.nbytes + self.bias_F.nbytes


@dataclass(frozen=True)
class Fit:
    """recall: part of a neuron's active tokens of the sample that it must be predicted for."""

    rank: int = 128
    recall: float = 0.99
    steps: int = 100
    rate: float = 1e-3
    positive: float = 4.0  # weight of an active neuron in the loss: missing one costs more
    batch: int = 256


def inputs_of(model: Decoder, documents: Sequence[Tensor]) -> list[Tensor]:
    """For each layer what its MLP read, (N, D), over documents of token ids (int64)."""
    mlps = [cast(nn.Module, block.mlp) for block in model.blocks]
    seen: list[list[Tensor]] = [[] for _ in mlps]
    hooks = [
        mlp.register_forward_pre_hook(lambda _, args, at=at: at.append(args[0].clone()))
        for mlp, at in zip(mlps, seen, strict=True)
    ]
    try:
        with torch.no_grad():
            for ids_T in documents:
                model(ids_T)
    finally:
        for hook in hooks:
            hook.remove()
    return [torch.cat(inputs) for inputs in seen]


def fit(mlp: MLP, x_ND: Tensor, options: Fit | None = None) -> Predictor:
    """A predictor for the ReLU of an MLP from a sample of its inputs, in their dtype.

    Raises OutsizeError for a sample of fewer tokens than the rank.
    """
    options = options or Fit()
    if len(x_ND) < options.rank or not 0 < options.recall <= 1:
        raise OutsizeError(
            f"rank {options.rank} and recall {options.recall} with a sample of {len(x_ND)} tokens; "
            "expected at least as many tokens as the rank, and a recall above 0 and up to 1"
        )
    projection = mlp.up if mlp.gate is None else mlp.gate
    with torch.no_grad():
        x = x_ND.float()
        weight = projection.weight.float()
        bias = torch.zeros(len(weight)) if projection.bias is None else projection.bias.float()
        before_NF = F.linear(x, weight, bias)
        start = _truncated(x, weight, bias, options.rank)
    trained = _trained(start, x, before_NF > 0, options)
    final = _calibrated(trained, x, before_NF > 0, options.recall)
    return Predictor(*(part.to(x_ND.dtype) for part in final))


def _truncated(x: Tensor, weight: Tensor, bias: Tensor, rank: int) -> tuple[Tensor, ...]:
    """The rank-R approximation of x W^T with the smallest error over the sample."""
    linear_NF = F.linear(x, weight)
    _, _, directions_FR = torch.svd_lowrank(linear_NF, q=rank, niter=2)
    return directions_FR.t() @ weight, directions_FR.contiguous(), bias.clone()


def _trained(
    start: tuple[Tensor, ...], x: Tensor, active_NF: Tensor, options: Fit
) -> tuple[Tensor, ...]:
    """Logistic regression from there."""
    parts = [part.detach().clone().requires_grad_() for part in start]
    optimizer = torch.optim.Adam(parts, options.rate)
    generator = torch.Generator().manual_seed(0)
    weight = torch.tensor(options.positive)
    for _ in range(options.steps):
        pick = torch.randint(len(x), (options.batch,), generator=generator)
        with torch.enable_grad():
            score = F.linear(F.linear(x[pick], parts[0]), parts[1], parts[2])
            wanted = active_NF[pick].float()
            loss = F.binary_cross_entropy_with_logits(score, wanted, pos_weight=weight)
            parts_gradients = torch.autograd.grad(loss, parts)
        for part, gradient in zip(parts, parts_gradients, strict=True):
            part.grad = gradient
        optimizer.step()
    return tuple(part.detach() for part in parts)


def _calibrated(
    parts: tuple[Tensor, ...], x: Tensor, active_NF: Tensor, recall: float
) -> tuple[Tensor, ...]:
    """Move each neuron's bias so that the wanted part of its active tokens score above 0. One that
    was never active keeps its bias."""
    narrow, wide, bias = parts
    score_NF = F.linear(F.linear(x, narrow), wide)
    score_NF[~active_NF] = torch.inf
    active_F = active_NF.sum(0)
    dropped_F = ((1 - recall) * active_F).floor().long()
    lowest_F = score_NF.sort(0).values.gather(0, dropped_F[None])[0]
    slack = 1e-3 * lowest_F.abs() + 1e-6  # the score at the threshold itself counts, in any dtype
    return narrow, wide, torch.where(active_F > 0, slack - lowest_F, bias)
