"""What the network brings: predicted bytes are those that workers count, by level those of the
formulas, and times follow from links."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from subjects import config_of
from threads import play

from outsize.collectives import Mesh, received
from outsize.data import Batch
from outsize.hardware import Hardware, Rate, catalogue
from outsize.hardware.hardware import Link
from outsize.models.build import build
from outsize.optim import AdamW, Muon
from outsize.parallel.divide import divide
from outsize.plan import Plan, Precision, Sharding, zero
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.schedule.program import Talk
from outsize.search import PlanRequest, predict
from outsize.simulate.network import far, near, seconds, workers_of_a_machine

ROWS, SEQUENCE = 8, 16
CONFIG = config_of("llama, untied")
OPTIMIZER = AdamW()


def plan_of(mesh: Mesh, shards: Sharding, **more) -> Plan:
    count = len(CONFIG.layers) + 2
    return Plan(
        count, per_segment(count), ROWS, 2, SEQUENCE, Precision.named("float64"), 8,
        mesh=mesh, shards=shards, **more,
    )  # fmt: skip


def forecast(plan: Plan, hardware: Hardware, optimizer=OPTIMIZER):
    request = PlanRequest(
        ROWS, SEQUENCE, plan.precision, optimizer, documents=(0, SEQUENCE), mesh=plan.mesh,
        shards=plan.shards, sequence_parallel=plan.sequence_parallel,
    )  # fmt: skip
    return predict(CONFIG, request, plan, hardware)


def counted(plan: Plan, optimizer=OPTIMIZER) -> list[int]:
    """Bytes of the second step, by worker: states and the tensor axis, without the few numbers that
    all agree on."""
    ids = torch.randint(0, CONFIG.vocab, (ROWS, SEQUENCE + 1))
    batch = Batch(ids[:, :-1], ids[:, 1:], ((0, SEQUENCE),) * ROWS)

    def work(world) -> int:
        model = build(CONFIG, seed=0, dtype=torch.float64)
        cuts = divide(model, world, plan)
        job = Job(NativeFlow(model, plan), plan, Recipe(optimizer), Here(world), cuts=cuts)
        mine, had = batch.rows(*plan.rows_at(job.place)), []
        for _ in range(3):
            had.append(received(world, "network", "compute").total())
            job.step(mine)
        return had[2] - had[1]

    return play(plan.mesh, work)


CASES = {
    "replicated": (Mesh(4), Sharding(), {}),
    "zero 1": (Mesh(4), zero(1, 4), {}),
    "zero 2, microbatches": (Mesh(2), zero(2, 2), {}),
    "zero 3, layers": (Mesh(2), zero(3, 2), {"order": "layer"}),
    "three levels": (Mesh(4), Sharding(1, 2, 4), {}),
    "pairs": (Mesh(4), Sharding(2, 2, 2), {}),
    "tensor": (Mesh(1, 2), Sharding(), {}),
    "tensor, two blocks by rows": (Mesh(1, 2), Sharding(), {"blocks_by_rows": 2}),
    "zero 1, tensor, all by rows": (Mesh(2, 2), zero(1, 2), {"blocks_by_rows": 3}),
    "zero 3, tensor, sequence": (Mesh(2, 2), zero(3, 2), {"sequence_parallel": True}),
    "tensor, matrices": (Mesh(1, 2), Sharding(), {"optimizer": Muon()}),
    "zero 1, tensor, matrices": (Mesh(2, 2), zero(1, 2), {"optimizer": Muon()}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_predicted_bytes_are_those_that_workers_count(case):
    mesh, shards, more = case
    optimizer = more.get("optimizer", OPTIMIZER)
    plan = plan_of(mesh, shards, **{k: v for k, v in more.items() if k != "optimizer"})
    every = counted(plan, optimizer)
    made = forecast(plan, catalogue("H200", mesh.size), optimizer)
    total = sum(part.total for part in made.received.values())
    assert total == max(every), "of workers with unequal parts the largest is predicted"
    assert all(part.far == 0 for part in made.received.values())


def gathering(size: float, count: int, stride: int = 1) -> Talk:
    return Talk(tuple(range(0, count * stride, stride)), "network", "all_gather", size)


@pytest.mark.parametrize("count", [2, 4, 8, 32])
@pytest.mark.parametrize("stride", [1, 2, 16])
def test_levels_of_a_message(count, stride):
    """By going through the workers: those of one machine share what has come to it once."""
    machine, talk = 8, gathering(1024.0, count, stride)
    machines = {rank * stride // machine for rank in range(count)}
    inside = count // len(machines)
    assert far(talk, machine) == pytest.approx(1024 / inside * (len(machines) - 1) / len(machines))
    assert near(talk, machine) == pytest.approx(1024 * (inside - 1) / inside)
    assert talk.received == near(talk, machine) + far(talk, machine)


def test_gradients_are_summed_in_a_wider_dtype_between_machines():
    """Where workers of a machine sum first, 16-bit gradients are as many bytes as 32-bit ones."""
    mixed = Precision("bfloat16", "float32", "bfloat16", "float32")
    for each, factor in ((8, 1), (2, 2), (1, 1)):
        made = {
            name: forecast(
                replace(plan_of(Mesh(4), zero(2, 4)), precision=p), catalogue("H200", each)
            )
            for name, p in (("narrow", mixed), ("wide", replace(mixed, gradients="float32")))
        }
        narrow, wide = (made[name].received["reduce"].total for name in ("narrow", "wide"))
        assert narrow * 2 == pytest.approx(wide * factor)


def test_times_follow_from_the_links():
    hardware = catalogue("A100-SXM-80", 8)
    assert workers_of_a_machine(hardware) == 8
    inside, across = gathering(8e9, 8), gathering(8e9, 16)
    assert seconds(inside, hardware) == pytest.approx(7e9 / 300e9)
    assert seconds(across, hardware) == pytest.approx(7e9 / 300e9 + 0.5e9 / 25e9)
    wait = Rate(1e-3, "s", "declared", "2026-11-22")
    slow = tuple(replace(link, latency=wait) for link in hardware.links)
    later = replace(hardware, links=slow)
    assert seconds(across, later) == pytest.approx(seconds(across, hardware) + 8e-3)


def test_a_link_of_a_pair_serves_pairs_only():
    hardware = catalogue("A100-SXM-80", 8)
    pair = Link("bridge", "devices", Rate(900e9, "B/s", "declared", "2026-11-22"), joins=2)
    bridged = replace(hardware, links=(pair, *hardware.links))
    assert seconds(gathering(2e9, 2), bridged) == pytest.approx(1e9 / 900e9)
    apart = gathering(2e9, 2, 2)
    assert seconds(apart, bridged) == seconds(apart, hardware)


def test_slower_links_make_longer_steps():
    plan = plan_of(Mesh(4, 2), zero(3, 4))
    near, far = (forecast(plan, catalogue("H200", count)) for count in (8, 2))
    assert far.seconds > near.seconds
    assert sum(part.far for part in far.received.values()) > 0
    assert far.received["tensor"].far == 0
