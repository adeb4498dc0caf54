"""Low-rank predictors of active neurons (Alizadeh et al., "LLM in a flash", 2023, section 3.1).

Which neurons a ReLU passes is guessed from the layer's input by two thin matrices: the best
approximation, of that rank, of ReLU's input over a sample of the model's own inputs, and for each
neuron the threshold that keeps the wanted part of its active tokens. The paper trains the two by
logistic regression; going on so from here found fewer of the active neurons of new tokens.

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
        linear_NF = F.linear(x, weight)
        offset = 0.0 if projection.bias is None else projection.bias.float()
        # The rank-R approximation of x W^T with the smallest error over the sample.
        with torch.random.fork_rng(devices=[]):  # its projections are drawn at random
            torch.manual_seed(0)
            _, _, wide_FR = torch.svd_lowrank(linear_NF, q=options.rank, niter=2)
        narrow_RD = wide_FR.t() @ weight
        score_NF = F.linear(F.linear(x, narrow_RD), wide_FR)
        bias_F = _threshold(score_NF, linear_NF + offset > 0, options.recall)
    dtype = x_ND.dtype
    return Predictor(narrow_RD.to(dtype), wide_FR.to(dtype).contiguous(), bias_F.to(dtype))


def _threshold(score_NF: Tensor, active_NF: Tensor, recall: float) -> Tensor:
    """The bias with which the wanted part of each neuron's active tokens score above 0. One that
    was never active is never predicted."""
    score_NF = score_NF.masked_fill(~active_NF, torch.inf)
    active_F = active_NF.sum(0)
    dropped_F = ((1 - recall) * active_F).floor().long()
    lowest_F = score_NF.sort(0).values.gather(0, dropped_F[None])[0]
    slack_F = 1e-3 * lowest_F.abs() + 1e-6  # the score at the threshold counts, in any dtype
    return torch.where(active_F > 0, slack_F - lowest_F, -torch.inf)
