"""Techniques with steps of their own on meshes: the numbers of the same technique on one worker."""

from __future__ import annotations

from dataclasses import replace

import plain
import pytest
import torch
from subjects import SEQUENCE, VOCAB, base_plan, config_of
from threads import play

from outsize.collectives import Mesh
from outsize.models.build import build
from outsize.optim import AdamW
from outsize.plan import Sharding, zero
from outsize.runtime.making import NativeModel, make_job
from outsize.runtime.method import method_of
from outsize.runtime.recipe import Here, Recipe
from outsize.techniques.frozen_by_dynamics import FrozenByDynamics
from outsize.techniques.local_learning import LocalLearning
from outsize.techniques.zeroth_order import ZerothOrder

ROWS = 3
LOCAL = {"local-learning": LocalLearning(2)}
ZEROTH = {"zeroth-order": ZerothOrder(1e-2)}
FREEZING = {"frozen-by-dynamics": FrozenByDynamics(0.6)}


def numbers(plan, said, family, here, steps):
    """Losses and norms of some steps and the weights behind them, an evaluation's loss at last."""
    recipe = Recipe(AdamW(1e-2, weight_decay=0.1), 0.5, techniques=said, seed=3)
    method = method_of(plan.approximate)
    recipe = method.recipe(recipe)
    model = NativeModel(build(config_of(family), seed=1, dtype=torch.float64))
    job = make_job(model, method.planned(plan, recipe), recipe, here)
    found = []
    for batch in plain.batches(steps, ROWS, SEQUENCE, VOCAB):
        job.step(batch.rows(*plan.rows_at(job.place)))
        found += [job.report.loss, job.report.norm]
    weights = {name: weight.clone() for name, weight in job.states.weights()}
    weights |= {name: state.clone() for name, state in job.states.optimizer_state()}
    job.close()
    return found, weights


def check(mesh, said, shards=None, family="llama", steps=2, **changes):
    shards = shards or Sharding()
    plan = base_plan(rows=ROWS, mesh=mesh, shards=shards, approximate=tuple(said), **changes)
    alone = replace(plan, mesh=Mesh(), shards=Sharding(), sequence_parallel=False)
    wanted, expected = numbers(alone, said, family, Here(), steps)
    every = play(mesh, lambda world: numbers(plan, said, family, Here(world), steps))
    for found, weights in every:
        assert found == pytest.approx(wanted, rel=1e-10)
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-10, atol=1e-10)


CASES = {
    "zero 1": (Mesh(2), 1, "llama"),
    "zero 3, tensor": (Mesh(2, 2), 3, "mixtral"),
    "context": (Mesh(context=2), 0, "llama"),
    "expert": (Mesh(expert=2), 0, "mixtral"),
    "pipeline": (Mesh(pipeline=2), 0, "llama"),
}


@pytest.mark.parametrize("case", ["zero 1", "zero 3, tensor", "expert", "pipeline"])
def test_frozen_layers(case):
    mesh, stage, family = CASES[case]
    check(mesh, FREEZING, zero(stage, mesh.data), family, steps=3)


@pytest.mark.parametrize("case", ["zero 3, tensor", "context", "expert", "pipeline"])
def test_losses_along_a_direction(case):
    mesh, stage, family = CASES[case]
    check(mesh, ZEROTH, zero(stage, mesh.data), family)


@pytest.mark.parametrize("mesh", [Mesh(2, 2), Mesh(expert=2, context=2)])
def test_groups_with_losses_of_their_own(mesh):
    """Their averages too, which lie in parts, as states."""
    family = "llama, untied" if mesh.tensor > 1 else "mixtral"
    check(mesh, LOCAL, family=family, sequence_parallel=mesh.tensor > 1)
