"""The planner of one device: what it chooses fits, what it composes is what a rehearsal gives."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from rates import known_hardware
from subjects import config_of

from outsize.collectives import Mesh
from outsize.data import Batch
from outsize.errors import OutsizeError
from outsize.hardware import Hardware, Measured, Rate, catalogue
from outsize.memory import Ledger
from outsize.models.build import build
from outsize.optim import AdamW
from outsize.plan import Plan, Precision, Stage, zero
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.search import PlanRequest, choose, native_makers, predict
from outsize.search.candidates import candidates as candidates_of
from outsize.search.request import facts_of_model
from outsize.simulate.counter import Work
from outsize.simulate.forecast import compose, duration
from outsize.simulate.rehearse import rehearse
from outsize.simulate.sample import expand, sample

HARDWARE = catalogue("H200")
CONFIG = config_of("llama")
WISH = PlanRequest(
    rows=4, sequence=32, precision=Precision.named("float32"), optimizer=AdamW(), clip=1.0
)


def graded(*parts: tuple[str, ...]) -> tuple[Stage, ...]:
    """Recompute of each of the three blocks."""
    inner = (Stage(i, i + 1, part) for i, part in enumerate(parts, start=1))
    return (Stage(0, 1), *inner, Stage(4, 5))


BLOCK = ("block",)
GRADED = {
    "none": graded((), (), ()),
    "first": graded(BLOCK, (), ()),
    "last": graded((), (), BLOCK),
    "two of three": graded(BLOCK, BLOCK, ()),
    "in the middle": graded((), BLOCK, ()),
    "all": graded(BLOCK, BLOCK, BLOCK),
    "beside parts": graded(BLOCK, ("mlp",), ("attention",)),
}


@pytest.mark.parametrize(
    ("family", "name", "split"),
    [
        *(("llama", name, len(name) % 2 == 0) for name in GRADED),
        ("llama", "first", True),
        ("gemma2", "two of three", False),
    ],
)
def test_a_graded_plan_composed_is_the_plan_rehearsed(family, name, split):
    """From a sample of one layer of each sort; gemma2's windows take turns."""
    config = config_of(family)
    plan = Plan(5, GRADED[name], 4, 2, 32, WISH.precision, split_backward=split)
    chosen = sample(config, plan)
    small = rehearse(chosen.plan, *native_makers(chosen.config, WISH))
    composed = expand(small, chosen, plan, facts_of_model(config, WISH))
    direct = rehearse(plan, *native_makers(config, WISH))
    direct = replace(direct, facts=replace(direct.facts, filling=WISH.filling))  # as predict does
    assert composed.data == direct.data and composed.facts == direct.facts
    ours, theirs = compose(plan, composed, HARDWARE), compose(plan, direct, HARDWARE)
    assert ours.static == theirs.static and ours.segments == theirs.segments
    assert ours.peak == theirs.peak
    assert [e.peak for e in ours.trace.events] == [e.peak for e in theirs.trace.events]
    assert [e.live for e in ours.trace.events] == [e.live for e in theirs.trace.events]
    assert ours.flops == theirs.flops
    assert ours.seconds == pytest.approx(theirs.seconds, rel=1e-12)


def test_a_sample_has_one_layer_of_each_sort():
    for name, sorts in {"none": 1, "first": 2, "two of three": 2, "all": 1}.items():
        plan = Plan(5, GRADED[name], 4, 2, 32, WISH.precision)
        assert len(sample(CONFIG, plan).config.layers) == sorts


@pytest.fixture(scope="module")
def candidates():
    return [predict(CONFIG, WISH, plan, HARDWARE) for plan in candidates_of(WISH, 5)]


def test_candidates_hold_ever_less(candidates):
    """The first is the plainest, the last is the smallest: the one that an error speaks of."""
    assert len(candidates) >= 6
    assert not any(stage.recompute for stage in candidates[0].plan.stages)
    assert candidates[-1].peak == min(made.peak for made in candidates)
    graded = [m for m in candidates if any(stage.whole for stage in m.plan.stages)]
    assert [m.flops for m in graded] == sorted(m.flops for m in graded)


def missing(error: OutsizeError) -> int:
    return int(re.search(r"(\d+) bytes? missing", str(error))[1])


def test_one_byte_less_gives_a_smaller_plan_or_names_what_is_missing(candidates):
    first, smallest = candidates[0].peak, candidates[-1].peak
    assert choose(CONFIG, replace(WISH, budget=first), HARDWARE).peak == first
    made = choose(CONFIG, replace(WISH, budget=first - 1), HARDWARE)
    assert smallest <= made.peak < first and made.plan.budget == first - 1
    # All candidates are looked at for the one, only the first and the last for the other.
    for budget in (smallest - 1, 1000):
        with pytest.raises(OutsizeError) as caught:
            choose(CONFIG, replace(WISH, budget=budget), HARDWARE)
        assert missing(caught.value) == smallest - budget
        assert f"({smallest} bytes" in str(caught.value) and "\n" not in str(caught.value)


def test_the_smallest_plan_runs_in_what_it_was_predicted(candidates):
    """With a budget of its peak and rows of all kinds of documents."""
    plan = candidates[-1].plan
    ledger = Ledger(candidates[-1].peak)
    flow = NativeFlow(build(CONFIG, seed=0), plan)
    job = Job(flow, plan, Recipe(WISH.optimizer, 1.0), Here(ledger=ledger))
    ids = torch.randint(0, 53, (4, 32))
    for _ in range(2):
        job.step(Batch(ids, ids.clone(), ((0, 9, 32), (0, 32), (0, 1, 2, 32), (0, 31, 32))))


def test_long_rows_come_in_chunks_last():
    """The smallest candidate of all; what the user fixes is kept, and asks for recompute."""
    request = replace(WISH, rows=1, sequence=256, documents=(0, 256))
    plans = list(candidates_of(request, 5))
    assert [plan.sequence_chunk for plan in plans[-3:]] == [0, 64, 64]
    longer = list(candidates_of(replace(request, sequence=4096), 5))
    assert [plan.sequence_chunk for plan in longer[-4:]] == [0, 512, 128, 128]
    tight, last = (predict(CONFIG, request, plans[i], HARDWARE).peak for i in (-3, -1))
    assert last < 0.8 * tight
    fixed = list(candidates_of(replace(request, sequence_chunk=100), 5))
    assert all(plan.sequence_chunk == 100 and plan.stages[1].whole for plan in fixed)
    split = candidates_of(replace(request, split_backward=True), 5)
    assert not any(plan.sequence_chunk for plan in split)


def test_chunks_are_shared_out_where_all_blocks_have_them():
    request = replace(WISH, sequence=4096, mesh=Mesh(tensor=2), sequence_parallel=True)
    chunked = [plan for plan in candidates_of(request, 5) if plan.sequence_chunk]
    assert chunked and all(stage.whole for plan in chunked for stage in plan.stages[1:-1])


def test_what_is_fixed_stays_fixed():
    request = replace(
        WISH, microbatch_rows=3, recompute=("mlp",), loss_chunk=0, mlp_tile=5, split_backward=True,
    )  # fmt: skip
    plan = choose(CONFIG, request, HARDWARE).plan
    assert plan.microbatch_rows == 3 and plan.rows == 4 and plan.sequence == 32
    assert plan.stages == per_segment(5, ("mlp",))
    assert plan.loss_chunk == 0 and plan.mlp_tile == 5 and plan.split_backward
    bare = replace(
        WISH, precision=Precision("bfloat16"), approximate=("bfloat16-weights",), microbatch_rows=9,
        recompute=(), loss_chunk=0, mlp_tile=0,
    )  # fmt: skip
    plan = choose(CONFIG, bare, HARDWARE).plan
    assert plan.precision.master is None and plan.approximate == ("bfloat16-weights",)
    assert plan.microbatch_rows == 4, "no more rows than there are"


def test_a_given_plan_is_predicted_as_a_chosen_one():
    made = choose(CONFIG, WISH, HARDWARE)
    again = predict(CONFIG, WISH, made.plan, HARDWARE)
    assert (again.peak, again.static, again.segments) == (made.peak, made.static, made.segments)


def test_documents_that_are_known_are_predicted_instead_of_the_costliest():
    """In float64, whose capped scores no kernel makes tile by tile: they exist as a whole."""
    config, wish = config_of("gemma2"), replace(WISH, precision=Precision.named("float64"))
    plan = Plan(5, per_segment(5), 4, 2, 32, wish.precision)
    anything = predict(config, wish, plan, HARDWARE).peak
    short = replace(wish, documents=tuple(range(0, 33, 4)))
    assert predict(config, short, plan, HARDWARE).peak < anything


def test_workers_cut_more_where_less_does_not_fit():
    """Of four workers: stage 1 while it fits, then whatever of 1 to 3 is quickest."""
    request = replace(WISH, mesh=Mesh(data=4))
    best = {}
    for stage in (1, 2, 3):
        plans = candidates_of(replace(request, shards=zero(stage, 4)), 5)
        best[stage] = [predict(CONFIG, request, plan, HARDWARE) for plan in plans]
    least = {stage: min(made.peak for made in best[stage]) for stage in best}
    assert least[3] < least[2] < least[1]
    for budget in (None, least[1] - 1, least[2] - 1):
        fitting = [m for stage in best for m in best[stage] if budget is None or m.peak <= budget]
        made = choose(CONFIG, replace(request, budget=budget), HARDWARE)
        assert budget is None or made.peak <= budget
        assert made.seconds == pytest.approx(min(m.seconds for m in fitting), rel=0.05)
        if budget is None:
            assert made.plan.shards == zero(1, 4)
        if budget == least[2] - 1:
            assert made.plan.shards == zero(3, 4)
    with pytest.raises(OutsizeError, match=rf"the smallest plan needs .* \({least[3]} bytes"):
        choose(CONFIG, replace(request, budget=least[3] - 1), HARDWARE)
    with pytest.raises(OutsizeError, match="too small"):  # the user says that nothing else is cut
        choose(CONFIG, replace(request, budget=least[1] - 1, shards=zero(1, 4)), HARDWARE)


def handing(seconds: float) -> Hardware:
    """A GPU whose host takes so long for each operator that it hands out."""
    (device,) = HARDWARE.devices
    measured = Measured(handed=Rate(seconds, "s", "test", "2026-11-26"))
    return replace(HARDWARE, devices=(replace(device, measured=measured),))


def test_what_waits_for_the_host_takes_as_long_as_its_calls() -> None:
    work = Work(moved=48e9, calls=10)  # at 4.8 TB/s
    assert duration(work, handing(1e-2).devices[0]) == pytest.approx(0.1)
    assert duration(work, handing(1e-5).devices[0]) == pytest.approx(0.01)
    assert duration(work, known_hardware().devices[0]) == pytest.approx(48 / 20 + 10e-6)


def test_a_device_with_queues_has_microbatches_and_chunks_as_large_as_fit() -> None:
    wish, machine = replace(WISH, rows=8, at_once=64, logits=16, apart=True), handing(3e-5)
    first = replace(next(candidates_of(wish, 5)), microbatch_rows=2, loss_chunk=16)
    small = predict(CONFIG, wish, first, machine)

    def sizes(**changes: object) -> tuple[int, int]:
        plan = choose(CONFIG, replace(wish, **changes), machine).plan
        return plan.microbatch_rows, plan.loss_chunk

    made = choose(CONFIG, wish, machine)
    assert (made.plan.microbatch_rows, made.plan.loss_chunk) == (8, 256)
    assert made.seconds < 0.5 * small.seconds
    assert sizes(budget=small.peak)[0] == 2
    assert sizes(microbatch_rows=4, loss_chunk=32) == (4, 32)
    assert sizes(apart=False) == (2, 16)
