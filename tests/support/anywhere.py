"""Runs of an optimizer in float64 on one worker, on many, on tiers, and what must be equal."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import streamed
import torch
from plain import batches
from subjects import SEQUENCE, VOCAB
from threads import play

from outsize.collectives import Mesh
from outsize.parallel.divide import divide
from outsize.plan import Pipelined, Stream, zero
from outsize.plan.spread import pipelined
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe

STEPS, FAMILY = 3, "llama, untied"


def small(monkeypatch):
    """Parts of the update begin at multiples of 64 elements, and so do checksums."""
    streamed.small(monkeypatch, 64)
    monkeypatch.setattr(streamed.stores_module, "BLOCK", 64)


@dataclass(frozen=True)
class Given:
    """An optimizer, what a plan names for it, and of which family the model is."""

    optimizer: object
    approximate: tuple[str, ...] = ()
    family: str = FAMILY


def plan_of(given, rows=4, **changes):
    """Two rows a microbatch, where a worker has as many."""
    each = min(2, rows // changes.get("mesh", Mesh()).rows)
    return streamed.plan_of(
        "float64", rows=rows, microbatch_rows=each, approximate=given.approximate,
        stream=Stream(part=512), **changes,
    )  # fmt: skip


def tiers(plan, every=False):
    rest = {"parameters": "host", "gradients": "host"} if every else {}
    return streamed.resting(plan, optimizer="disk", **rest)


WAYS = {
    "all on tiers": lambda one: tiers(plan_of(one), every=True),
    "zero 2": lambda one: plan_of(one, mesh=Mesh(2), shards=zero(2, 2)),
    "zero 3, 4 workers, a tier": lambda one: tiers(
        plan_of(one, mesh=Mesh(4), shards=zero(3, 4))
    ),
    "tensor, a tier": lambda one: tiers(plan_of(one, mesh=Mesh(tensor=2))),
    "tensor, zero 2": lambda one: plan_of(one, mesh=Mesh(2, 2), shards=zero(2, 2)),
    "pipeline": lambda one: plan_of(one, mesh=Mesh(pipeline=2), pipeline=Pipelined("1f1b")),
    "pipeline, rows of tables": lambda one: plan_of(
        one, mesh=Mesh(pipeline=2), pipeline=pipelined("1f1b+vocabulary:1")
    ),
}  # fmt: skip


def data_of(steps=STEPS, rows=4):
    return batches(steps, rows, SEQUENCE, VOCAB)


def run_of(given, plan, data, resumed=None, recipe=None):
    """What a worker does: some steps, from saved states where there are some."""

    def run(world):
        model = streamed.model_of(given.family, plan.precision.compute)
        cuts = divide(model, world, plan)
        with streamed.memory() as stores:
            here, how = Here(world, stores=stores), recipe or Recipe(given.optimizer, 0.5)
            job = Job(NativeFlow(model, plan), plan, how, here, cuts=cuts)
            if resumed is not None:
                weights, states, counts = resumed
                job.load(lambda n, out: out.copy_(weights[n]), lambda n, out: out.copy_(states[n]))
                job.restore_counts(counts)
            for batch in data:
                job.step(batch.rows(*plan.rows_at(job.place)), 1e-2)
            forms = {n: job.form(*n.rsplit(".", 1)) for n in job.state_names()}
            found = (*streamed.snapshot(job), job.update_counts())
            assert {n: (tuple(s.shape), s.dtype) for n, s in found[1].items()} == forms
            job.close()
        return found

    return run


@cache
def by_one_worker(given, steps):
    (found,) = play(Mesh(), run_of(given, plan_of(given), data_of()[:steps]))
    return found


def check(given, way, resume=False, tolerance=1e-10):
    """The same weights and states as on one worker; resume: which has made the first half of the
    steps."""
    plan, data = WAYS[way](given), data_of()
    wanted, resumed = by_one_worker(given, STEPS), None
    if resume:
        resumed, data = by_one_worker(given, STEPS // 2), data[STEPS // 2 :]
    for found in play(plan.mesh, run_of(given, plan, data, resumed)):
        assert found[2] == wanted[2]
        for mine, theirs in zip(found[:2], wanted[:2], strict=True):
            assert mine.keys() == theirs.keys()
            for name in mine:
                close = torch.allclose(mine[name], theirs[name], rtol=tolerance, atol=tolerance)
                assert close, f"{name}: {(mine[name] - theirs[name]).abs().max()}"
