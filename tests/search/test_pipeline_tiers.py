"""The choice of tiers for the workers of a pipeline: each one's states fit its own memory and
tiers, what is foretold of it is what it counts, and the numbers are those of one worker."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plain import batches
from subjects import config_of
from threads import play

from outsize.collectives import Mesh
from outsize.errors import OutsizeError
from outsize.hardware import Rate, Tier, catalogue
from outsize.memory import Ledger
from outsize.memory.store import MemoryStore
from outsize.memory.tiers import TierSpec
from outsize.models.build import build
from outsize.optim import AdamW
from outsize.plan import DEVICE, Plan, Precision
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.search import Wish, choose, ladder, oracle_of
from outsize.search.places import places_of
from outsize.search.tiers import states
from outsize.simulate import Forecast

KIB, MIB = 1 << 10, 1 << 20
ROWS, SEQUENCE, LAYERS = 4, 8, 6
DISK = TierSpec("disk", "disk", (Path("."),), 64 * MIB)
RATE = Rate(1e9, "B/s", "test", "2026-11-22")
MACHINE = catalogue("H200", 2)
MACHINE = replace(MACHINE, tiers=(*MACHINE.tiers, Tier("disk", 64 * MIB, RATE, RATE)))
WISH = Wish(
    ROWS, SEQUENCE, Precision.named("float64"), AdamW(), 0.5, microbatch_rows=1, recompute=(),
    loss_chunk=64, mlp_tile=0, tiers=(DISK,), documents=(0, SEQUENCE), mesh=Mesh(pipeline=2),
)  # fmt: skip
LARGER = {"num_hidden_layers": LAYERS, "hidden_size": 48, "intermediate_size": 96}
UNTIED = config_of("llama, untied", **LARGER)
TIED = config_of("gpt2", n_layer=LAYERS, n_embd=48)
CASES = {
    "1f1b": (UNTIED, "1f1b"),
    "an embedding on both ends": (TIED, "interleaved:2"),
    "stages on two workers": (UNTIED, "chimera"),
}


def chosen(config, wish: Wish, budget: int) -> Forecast:
    return choose(config, replace(wish, budget=budget), MACHINE)


def missing(error) -> int:
    return int(re.search(r"(\d+) bytes missing", str(error))[1])


def losses(config, plan: Plan, world=None, capacity: int = 64 * MIB):
    """(loss and norm of each of two steps, the peak of the second)."""
    store, ledger = MemoryStore("disk", capacity), Ledger()
    job = Job(
        NativeFlow(build(config, seed=0, dtype=torch.float64), plan), plan,
        WISH.optimizer, clip=WISH.clip, ledger=ledger, stores={"disk": store},
        **({} if world is None else {"world": world}),
    )  # fmt: skip
    found = []
    for batch in batches(2, ROWS, SEQUENCE, config.vocab):
        found.append((float(job.step(batch, 1e-2)), job.report.norm))
    peak = job.report.trace.peak()
    job.close()
    store.close()
    return found, peak


@pytest.mark.parametrize("case", CASES)
def test_what_is_chosen_fits_every_worker_and_gives_the_numbers_of_one(case):
    config, schedule = CASES[case]
    wish = replace(WISH, pipeline=schedule)
    top = choose(config, replace(wish, tiers=()), MACHINE)
    made = chosen(config, wish, top.peak * 7 // 10)
    plan = made.plan
    assert made.peak == max(made.peaks) <= top.peak * 7 // 10
    assert all(0 < turn.below["disk"] <= made.below["disk"] for turn in made.turns)

    segments = LAYERS + 2
    alone = Plan(segments, per_segment(segments), ROWS, 1, SEQUENCE, plan.precision, 512)
    wanted, _ = losses(config, alone)
    most = made.below["disk"] + 64 * 4 * KIB  # each state begins a page
    for turn, (found, peak) in zip(
        made.turns, play(plan.mesh, lambda world: losses(config, plan, world, most)), strict=True
    ):
        assert [n for pair in found for n in pair] == pytest.approx(
            [n for pair in wanted for n in pair], rel=1e-10
        )
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
    rich, poor = sorted(made.turns, key=lambda turn: turn.below.get("disk", 0))
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
    assert sum(turn.below["disk"] for turn in made.turns) > enough.bytes >= made.below["disk"]


def test_the_ladder_of_a_pipeline_saves_ever_more():
    deep = config_of("llama, untied", **{**LARGER, "num_hidden_layers": 12})
    rungs = ladder(oracle_of(deep, WISH, MACHINE), 14)
    names = [rung.technique for rung in rungs]
    at = names.index("optimizer states below")
    assert names[at : at + 3] == [
        "optimizer states below", "gradients below", "parameters below",
    ]  # fmt: skip
    held = [rung.bytes for rung in rungs[at - 1 : at + 3]]
    assert held == sorted(held, reverse=True)


def test_the_states_of_all_workers_are_the_models():
    plan = choose(UNTIED, replace(WISH, tiers=()), MACHINE).plan
    facts = oracle_of(UNTIED, WISH, MACHINE).facts
    whole = 4 * 8 * sum(table.numel for table in facts.tables)
    assert states(facts, plan).total == whole
    places = places_of(facts, plan)
    assert len(places) == 2 and sum(place.sizes.total for place in places) == whole


def test_gradients_that_the_tensor_axis_sums_stay_on_the_device():
    """Those of blocks where tokens are cut, for the sake of norms; none where they are not."""
    wish = replace(WISH, mesh=Mesh(tensor=2), microbatch_rows=None)
    for cut, tiers in ((False, {"disk"}), (True, {DEVICE})):
        own = replace(wish, sequence_parallel=cut)
        with pytest.raises(OutsizeError, match="bytes missing") as caught:
            chosen(UNTIED, own, KIB)
        plan = chosen(UNTIED, own, KIB + missing(caught.value)).plan
        assert {stage.rest.optimizer for stage in plan.stages} == {"disk"}
        assert {stage.rest.gradients for stage in plan.stages[1:-1]} == tiers
