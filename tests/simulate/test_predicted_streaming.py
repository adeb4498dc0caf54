"""Streamed plans, predicted against measured: peaks, bytes by tier, bytes moved per step.

`pytest -k predicted -s` prints the tables. The measured side is the runtime under the ledger; what
is moved is what the stores have counted, against a sum over the schedule's FETCH and EVICT.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from rates import known_hardware
from streamed import ALL, job_of, memory, model_of, resting
from subjects import VOCAB, config_of

from outsize.data import Batch
from outsize.hardware import Rate, Tier, catalogue
from outsize.memory import Ledger
from outsize.memory.tiers import TierSpec
from outsize.optim import SGD, AdamW
from outsize.plan import Plan, Precision, Stream
from outsize.plan.plan import per_segment
from outsize.schedule import Action, Kind, Lane, State
from outsize.schedule.layout import Placement
from outsize.schedule.residency import moved
from outsize.search import PlanRequest, predict
from outsize.simulate import Forecast

SEQUENCE = 64
WIDE = {"hidden_size": 64, "intermediate_size": 160}
BELOW = {"parameters": "disk", "gradients": "disk", "optimizer": "disk"}
HOST = {"gradients": "host", "optimizer": "host"}
AGAIN = per_segment(5, ("block",))
RATE = Rate(2e9, "B/s", "test", "2026-11-20")
MACHINE = known_hardware()
HARDWARE = replace(
    MACHINE, tiers=(*MACHINE.tiers, *(Tier(n, 10**10, RATE, RATE) for n in ("disk", "host")))
)
TIERS = (TierSpec("host", "memory", (), 1 << 30),)  # parts can be updated there
# name: family, precision, rows, changes of the plan, where states rest
CASES = {
    "parameters": ("llama, untied", "float32", 4, {}, {"parameters": "disk"}),
    "parameters, layers": ("llama", "float32", 8, {"order": "layer"}, {"parameters": "disk"}),
    "below": ("llama, untied", "float32", 4, {"order": "layer", "stages": AGAIN}, BELOW),
    "below, behind": (
        "llama, untied", "float32", 4, {"order": "layer", "update": "behind"}, BELOW,
    ),
    "all, microbatches": ("llama", "float32", 4, {}, ALL),
    "all, layers, uneven": ("llama, untied", "float32", 5, {"order": "layer"}, ALL),
    "all, blocks again, bfloat16": (
        "llama, untied", "bfloat16", 8, {"order": "layer", "stages": AGAIN}, ALL,
    ),
    "activations": ("llama, untied", "float32", 8, {}, {"activations": "disk"}),
    "activations, parts again": (
        "gemma2", "float32", 4, {"stages": per_segment(5, ("mlp",))}, {"activations": "host"},
    ),
    "host, interleaved": (
        "llama", "float32", 4, {"order": "layer", "stream": Stream(host=2)}, HOST,
    ),
    "four resident, biases": (
        "gpt2", "float32", 4, {"stream": Stream(resident=4, returned=2, policy="lru")}, BELOW,
    ),
}  # fmt: skip


def plan_of(name: str) -> Plan:
    _, named, rows, changes, rest = CASES[name]
    sequence = 32 if "gpt2" in CASES[name] else SEQUENCE
    plan = Plan(5, changes.get("stages", per_segment(5)), rows, 2, sequence, Precision.named(named))
    return resting(replace(plan, **changes), **rest)


def batch_of(plan: Plan) -> Batch:
    ids = torch.randint(0, VOCAB, (plan.rows, plan.sequence))
    return Batch(ids, torch.roll(ids, -1, 1), ((0, plan.sequence),) * plan.rows)


@pytest.fixture(scope="module")
def table() -> Iterator[list[tuple[str, int, int]]]:
    rows: list[tuple[str, int, int]] = []
    yield rows
    print(f"\n\n{'configuration':34}{'predicted':>12}{'measured':>12}{'measured/predicted':>20}")
    for name, predicted, found in rows:
        print(f"{name:34}{predicted:12,}{found:12,}{found / predicted:20.4f}")


@pytest.mark.parametrize("name", CASES)
def test_predicted_peak_of_streamed_plans_is_the_measured_one(name, table):
    family, named, rows, _, _ = CASES[name]
    plan = plan_of(name)
    wide = {} if family == "gpt2" else WIDE
    clip = None if plan.update == "behind" else 1.0
    config = config_of(family, **wide)
    request = PlanRequest(
        rows, plan.sequence, Precision.named(named), AdamW(), clip,
        documents=(0, plan.sequence), tiers=TIERS,
    )  # fmt: skip
    made = predict(config, request, plan, HARDWARE)
    ledger, batch = Ledger(), batch_of(plan)
    with memory(1 << 27) as stores:
        job = job_of(
            plan, stores, clip=clip, model=model_of(family, **wide), ledger=ledger,
            optimizer=AdamW(),
        )  # fmt: skip
        static = {kind: count for kind, count in ledger.live.items() if count}
        peaks = []
        for _ in range(3):
            job.step(batch, 1e-3)
            peaks.append(job.report.trace.peak())
        states = sum(home.bytes for home in job.weight_pool.homes.known.values())
    assert len(set(peaks)) == 1, "memory is allocated once"
    inputs = batch.ids_BS.nbytes + batch.targets_BS.nbytes
    assert dict(made.static) == {**static, "data": inputs}, "static kinds to the byte"
    table.append((name, made.peak, peaks[0]))
    assert 0 <= made.peak - peaks[0] <= 12 * plan.microbatches  # losses, added up in place
    if not any(stage.spills for stage in plan.stages):
        assert sum(made.below.values()) == states


@pytest.mark.parametrize("name", CASES)
def test_an_evaluation_of_a_streamed_plan_holds_what_was_predicted(name):
    """Of one microbatch to 5%; of any number of them no more than a step."""
    family, named, _, _, _ = CASES[name]
    plan, wide = plan_of(name), {} if family == "gpt2" else WIDE
    if plan.order == "microbatch":  # many, which a step has one by one
        again = tuple(
            replace(stage, recompute=here.recompute, spill=())
            for stage, here in zip(plan.stages, AGAIN, strict=True)
        )
        plan = replace(plan, rows=24, stages=again)
    request = PlanRequest(
        plan.rows, plan.sequence, Precision.named(named), AdamW(), None,
        documents=(0, plan.sequence), tiers=TIERS,
    )  # fmt: skip
    made = predict(config_of(family, **wide), request, plan, HARDWARE)
    ledger, batch = Ledger(), batch_of(plan)
    with memory(1 << 27) as stores:
        job = job_of(
            plan, stores, clip=None, model=model_of(family, **wide), ledger=ledger,
            optimizer=AdamW(),
        )  # fmt: skip
        one = batch.rows(0, plan.microbatch_rows)
        one = replace(one, ids_BS=one.ids_BS.clone(), targets_BS=one.targets_BS.clone())
        job.evaluate(one, plan.microbatch_rows)
        peak = max(ran.peak for ran in job.evaluated)
        assert 0.95 * made.evaluation <= peak <= made.evaluation <= made.peak
        ledger.budget = made.peak  # raises above it
        whole = job.evaluate(batch, plan.rows)
        begins = range(0, plan.rows, plan.microbatch_rows)
        parts = ((first, min(first + plan.microbatch_rows, plan.rows)) for first in begins)
        apart = [job.evaluate(batch.rows(*part), part[1] - part[0]) for part in parts]
    assert whole == pytest.approx(tuple(map(sum, zip(*apart, strict=True))), rel=1e-6)


# -- bytes moved -----------------------------------------------------------------------------------


def counted(placement: Placement, actions: tuple[Action, ...], kind: Kind) -> int:
    """Payload of the actions of a kind, activations apart."""
    total = 0
    for action in actions:
        if action.kind is kind and action.state is not State.ACTIVATIONS:
            for span in placement.items.spans[moved(action)]:
                if span.load if kind is Kind.FETCH else span.store:
                    total += (span.last - span.first) * span.dtype.itemsize
    return total


MOVED = {
    "parameters": {"parameters": "disk"},
    "gradients": {"gradients": "disk"},
    "optimizer": {"optimizer": "disk"},
    "below": BELOW,
}


def moved_in(plan: Plan, steps: int = 2) -> tuple[int, int]:
    """Bytes read and written by the third of three steps, which must be what the plan says."""
    with memory() as stores:
        clip = None if plan.update == "behind" else 1.0
        job = job_of(plan, stores, clip=clip)
        store, batch = stores["disk"], batch_of(plan)
        for _ in range(steps):
            job.step(batch, 1e-3)
        read, written = store.bytes_read, store.bytes_written
        job.step(batch, 1e-3)
        found = (store.bytes_read - read, store.bytes_written - written)
        actions = job.schedule.workers[0]
        assert found[0] == counted(job.placement, actions, Kind.FETCH)
        assert found[1] == counted(job.placement, actions, Kind.EVICT)
    return found


@pytest.mark.parametrize("update", ["apart", "behind"])
@pytest.mark.parametrize("what", MOVED)
def test_bytes_moved_are_the_schedules_and_do_not_grow_with_microbatches(what, update):
    found = {}
    for rows in (1, 5):
        plan = Plan(5, AGAIN, rows, 1, 20, order="layer", update=update)
        found[rows] = moved_in(resting(plan, **MOVED[what]))
    print(f"\n{what}, {update}: " + ", ".join(f"{n} {sum(v):,}" for n, v in found.items()))
    assert sum(found[5]) <= 1.02 * sum(found[1])


def test_optimizer_states_pass_once():
    """Master and two moments of every parameter in bfloat16 training: 12 bytes there and back,
    and the rounded parameters, 2 bytes, are where they are used."""
    plan = Plan(5, per_segment(5), 2, 1, 20, Precision.named("bfloat16"), order="layer")
    numel = sum(p.numel() for p in model_of("llama, untied").parameters())
    assert moved_in(resting(plan, optimizer="disk")) == (12 * numel, 12 * numel)
    # With the gradients below too they are written once and read once by the update; the parts
    # of the first backward pass may still be there.
    read, written = moved_in(resting(plan, optimizer="disk", gradients="disk"))
    assert (read, written) == (16 * numel, 16 * numel)


def test_frozen_bases_pass_twice_and_are_not_written():
    plan = Plan(5, AGAIN, 4, 1, 20, order="layer")
    with memory() as stores:
        model = model_of("llama, untied", frozen=lambda name, p: p.ndim > 1)
        job = job_of(resting(plan, parameters="disk"), stores, model=model, optimizer=SGD())
        base = sum(4 * p.numel() for p in model.parameters() if not p.requires_grad)
        written, batch = stores["disk"].bytes_written, batch_of(plan)
        job.step(batch, 1e-3)
        before = stores["disk"].bytes_read
        job.step(batch, 1e-3)
        assert stores["disk"].bytes_written == written
        assert base < stores["disk"].bytes_read - before <= 2 * base


@pytest.mark.parametrize("own", [None, 8e10])
def test_updates_on_a_host_take_the_rate_of_its_own_memory(own: float | None) -> None:
    """Of a GPU: what the device moves in an update, at the rate of the memory in which the states
    lie (that of the link where it is not known), and the link's time for the weights."""
    link = Rate(12e9, "B/s", "test", "2026-11-27")
    mine = None if own is None else replace(link, value=own)
    card = catalogue("V100-SXM2-32")
    card = replace(card, tiers=(*card.tiers, Tier("host", 1 << 40, link, link, mine)))
    config, plan = config_of("llama", **WIDE), plan_of("host, interleaved")
    request = PlanRequest(
        plan.rows, SEQUENCE, plan.precision, AdamW(), 1.0, documents=(0, SEQUENCE), tiers=TIERS
    )
    half, alone = (
        predict(config, request, replace(plan, stream=Stream(host=every)), card)
        for every in (1 << 30, 0)
    )

    def updates(made: Forecast, lane: str) -> float:
        return sum(
            e.end - e.start for e in made.trace.events if e.lane == lane and e.kind == Kind.UPDATE
        )

    on_host, on_device = updates(half, Lane.HOST), updates(alone, Lane.COMPUTE)
    ends = updates(half, Lane.COMPUTE)  # states that do not rest below
    moved = (on_device - ends) * card.devices[0].bandwidth.value
    weights = 4 * sum(
        table.numel
        for chunk, table in enumerate(half.placements[0].chunks.tables)
        if half.placements[0].chunks.tier(chunk, "optimizer") == "host"
    )
    assert on_host == pytest.approx(moved / (own or 12e9) + weights / 12e9, rel=1e-9)
