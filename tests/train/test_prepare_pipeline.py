"""Somebody's own modules, unmodified, on a pipeline under `prepare`, as torchrun would start the
workers, against their own loop with torch.optim.AdamW."""

from __future__ import annotations

import pytest
import torch
from pipeline_workers import SIZES, batches, count, loss, model_of, optimizer_of, piped, worker
from threads import play
from torch import nn
from torchrun import free_port, started

import outsize
from outsize.collectives import Mesh, parse_mesh
from outsize.errors import OutsizeError
from outsize.hardware import Rate, Tier


def plain(name):
    model = model_of(name)
    optimizer, losses = optimizer_of(model), []
    for batch in batches(name):
        optimizer.zero_grad()
        mean = loss(model(**batch), batch) / count(batch)
        mean.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(mean.detach()))
    batch = next(batches(name))
    with torch.no_grad():
        evaluated = float(loss(model(**batch), batch) / count(batch))
    return losses, evaluated, dict(model.named_parameters())


# Their norms (and T5's softmax) round to float32, so a last digit that differs is magnified there.
ROUNDED = {"llama": 1e-8, "t5": 1e-8}


def check(told, name):
    """What each worker tells beside the plain loop; gives names of parameters, by worker."""
    losses, evaluated, parameters = plain(name)
    close = ROUNDED.get(name, 1e-10)
    for here in told:
        assert here["losses"][0] == pytest.approx(losses[0], rel=1e-10)  # the same weights still
        assert here["losses"] == pytest.approx(losses, rel=close)
        assert here["evaluated"] == pytest.approx(evaluated, rel=close)
        assert set(here["weights"]) == set(parameters)
        for key, parameter in parameters.items():
            mine = torch.tensor(here["weights"][key], dtype=torch.float64)
            torch.testing.assert_close(mine, parameter.detach(), rtol=10 * close, atol=close)
    return [here["held"] for here in told]


def test_two_processes_give_the_numbers_of_a_plain_loop():
    said = started(worker, 2, free_port())()
    check(said, "own")


# What each of two workers has of what is outside the blocks.
OUTSIDE = {
    "llama": [{"embed_tokens"}, {"norm", "lm_head"}],
    "gpt2": [{"wte", "wpe"}, {"wte", "wpe", "ln_f"}],  # embedding and head are one
    "bert": None,
    "t5": None,
}


def outside(names):
    return {name.split(".")[-2] for name in names if not any(map(str.isdigit, name))}


@pytest.mark.parametrize("name", sorted(SIZES.keys() - {"gpt2"}))  # which rests below, as well
def test_classes_of_transformers(name, near):
    """Within a budget; each worker holds what is predicted, less what has gone already of what it
    sends. Not predicted is what the code between the blocks makes for itself on the second worker
    (of T5 masks and the decoder's embeddings, 0.9%)."""
    within(near, name)


def within(near, name):
    """What two workers tell of a run within a budget that is plenty."""
    models = [model_of(name, seed) for seed in range(2)]
    changes = {"memory": "4MiB", "microbatches": 6}
    said = play(Mesh(pipeline=2), near(lambda w: piped(name, models[w.rank], **changes)))
    held = check(said, name)
    assert OUTSIDE[name] in (None, [outside(names) for names in held])
    for here in said:
        assert 0.95 * here["predicted"] <= here["peak"] <= 1.01 * here["predicted"]
    return said


WAYS = {
    "data, looped": (
        "data=2,pipeline=2", {"zero": 2, "pipeline": "interleaved:2", "microbatches": 2},
    ),
    "what the planner finds": ("pipeline=2", {"pipeline": "auto", "microbatches": 3}),
    "back and forth, recompute": (
        "pipeline=3",
        {"pipeline": "zb-v", "microbatches": 6, "recompute": ("block",), "memory": "4MiB"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_ways_of_a_pipeline(way, near):
    mesh, changes = WAYS[way]
    mesh = parse_mesh(mesh)
    models = [model_of("own", seed) for seed in range(mesh.size)]

    def work(world):
        each, place = 6 // mesh.data, mesh.index("data", world.rank)
        rows = slice(place * each, place * each + each)
        return piped("own", models[world.rank], mesh, rows, **changes)

    check(play(mesh, near(work)), "own")


def test_one_microbatch_needs_no_count(near):
    """The loss is the mean of the whole batch, as one worker takes it."""
    losses, _, parameters = plain("own")
    models = [model_of("own", seed) for seed in range(2)]

    def work(world):
        mine = models[world.rank]
        job = outsize.prepare(
            mine, optimizer_of(mine), loss=lambda output, batch: loss(output, batch) / count(batch),
            clip=0.5, mesh="pipeline=2", pipeline="gpipe",
        )  # fmt: skip
        found = [float(job.step(batch)) for batch in batches("own")]
        weights = {key: weight.clone() for key, weight in job.weights()}
        job.close()
        return found, weights

    for found, weights in play(Mesh(pipeline=2), near(work)):
        assert found == pytest.approx(losses, rel=1e-10)
        torch.testing.assert_close(weights, {k: p.detach() for k, p in parameters.items()})


def test_states_of_a_pipeline_s_workers_rest_below(near, tmp_path, monkeypatch):
    rate = Rate(1e9, "B/s", "test", "2026-11-24")
    monkeypatch.setattr(
        "outsize.train.tiers.measured", lambda spec, date: Tier(spec.name, spec.bytes, rate, rate)
    )
    budget = max(one["peak"] for one in within(near, "gpt2")) * 3 // 4
    models = [model_of("gpt2", seed) for seed in range(2)]
    changes = {"memory": budget, "disk": f"{tmp_path}:64MiB", "microbatches": 6}
    said = play(Mesh(pipeline=2), near(lambda w: piped("gpt2", models[w.rank], **changes)))
    check(said, "gpt2")
    for here in said:
        assert here["peak"] <= budget and here["peak"] == pytest.approx(here["predicted"], rel=0.05)


def test_what_cannot_be_is_refused(near):
    """Too few microbatches for an order, an order that is none, other rows than a
    neighbour's, a module's own forward while workers have parts of it."""

    def job_of(**changes):
        model = model_of("own")
        settings = {"mesh": "pipeline=2", "microbatches": 2, "loss": loss, "count": count}
        return outsize.prepare(model, "adamw", **settings | changes), model

    with pytest.raises(OutsizeError, match="Chimera: microbatches is 1; expected at least 2"):
        job_of(microbatches=1, pipeline="chimera")
    with pytest.raises(OutsizeError, match="'1b1f'"):
        job_of(pipeline="1b1f")
    cut = "1f1b+vocabulary:2"
    with pytest.raises(OutsizeError, match="whose vocabulary is not known; cut it of decoders"):
        job_of(pipeline=cut)
    with pytest.raises(OutsizeError, match=r"mesh\.pipeline is 1: a vocabulary is cut over"):
        job_of(mesh="data=1", pipeline=cut)

    def work(world):
        batch = next(batches("own"))
        job, _ = job_of()
        with pytest.raises(OutsizeError, match="neighbours on the pipeline axis have different"):
            job.step(batch | {"labels": batch["labels"] + world.rank})
        job, model = job_of()
        job.step(batch)
        for refused in (lambda: model(**batch), model.state_dict):
            with pytest.raises(OutsizeError, match="this worker's parts"):
                refused()
        job.close()
        with pytest.raises(OutsizeError, match="job is closed"):
            job.step(batch)

    play(Mesh(pipeline=2), near(work))
