"""The choice of tiers for the workers of a pipeline: each one's states fit its own memory and
tiers, what is predicted of it is what it counts, and the numbers are those of one worker."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiered
from subjects import config_of
from threads import play
from tiered import DISK, KIB, LARGER, LAYERS, MACHINE, ROWS, SEQUENCE, chosen, losses, missing

from outsize.collectives import Mesh
from outsize.errors import OutsizeError
from outsize.plan import DEVICE, Plan
from outsize.plan.plan import per_segment
from outsize.search import choose, forecaster_of
from outsize.search.tiers import states
from outsize.search.tradeoffs import tradeoffs
from outsize.search.worker_states import worker_states

WISH = replace(tiered.WISH, mesh=Mesh(pipeline=2))
UNTIED = config_of("llama, untied", **LARGER)
TIED = config_of("gpt2", n_layer=LAYERS, n_embd=48)
CASES = {
    "1f1b": (UNTIED, "1f1b"),
    "an embedding on both ends": (TIED, "interleaved:2"),
    "stages on two workers": (UNTIED, "chimera"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_chosen_fits_every_worker_and_gives_the_numbers_of_one(case):
    config, schedule = CASES[case]
    request = replace(WISH, pipeline=schedule)
    top = choose(config, replace(request, tiers=()), MACHINE)
    made = chosen(config, request, top.peak * 7 // 10)
    plan = made.plan
    assert made.peak == max(made.peaks) <= top.peak * 7 // 10
    assert all(0 < turn.below["disk"] <= made.below["disk"] for turn in made.ranks)

    segments = LAYERS + 2
    alone = Plan(segments, per_segment(segments), ROWS, 1, SEQUENCE, plan.precision, 512)
    wanted, _ = losses(config, alone, WISH, 2)
    most = made.below["disk"] + 64 * 4 * KIB  # each state begins a page
    for turn, (found, peak) in zip(
        made.ranks,
        play(plan.mesh, lambda world: losses(config, plan, WISH, 2, world, most)),
        strict=True,
    ):
        assert found == pytest.approx(wanted, rel=1e-10)
        assert peak <= turn.peak <= 1.05 * peak


def test_the_worker_that_misses_most_is_named_with_what_it_misses():
    with pytest.raises(OutsizeError, match=r"\d+ bytes missing on worker [01]; ") as caught:
        chosen(UNTIED, WISH, KIB)
    least = KIB + missing(caught.value)
    assert chosen(UNTIED, WISH, least).peak == least, "the nearest that works, works"
    with pytest.raises(OutsizeError) as caught:
        chosen(UNTIED, WISH, least - 1)
    assert missing(caught.value) == 1 and "\n" not in str(caught.value)


def test_each_worker_has_below_what_it_has_no_room_for():
    """A head and an embedding of a large vocabulary: cuts that leave one worker much more."""
    config = config_of("llama, untied", **LARGER, vocab_size=2000)
    top = choose(config, replace(WISH, tiers=()), MACHINE)
    full, spare = max(top.peaks), min(top.peaks)
    assert spare < 0.8 * full
    made = chosen(config, WISH, (full + spare) // 2)
    rich, poor = sorted(made.ranks, key=lambda turn: turn.below.get("disk", 0))
    assert not rich.below and poor.below["disk"] > 0
    assert made.plan.stream.pool > 0, "what it has left is its pool's"
    for stage, said in enumerate(made.plan.stages):
        if stage in rich.stages:
            assert set(vars(said.rest).values()) == {DEVICE}


def test_tiers_are_each_workers_own():
    """What is too small for the worker that needs most is refused; what it needs is enough for
    all."""
    top = choose(UNTIED, replace(WISH, tiers=()), MACHINE)
    budget = top.peak * 6 // 10
    small = replace(DISK, bytes=4 * KIB)
    with pytest.raises(OutsizeError, match=r"disk 4\.00 KiB.*bytes missing") as caught:
        chosen(UNTIED, replace(WISH, tiers=(small,)), budget)
    enough = replace(small, bytes=small.bytes + missing(caught.value))
    made = chosen(UNTIED, replace(WISH, tiers=(enough,)), budget)
    assert sum(turn.below["disk"] for turn in made.ranks) > enough.bytes >= made.below["disk"]


def test_the_ladder_of_a_pipeline_saves_ever_more():
    deep = config_of("llama, untied", **{**LARGER, "num_hidden_layers": 12})
    found = tradeoffs(forecaster_of(deep, WISH, MACHINE), 14)
    names = [one.technique for one in found]
    at = names.index("optimizer states below")
    assert names[at : at + 3] == [
        "optimizer states below", "gradients below", "parameters below",
    ]  # fmt: skip
    held = [one.bytes for one in found[at - 1 : at + 3]]
    assert held == sorted(held, reverse=True)


def test_the_states_of_all_workers_are_the_models():
    plan = choose(UNTIED, replace(WISH, tiers=()), MACHINE).plan
    facts = forecaster_of(UNTIED, WISH, MACHINE).facts
    whole = 4 * 8 * sum(table.numel for table in facts.tables)
    assert states(facts, plan).total == whole
    places = worker_states(facts, plan)
    assert len(places) == 2 and sum(place.sizes.total for place in places) == whole


def test_gradients_that_the_tensor_axis_sums_stay_on_the_device():
    """Those of blocks where tokens are cut, for the sake of norms; none where they are not."""
    request = replace(WISH, mesh=Mesh(tensor=2))
    for cut, tiers in ((False, {"disk"}), (True, {DEVICE})):
        own = replace(request, sequence_parallel=cut)
        with pytest.raises(OutsizeError, match="bytes missing") as caught:
            chosen(UNTIED, own, KIB)
        plan = chosen(UNTIED, own, KIB + missing(caught.value)).plan
        assert {stage.rest.optimizer for stage in plan.stages} == {"disk"}
        assert {stage.rest.gradients for stage in plan.stages[1:-1]} == tiers


def test_schedules_are_compared_with_states_below():
    """Each with as much below as its microbatches leave no room for."""
    request = replace(WISH, pipeline="auto")
    top = choose(UNTIED, replace(WISH, pipeline="1f1b", tiers=()), MACHINE)
    budget = top.peak * 7 // 10
    plain, beside = (chosen(UNTIED, replace(WISH, pipeline=n), budget) for n in ("1f1b", "zb-h1"))
    made = chosen(UNTIED, request, budget)
    assert made.below and made.peak <= budget
    assert made.seconds <= min(plain.seconds, beside.seconds / 0.99)
    assert "published schedules" in made.why[0][1]
    made.prove()
