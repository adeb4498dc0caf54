"""Forecasts of a model that `prepare` has, for the same planner that runs ask: over rehearsals of
the model itself, with batches like the first."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from outsize.hardware import Hardware
from outsize.plan import Plan
from outsize.search import PlanRequest
from outsize.search.request import memories
from outsize.search.settled import composed
from outsize.simulate import Forecast
from outsize.simulate.costs import Costs, Facts
from outsize.simulate.rehearse import bare


@dataclass
class Rehearsals:
    """Forecasts of one module's plans; those that differ only in where states rest share one
    rehearsal. rehearsed: one, of a plan with every state on the device."""

    request: PlanRequest
    hardware: Hardware
    rehearsed: Callable[[Plan], Costs]
    _known: dict[Plan, Costs] = field(default_factory=dict)
    _facts: Facts | None = None

    @property
    def facts(self) -> Facts:
        assert self._facts is not None, "a plan is rehearsed before anything else is asked"
        return self._facts

    def costs(self, plan: Plan) -> list[Costs]:
        """Costs of a plan's actions: a list of one."""
        key = bare(plan)
        if key not in self._known:
            made = self.rehearsed(plan)
            self._facts = replace(made.facts, host=memories(self.request))
            self._known[key] = replace(made, facts=self._facts)
        return [self._known[key]]

    def forecast(self, plan: Plan) -> Forecast:
        """What a plan holds and takes."""
        return composed(plan, self.costs(plan), self.hardware)


def twin_of(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]
) -> tuple[nn.Module, list[tuple[str, nn.Module]]]:
    """A copy of a model whose tensors are made anew, empty, in the mode that is on."""
    known: dict[int, Any] = {}
    for p in model.parameters():
        empty = torch.empty(p.shape, dtype=p.dtype, device=p.device)
        known[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
    for b in model.buffers():
        known[id(b)] = torch.empty(b.shape, dtype=b.dtype, device=b.device)
    twin = copy.deepcopy(model, known)
    return twin, [(path, twin.get_submodule(path)) for path, _ in blocks]
