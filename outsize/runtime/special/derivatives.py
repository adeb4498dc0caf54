"""Blocks that keep derivatives in 4 bits: see outsize/techniques/four_bit_derivatives.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from outsize.kernels.derivative import activated, gate_kept, norm_kept
from outsize.models.cuts import Cut
from outsize.models.mlp import MLP
from outsize.models.norm import Norm, Scaled, normed
from outsize.plan import Plan
from outsize.runtime.flow import Flow
from outsize.runtime.handlers.training import Training
from outsize.runtime.recipe import Here, Recipe
from outsize.runtime.special.compressed import check_resting, rounding_blocks
from outsize.schedule import Kind
from outsize.schedule.layout import Placement

if TYPE_CHECKING:
    from outsize.runtime.job import Job

NAME = "four-bit-derivatives"


class Derivatives(Training):
    """Steps whose blocks keep derivatives: see outsize/runtime/method.py."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._undo = [undo for module in job.flow.blocks for undo in _kept(module)]
        if job.recipe.of(NAME).rest == "int8":
            around = rounding_blocks(job)
            self.engine.around |= {Kind.FORWARD: around, Kind.RECOMPUTE: around}

    @staticmethod
    def placement(
        flow: Flow, plan: Plan, recipe: Recipe, here: Here, cuts: Mapping[str, Cut]
    ) -> Placement:
        if recipe.of(NAME).rest == "int8":
            check_resting(plan, f"{NAME}.rest")
        return Training.placement(flow, plan, recipe, here, cuts)

    def close(self) -> None:
        super().close()
        for undo in self._undo:
            undo()


def _kept(block: nn.Module) -> Iterator[Callable[[], None]]:
    """Have the functions of a block keep derivatives; gives what undoes it. Experts' gates, and
    norms whose vectors lie on several workers, stay as they are."""
    for module in block.modules():
        if isinstance(module, MLP):
            yield partial(setattr, module, "gating", module.gating)
            yield partial(setattr, module, "activation", module.activation)
            plain = module.activation
            module.activation = replace(plain, forward=partial(activated, plain))
            module.gating = _gating(plain)
        elif isinstance(module, Norm) and module.run is normed:
            yield partial(setattr, module, "run", normed)
            module.run = _norm


def _gating(plain: object) -> Callable[..., Tensor]:
    """The gate of an MLP with this activation, whatever that is now."""
    return lambda gate, up, _: gate_kept(gate, up, plain)  # type: ignore[arg-type]


def _norm(norm: Scaled, x: Tensor) -> Tensor:
    facts, weight = norm.facts, norm.weight
    if not torch.is_grad_enabled() or (weight is not None and weight.shape != x.shape[-1:]):
        return normed(norm, x)
    layer = facts.kind == "layer"
    offset = 0.0 if layer else 1.0 - facts.unit
    return norm_kept(x, weight, norm.bias, facts.eps, offset, layer)
