"""Workers of the data axis, as threads: the numbers of one worker, whatever is cut over them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from piped import numbers
from plain import batches
from streamed import PIECE, data_of, job_of, memory, model_of, plan_of, resting, small
from subjects import MIXED, SEQUENCE, VOCAB
from threads import play

from outsize.collectives import Mesh, along, received
from outsize.errors import OutsizeError
from outsize.optim import SGD, AdamW
from outsize.parallel.tensor.decoder import split
from outsize.plan import Plan, Rest, Sharding, Stream, zero
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe

STEPS = 2


def spread(data: int, shards: Sharding, **changes) -> Plan:
    """Workers that take 2 rows each, the first one 3; two microbatches each; two blocks."""
    base = {"rows": 2 * data + 1, "microbatch_rows": 2, "mesh": Mesh(data)}
    base |= {"segments": 4, "stages": per_segment(4)}
    return plan_of("float64", shards=shards, **(base | changes))


def built(plan: Plan, family: str, frozen):
    """A layer for each segment between the ends."""
    layers = plan.segments - 2
    return model_of(family, plan.precision.compute, frozen, num_hidden_layers=layers)


def worker(plan: Plan, data, family: str, clip, optimizer, frozen=None):
    def run(world):
        model = built(plan, family, frozen)
        axis = along(world, "tensor")
        cuts = split(model, axis, plan.sequence_parallel)
        flow = NativeFlow(model, plan)
        with memory() as stores:
            job = Job(flow, plan, Recipe(optimizer, clip), Here(world, stores=stores), cuts=cuts)
            result = numbers(job, plan, data)
            job.close()
        return result, received(world, "network")

    return run


def check(plan: Plan, family="llama, untied", clip=0.5, optimizer=None, frozen=None):
    """The workers of a plan against one worker with the same rows."""
    optimizer = optimizer or AdamW(weight_decay=0.1)
    data = batches(STEPS, plan.rows, SEQUENCE, VOCAB)
    stages = tuple(replace(stage, rest=Rest()) for stage in plan.stages)
    alone = replace(plan, mesh=Mesh(), shards=Sharding(), sequence_parallel=False, stages=stages)
    model = built(plan, family, frozen)
    job = Job(NativeFlow(model, alone), alone, Recipe(optimizer, clip))
    wanted = numbers(job, alone, data)
    every = play(plan.mesh, worker(plan, data, family, clip, optimizer, frozen))
    for result, _ in every:
        for here, there in zip(result[0], wanted[0], strict=True):
            assert here == pytest.approx(there, rel=1e-10)
        for mine, theirs in zip(result[1:], wanted[1:], strict=True):
            assert mine.keys() == theirs.keys()
            for name in mine:
                torch.testing.assert_close(mine[name], theirs[name], rtol=1e-10, atol=1e-10)
    for result, _ in every[1:]:  # bit for bit among themselves
        assert result[0] == every[0][0][0]
        assert all(torch.equal(w, every[0][0][1][n]) for n, w in result[1].items())
    return every


def test_tensor_axis():
    plan = spread(2, zero(3, 2), mesh=Mesh(2, 2), sequence_parallel=True)
    check(plan, "mixtral")


def test_more_workers_than_key_value_heads():
    check(spread(1, Sharding(), mesh=Mesh(1, 4)), "llama, untied")


def test_gradients_that_workers_sum_stay_on_the_device():
    """Norms, where tokens are cut; heads that several have. Others may rest below."""
    below = {"gradients": "host", "optimizer": "disk"}
    for changes in ({"mesh": Mesh(1, 2), "sequence_parallel": True}, {"mesh": Mesh(1, 4)}):
        plan = resting(spread(1, Sharding(), **changes), **below)
        with pytest.raises(OutsizeError, match="gradients of stage 1 rest on host, and workers of"):
            check(plan)
    check(resting(spread(1, Sharding(), mesh=Mesh(1, 2)), **below))


SHARDS = {
    "replicated": Sharding(),
    "optimizer": Sharding(1, 1, 4),
    "gradients": Sharding(1, 4, 4),
    "parameters": Sharding(4, 4, 4),
    "pairs": Sharding(2, 2, 2),
    "three levels": Sharding(1, 2, 4),
    "parameters in pairs": Sharding(2, 4, 4),
    "optimizer in pairs": Sharding(1, 1, 2),
}


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("pairs", "layer"), ("three levels", "microbatch"), ("parameters in pairs", "layer"),
        ("optimizer in pairs", "microbatch"),
    ],
)  # fmt: skip
def test_degrees_between_one_and_all(name, order):
    """The others: tests/verify/test_matrix.py."""
    check(spread(4, SHARDS[name], order=order))


def all_on(tier: str) -> dict[str, str]:
    return dict.fromkeys(("parameters", "gradients", "optimizer"), tier)


BELOW = {  # (plan, tiers), of which a part has 512 elements
    "a tied head, gradients twice in a step": (lambda: spread(2, zero(3, 2)), all_on("disk")),
    "behind the backward pass": (
        lambda: spread(3, zero(3, 3), order="layer", update="behind"), all_on("disk")
    ),
    "updated where they rest, and collected": (
        lambda: spread(2, zero(2, 2), stream=Stream(part=PIECE, host=2)),
        {"gradients": "host", "optimizer": "host"},
    ),
    "updated where they rest": (
        lambda: spread(2, zero(3, 2), stream=Stream(part=PIECE, host=2)), all_on("host")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BELOW)
def test_shares_of_parameters_and_gradients_below(name, monkeypatch):
    small(monkeypatch)
    made, tiers = BELOW[name]
    plan = resting(made(), **tiers)
    check(plan, "llama", clip=None if plan.update == "behind" else 0.5)


def test_shares_below_of_frozen_layers_and_without_optimizer_states():
    plan = resting(spread(2, zero(3, 2), order="layer"), **all_on("disk"))
    check(plan, optimizer=SGD(), frozen=lambda name, _: "blocks.0" in name or "norm" in name)


@pytest.mark.parametrize(
    ("stage", "tiers", "said"),
    [
        (2, {"parameters": "disk"}, r"parameters rest below .* cut them over workers \(zero 3\)"),
        (1, {"gradients": "disk"}, r"gradients rest below .* \(zero 2 or 3\)"),
        (3, {"gradients": "disk"}, "gradients of stage 0 rest on disk, a share on each worker"),
        (3, {"parameters": "disk"}, "its optimizer states on device, .* rest below too"),
    ],
)
def test_shares_that_cannot_rest_below(stage, tiers, said):
    with pytest.raises(OutsizeError, match=said):
        check(resting(spread(2, zero(stage, 2)), **tiers))


def test_master_copy_of_bfloat16():
    plan = plan_of("bfloat16", mesh=Mesh(data=2), shards=zero(3, 2), rows=4)
    data = data_of(STEPS, 4)
    run = worker(plan, data, "llama, untied", 0.5, AdamW(weight_decay=0.1))
    every = play(plan.mesh, run)
    job = job_of(replace(plan, mesh=Mesh(), shards=Sharding()))
    wanted = numbers(job, job.plan, data)
    for result, _ in every:
        for name, weight in result[1].items():
            assert weight.dtype == torch.float32
            torch.testing.assert_close(weight, wanted[1][name], rtol=0, atol=2e-2)


def volume(name: str, size: int, numel: int) -> float:
    """Bytes that a worker has from others in a step, of `numel` parameters in float64."""
    share = 8 * numel * (size - 1) / size
    return {
        "replicated": 2 * share,
        "optimizer": 2 * share,
        "gradients": 2 * share,
        "parameters": 3 * share,
    }[name]


@pytest.mark.parametrize("name", ["replicated", "optimizer", "gradients", "parameters"])
def test_bytes_are_those_of_the_formulas(name):
    """ZeRO's volumes: two passes over the parameters, three where they are gathered twice."""
    plan = plan_of("float64", mesh=Mesh(data=4), shards=SHARDS[name], order="layer", rows=8)
    data = batches(2, 8, SEQUENCE, VOCAB)
    model = model_of("llama, untied", "float64")
    numel = sum(p.numel() for p in model.parameters())

    def run(world):
        job = Job(
            NativeFlow(model_of("llama, untied", "float64"), plan),
            plan,
            Recipe(AdamW()),
            Here(world),
        )
        job.step(data[0].rows(*plan.rows_at(job.place)))
        before = received(world, "network").total()
        job.step(data[1].rows(*plan.rows_at(job.place)))
        return received(world, "network").total() - before

    had, wanted = sum(play(plan.mesh, run)), 4 * volume(name, 4, numel)
    assert had <= wanted
    assert had > 0.999 * wanted or name == "parameters", "whose last stages stay for their backward"
    assert had > 0.7 * wanted


@pytest.mark.parametrize("name", SHARDS)
def test_static_memory_is_that_of_the_formula(name):
    """(parameters / p + gradients / g + 2 moments / o), in all workers together to the byte."""
    shards = SHARDS[name]
    plan = plan_of("float64", mesh=Mesh(data=4), shards=shards, rows=8)

    def run(world):
        model = model_of("llama, untied", "float64")
        job = Job(NativeFlow(model, plan), plan, Recipe(AdamW()), Here(world))
        held = []
        for chunk in job.chunks:
            pooled = set(chunk.shards)
            mine = [*chunk.shards.values(), *chunk.optimizer.values()]
            mine += [chunk.parameters] if "parameters" not in pooled else []
            mine += [chunk.gradients] if "gradients" not in pooled else []
            held.append(sum(t.nbytes for t in mine))
        return sum(held), sum(p.numel() for p in job.owners.values())

    every = play(plan.mesh, run)
    numel = every[0][1]
    total = 8 * numel * sum(4 // n for n in (shards.parameters, shards.gradients))
    total += 8 * numel * 2 * 4 // shards.optimizer
    assert sum(held for held, _ in every) == total
    assert max(held for held, _ in every) - min(held for held, _ in every) <= 8 * 5 * 4 * 3


def test_the_world_must_be_the_plans():
    plan = plan_of("float64", mesh=Mesh(data=2), rows=4)
    with pytest.raises(OutsizeError, match="mesh is data=2, but the workers that run are 1"):
        job_of(plan)


def test_closing_gives_back_what_parts_did_before():
    """A part whose forward is the split's own, and which the job computes again meanwhile."""
    stages = tuple(replace(s, recompute=("mlp",)) for s in MIXED[1:2])
    plan = plan_of("float64", stages=(MIXED[0], *stages, *MIXED[2:]), rows=2)
    model = model_of("llama, untied", "float64")
    mlp = model.blocks[0].mlp
    mlp.forward = own = mlp.forward
    job = Job(NativeFlow(model, plan), plan, Recipe(AdamW()))
    assert mlp.forward is not own
    job.close()
    assert mlp.forward is own
