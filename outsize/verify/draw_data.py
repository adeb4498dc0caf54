"""Random data of a draw: tokens in documents of ragged lengths, some rows without any target; and
how workers share rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

import torch
from torch import Tensor

from outsize.data import IGNORE, Batch
from outsize.models.config import DecoderConfig
from outsize.models.dropout import Noise
from outsize.plan import Plan
from outsize.plan.settings import PLAN_SETTINGS


def unlike(draw: Random, plan: Plan) -> Plan:
    """In three of ten draws every worker has a share of the rows of its own; where a pipeline's
    schedule is of so many microbatches, one that leaves their number."""
    if plan.mesh.rows == 1 or draw.random() < 0.7:
        return plan
    cuts = sorted(draw.sample(range(1, plan.rows), plan.mesh.rows - 1))
    shares = tuple(stop - start for start, stop in pairwise((0, *cuts, plan.rows)))
    made = replace(plan, row_shares=shares)
    kept = plan.mesh.pipeline == 1 or made.microbatches == plan.microbatches
    return made if kept else plan


def sharing(draw: Random, plan: Plan, config: DecoderConfig) -> Plan:
    """Some of the first blocks share rows over the tensor axis, where the plan and the model let
    them."""
    experts = [layer.experts for layer in config.layers]
    most = experts.index(True) if True in experts else len(experts)
    if config.rewired or plan.rests_below("gradients"):
        return plan
    for name, one in PLAN_SETTINGS.items():
        if one.by_rows and one.refusal(plan) is None:
            value = min(most, draw.choice(one.draws))
            plan = replace(plan, settings=plan.settings.having({name: value}))
    return plan


def masked(draw: Random, plan: Plan) -> tuple[int, int]:
    """Rows without any target: all of one worker's or of one microbatch, where others have some."""
    if draw.random() < 0.6:
        return (0, 0)
    place = draw.randrange(plan.mesh.rows)
    if plan.microbatches > 1 and draw.random() < (0.4 if plan.mesh.rows > 1 else 1.0):
        first = plan.rows_at(place)[0]
        start, stop = plan.rows_of(draw.randrange(plan.microbatches), place)
        return first + start, first + stop
    return plan.rows_at(place) if plan.mesh.rows > 1 else (0, 0)


@dataclass(frozen=True)
class Data:
    """Rows of random tokens in documents of random lengths. masked: rows without any target."""

    seed: int
    plan: Plan
    vocab: int
    dropout: float
    masked: tuple[int, int]

    def batch(self, step: int) -> Batch:
        """The whole step, the same at each call."""
        plan, draw = self.plan, Random(f"{self.seed} {step}")
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        size = (plan.rows, plan.sequence)
        ids_BS = torch.randint(0, self.vocab, size, generator=generator)
        bounds = tuple(_bounds(draw, plan.sequence) for _ in range(plan.rows))
        targets_BS = torch.full_like(ids_BS, IGNORE)
        targets_BS[:, :-1] = ids_BS[:, 1:]
        for row, edges in enumerate(bounds):
            targets_BS[row, [edge - 1 for edge in edges[1:]]] = IGNORE
        targets_BS[torch.rand(size, generator=generator) < draw.choice((0.0, 0.3))] = IGNORE
        targets_BS[slice(*self.masked)] = IGNORE
        if not (targets_BS != IGNORE).any():  # some target there must be
            row = self.masked[1] % plan.rows
            targets_BS[row, 0] = ids_BS[row, -1]
        noise = Noise(self.dropout, self.seed, step) if self.dropout else None
        return Batch(ids_BS, targets_BS, bounds, noise, self._weights(targets_BS, generator))

    def _weights(self, targets_BS: Tensor, generator: torch.Generator) -> Tensor | None:
        """In three of ten draws every target has a weight of its own, one in five none."""
        if Random(f"{self.seed} weights").random() < 0.7:
            return None
        weights_BS = 2 * torch.rand(targets_BS.shape, generator=generator)
        weights_BS[torch.rand(targets_BS.shape, generator=generator) < 0.2] = 0.0
        weights_BS[tuple((targets_BS != IGNORE).nonzero()[0])] = 1.0  # some target there must be
        return weights_BS


def _bounds(draw: Random, tokens: int) -> tuple[int, ...]:
    cuts = {draw.randrange(1, tokens) for _ in range(draw.randrange(4))}
    return (0, *sorted(cuts), tokens)
