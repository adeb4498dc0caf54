"""Runs that stream and their resident twins: plans by where states rest, stores, some steps.

Models for tests are tiny: `small` lets them be spilled and cut into parts as large ones are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import plain
import pytest
import torch
from subjects import ROWS, SEQUENCE, VOCAB, base_plan, config_of
from torch import Tensor

from outsize.memory import store as stores_module
from outsize.memory.disk import DiskStore
from outsize.memory.store import MemoryStore
from outsize.models.build import build
from outsize.optim import AdamW
from outsize.plan import Plan, Rest
from outsize.plan import plan as plan_module
from outsize.runtime import Job, NativeFlow
from outsize.runtime import spill as spill_module
from outsize.runtime.recipe import Here, Recipe

STEPS = 4
PIECE = 1 << 9  # elements of a part, where `small` is in force
ALL = {"parameters": "disk", "gradients": "disk", "optimizer": "disk", "activations": "disk"}


def small(monkeypatch: pytest.MonkeyPatch, piece: int = PIECE) -> None:
    """Tiny activations spill and tiny chunks are cut into parts; for stores in memory."""
    monkeypatch.setattr(spill_module, "LEAST", 64)
    monkeypatch.setattr(plan_module, "PART", piece)
    monkeypatch.setattr(stores_module, "BLOCK", 2 * piece)  # of two bytes an element at least


def resting(plan: Plan, spill: tuple[str, ...] = (), **tiers: str) -> Plan:
    """The plan with the states of all stages on these tiers."""
    stages = tuple(replace(s, rest=Rest(**tiers), spill=spill) for s in plan.stages)
    return replace(plan, stages=stages)


@contextmanager
def memory(size: int = 1 << 26) -> Iterator[dict[str, Any]]:
    """Two tiers in memory: "disk" and "host"."""
    made = {name: MemoryStore(name, size) for name in ("disk", "host")}
    try:
        yield made
    finally:
        for each in made.values():
            each.close()


@contextmanager
def disk(folder: Path, size: int = 1 << 26) -> Iterator[dict[str, Any]]:
    """A disk and a tier in memory."""
    made = {"disk": DiskStore("disk", [folder], size), "host": MemoryStore("host", size)}
    try:
        yield made
    finally:
        for each in made.values():
            each.close()


@dataclass(frozen=True)
class Outcome:
    """What a run gave: numbers that must be equal bit for bit."""

    losses: list[float]
    norms: list[float]
    evaluations: list[Any]
    weights: dict[str, Tensor]
    states: dict[str, Tensor]

    def same(self, other: Outcome) -> bool:
        return not self.differences(other)

    def differences(self, other: Outcome) -> list[str]:
        """What is not equal, by name."""
        found = [
            name
            for name in ("losses", "norms", "evaluations")
            if getattr(self, name) != getattr(other, name)
        ]
        for name in ("weights", "states"):
            mine, theirs = getattr(self, name), getattr(other, name)
            assert list(mine) == list(theirs)
            found += [f"{name} {n}" for n in mine if not torch.equal(mine[n], theirs[n])]
        return found


def snapshot(job: Job) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Copies of all weights and optimizer states."""
    weights = {name: w.clone() for name, w in job.weights()}
    return weights, {name: s.clone() for name, s in job.optimizer_state()}


def trained(job: Job, data: list[Any], rows: int, rate: float = 1e-2) -> Outcome:
    """Train, with an evaluation after the first and the last step."""
    losses, norms, evaluations = [], [], []
    for step, batch in enumerate(data):
        losses.append(float(job.step(batch, rate)))
        norms.append(job.report.norm)
        if step in (0, len(data) - 1):
            evaluations.append(job.evaluate(data[0], rows))
    return Outcome(losses, norms, evaluations, *snapshot(job))


def model_of(
    family: str, precision: str = "float32", frozen: Callable[[str, Any], bool] | None = None,
    **changes: Any,
) -> Any:  # fmt: skip
    """A small decoder; frozen: which parameters need no gradient."""
    dtype = torch.float64 if precision == "float64" else torch.float32
    model = build(config_of(family, **changes), seed=1, dtype=dtype)
    for name, parameter in model.named_parameters():
        if frozen is not None and frozen(name, parameter):
            parameter.requires_grad_(False)
    return model


def job_of(
    plan: Plan, stores: Mapping[str, Any] | None = None, family: str = "llama, untied",
    clip: float | None = 0.5, model: Any = None, ledger: Any = None, optimizer: Any = None,
) -> Job:  # fmt: skip
    """A job over a small decoder."""
    model = model or model_of(family, plan.precision.compute)
    optimizer = optimizer or AdamW(weight_decay=0.1)
    return Job(
        NativeFlow(model, plan),
        plan,
        Recipe(optimizer, clip),
        Here(ledger=ledger, stores=stores or {}),
    )


def data_of(steps: int = STEPS, rows: int = ROWS) -> list[Any]:
    """Batches with documents of uneven lengths."""
    return plain.batches(steps, rows, SEQUENCE, VOCAB)


def plan_of(named: str = "float32", **changes: Any) -> Plan:
    """A row a microbatch, a stage a segment."""
    return base_plan(named, **changes)
