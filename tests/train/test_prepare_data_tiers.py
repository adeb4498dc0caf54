"""`prepare` on a data axis with optimizer states on a tier, each worker's own shares: somebody's
own loop gives the numbers of plain PyTorch, within the budget, under the first worker's plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pipeline_workers import batches, count, loss, model_of, optimizer_of
from streamed import plan_of, resting
from threads import play
from torch import nn

import outsize
from outsize.collectives import Mesh
from outsize.hardware import Rate, Tier
from outsize.plan import zero
from outsize.train.prepared.workers import agreed

MEMORY = 700 << 10  # the least is 604 KiB


def plain(name: str) -> list[float]:
    model = model_of(name)
    optimizer, losses = optimizer_of(model), []
    for batch in batches(name):
        optimizer.zero_grad()
        mean = loss(model(**batch), batch) / count(batch)
        mean.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(mean.detach()))
    return losses


def test_optimizer_states_below_on_two_workers(near, tmp_path, monkeypatch):
    rate = Rate(1e9, "B/s", "test", "2026-11-22")
    monkeypatch.setattr(
        "outsize.train.tiers.measured", lambda spec, date: Tier(spec.name, spec.bytes, rate, rate)
    )
    models = [model_of("gpt2", seed) for seed in (0, 1)]  # the first one's weights are all's

    def work(world):
        rows = slice(3 * world.rank, 3 * world.rank + 3)
        mine = models[world.rank]
        job = outsize.prepare(
            mine, optimizer_of(mine), MEMORY, loss=loss, count=count, clip=0.5, recompute=(),
            microbatches=3, mesh="data=2", zero=2, disk=f"{tmp_path}:16MiB",
        )  # fmt: skip
        losses = []
        for batch in batches("gpt2"):
            # Of its own memory, as a worker that reads its rows has them: a view keeps all rows.
            cut = {k: v if isinstance(v, bool) else v[rows].clone() for k, v in batch.items()}
            losses.append(float(job.step(cut)))
        peak = max(event.peak for event in job.report.trace.events)
        found = losses, job.plan, peak, job.forecast.peak
        job.close()
        return found

    told, wanted = play(Mesh(data=2), near(work)), plain("gpt2")
    assert told[0][1] == told[1][1]
    for losses, plan, peak, predicted in told:
        assert losses == pytest.approx(wanted, rel=1e-10)
        assert plan.rests_below("optimizer") and not plan.rests_below("parameters", "gradients")
        assert 0.95 * predicted <= peak <= predicted <= MEMORY


def test_the_first_workers_plan_is_everybodys():
    """Whatever rates others have measured."""
    base = plan_of("float64", rows=4, mesh=Mesh(data=2), shards=zero(2, 2))
    plans = [resting(replace(base, budget=1 << 30), optimizer="disk"), base]
    every = play(Mesh(data=2), lambda w: agreed(plans[w.rank], w, torch.device("cpu")))
    assert every == [plans[0]] * 2
