"""The choice of tiers: graded, within the budget and the tiers, refused with what is missing."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
from subjects import config_of

from outsize.errors import OutsizeError
from outsize.hardware import Rate, Tier, catalogue
from outsize.memory.tiers import TierSpec
from outsize.models.build import build
from outsize.models.families import parse
from outsize.models.presets import PRESETS
from outsize.optim import AdamW
from outsize.plan import DEVICE, Plan, Precision, Rest, Stream
from outsize.plan.interleaved import shared
from outsize.plan.plan import per_segment
from outsize.search import PlanRequest, choose, forecaster_of, predict
from outsize.search.offload import choose_offloaded
from outsize.search.thresholds import pace, thresholds
from outsize.search.tiers import (
    APART,
    UPDATES_FIRST,
    Passing,
    graded,
    in_order,
    moved,
    placed,
    pool_bytes,
    states,
)
from outsize.search.tradeoffs import tradeoffs

GIB, MIB = 1 << 30, 1 << 20
DISK = TierSpec("disk", "disk", (Path("."),), 400 * GIB)
HOST = TierSpec("host", "memory", (), 64 * GIB)
BLOCKS = 5
FACTS = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000,
    "num_hidden_layers": BLOCKS, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
CONFIG = parse(FACTS)
FP32 = Precision.named("float32")
WISH = PlanRequest(4, 64, FP32, AdamW(), 1.0, tiers=(DISK,), documents=(0, 64))


def machine(read=1e12, write=1e12, name="disk"):
    """An H200 with a tier of these rates."""
    made = catalogue("H200")
    rates = (Rate(value, "B/s", "test", "2026-11-21") for value in (read, write))
    others = tuple(tier for tier in made.tiers if tier.name not in (name, "host"))
    link = Rate(50e9, "B/s", "test", "2026-11-21")
    host = () if name == "host" else (Tier("host", 64 * GIB, link, link),)
    return replace(made, tiers=(*others, *host, Tier(name, 400 * GIB, *rates)))


MACHINE = machine()


def chosen(budget, request=WISH, hardware=MACHINE, config=CONFIG):
    return choose(config, replace(request, budget=budget), hardware)


def missing(error):
    return int(re.search(r"(\d+) bytes? missing", str(error))[1])


@pytest.fixture(scope="module")
def least():
    """The nearest budget that an error names."""
    with pytest.raises(OutsizeError) as caught:
        chosen(MIB)
    return MIB + missing(caught.value)


@pytest.fixture(scope="module")
def plenty():
    return choose(CONFIG, WISH, MACHINE)


def test_the_missing_bytes_are_exact(least):
    made = chosen(least)
    assert made.peak == least, "the nearest that works, works"
    with pytest.raises(OutsizeError) as caught:
        chosen(least - 1)
    assert missing(caught.value) == 1 and "\n" not in str(caught.value)
    assert f"({least} bytes)" in str(caught.value)


@pytest.mark.parametrize("clip", [1.0, None])
def test_the_choice_is_graded_from_the_least_budget_to_plenty(least, plenty, clip):
    """One way of computing: as the budget grows, less lies below and a step takes less, but for
    what a deeper pool takes and what the layout of its rooms is lucky with."""
    request = replace(WISH, clip=clip, recompute=(), microbatch_rows=4, loss_chunk=64, mlp_tile=0)
    top = choose(CONFIG, request, MACHINE)
    total = sum(top.static.values()) - top.static["data"]
    low = chosen(top.peak - total + total // 3, request).peak
    budgets = [low + (top.peak - low) * part // 8 for part in range(9)]
    made = [chosen(budget, request) for budget in budgets]
    for budget, one in zip(budgets, made, strict=True):
        assert one.peak <= budget and one.plan.budget == budget
    for budget, one in zip(budgets[::4], made[::4], strict=True):
        assert predict(CONFIG, replace(request, budget=budget), one.plan, MACHINE).peak == one.peak
    every = (*KINDS, "activations")  # which may go in place of states
    below = [sum(rests(one.plan, kind) for kind in every) for one in made]
    assert all(b <= a + 2 for a, b in itertools.pairwise(below))
    assert len(set(below)) >= 6 and below[0] >= max(below) - 2
    assert below[-1] == 0 or clip is None  # gradients in a pool cost nothing then
    seconds = [one.seconds for one in made]
    assert all(b <= 1.1 * a for a, b in itertools.pairwise(seconds))
    assert all(b <= a for a, b in zip(seconds, seconds[4:], strict=False))
    assert made[-1].seconds == pytest.approx(top.seconds)


KINDS = ("optimizer", "gradients", "parameters")


def rests(plan: Plan, kind: str) -> int:
    return sum(getattr(stage.rest, kind) != DEVICE for stage in plan.stages)


def test_every_budget_gets_a_plan_that_fits(least, plenty):
    """Whatever the way of computing."""
    budgets = [least + (plenty.peak - least) * part // 6 for part in (0, 3, 5, 6)]
    made = [chosen(budget) for budget in budgets]
    assert all(one.peak <= budget for one, budget in zip(made, budgets, strict=True))
    seconds = [one.seconds for one in made]
    assert all(b <= 1.1 * a for a, b in itertools.pairwise(seconds))
    assert seconds[-1] == pytest.approx(plenty.seconds) and not made[-1].below
    some = sum(rests(made[-2].plan, kind) for kind in ("optimizer", "activations"))
    assert some > 0 and not rests(made[-2].plan, "parameters")


def levels(count: int) -> int:
    return len(APART) * count


def lower(count: int, level: int):
    return graded(in_order(range(count), count), level, APART)


def test_optimizer_states_go_first_and_gradients_next():
    order = [lower(6, level) for level in range(levels(6) + 1)]
    for below in order:
        if below["gradients"]:
            assert len(below["optimizer"]) == 6
        if below["parameters"]:
            assert len(below["gradients"]) == 6
    counts = [sum(map(len, below.values())) for below in order]
    assert counts == list(range(19)), "one segment's state a level"
    assert order[2]["optimizer"] == {1, 2}, "blocks before the prologue and the epilogue"


@pytest.mark.parametrize(("family", "update"), [("llama", "apart"), ("gemma2", "behind")])
def test_estimates_of_states_and_pools_are_what_is_placed(family, update):
    """Against the placement that a job has; pools to a few pages, for rooms are pages."""
    config = config_of(family)
    segments = len(config.layers) + 2
    facts = forecaster_of(config, replace(WISH, tiers=(DISK,)), MACHINE).facts
    plan = Plan(segments, per_segment(segments), 4, 4, 32, FP32, order="layer", update=update)
    sizes = states(facts, plan)
    assert sizes.total == 16 * sum(table.numel for table in facts.tables)
    for level in range(levels(segments) + 1):
        below = lower(segments, level)
        tiers = placed(sizes, below, 0, (DISK,)).rests
        stages = (replace(s, rest=r) for s, r in zip(plan.stages, tiers, strict=True))
        for resident in (1, 2):
            mine = replace(plan, stages=tuple(stages) or plan.stages, stream=Stream(resident))
            placement = facts.placement(mine)
            passing = Passing(resident, mine.stream.part, update == "behind")
            about = pool_bytes(sizes, below, passing)
            assert about <= placement.pool <= 1.2 * about + 40960, (level, resident)
            stages = mine.stages


def test_traffic_is_what_the_schedule_moves():
    """Bytes of every FETCH and EVICT of a step whose pool keeps nothing, one microbatch or many."""
    segments = BLOCKS + 2
    forecaster = forecaster_of(CONFIG, WISH, MACHINE)
    rest = Rest("disk", "disk", "disk")
    for rows, order in ((4, "microbatch"), (1, "layer")):
        stages = tuple(replace(s, rest=rest) for s in per_segment(segments))
        stream = Stream(policy="static")
        plan = Plan(segments, stages, 4, rows, 64, FP32, 64, order=order, stream=stream)
        made = forecaster.forecast(plan)
        sizes = states(forecaster.facts, plan)
        traffic = moved(sizes, [rest] * segments, False, 1)
        want = sum(book["disk"] for phase in (traffic.passes, traffic.updates) for book in phase)
        spent = sum(e.end - e.start for e in made.trace.events if e.lane != "compute")
        # The turn at the end of the forward passes finds the last stages there.
        assert spent * 1e12 == pytest.approx(want, rel=0.2) and spent * 1e12 <= want


def test_tiers_are_filled_in_order_and_what_moves_most_is_nearest():
    facts = forecaster_of(CONFIG, WISH, MACHINE).facts
    segments = BLOCKS + 2
    sizes = states(facts, Plan(segments, per_segment(segments), precision=FP32))
    below = lower(segments, levels(segments))
    weights = sum(sizes.bytes["parameters"])
    small = replace(HOST, bytes=weights + MIB)
    found = placed(sizes, below, 0, (small, DISK)).rests
    assert {rest.parameters for rest in found} == {"host"}
    assert {rest.optimizer for rest in found} == {"disk"}
    used = sum(
        sizes.bytes[kind][i]
        for i, rest in enumerate(found)
        for kind in KINDS
        if getattr(rest, kind) == "host"
    )
    assert weights <= used <= small.bytes
    assert placed(sizes, below, 0, (replace(HOST, bytes=sizes.total // 2),)).short > 0


def test_what_updates_move_may_take_the_first_tier_instead():
    facts = forecaster_of(CONFIG, WISH, MACHINE).facts
    segments = BLOCKS + 2
    sizes = states(facts, Plan(segments, per_segment(segments), precision=FP32))
    below = lower(segments, levels(segments))
    late = sum(sizes.bytes["optimizer"]) + sum(sizes.bytes["gradients"])
    small = replace(HOST, bytes=late + MIB)
    found = placed(sizes, below, 2 * MIB, (small, DISK), UPDATES_FIRST)
    assert {(rest.optimizer, rest.gradients) for rest in found.rests} == {("host", "host")}
    assert "disk" in {rest.parameters for rest in found.rests} and found.activations == "disk"


def test_a_tier_that_is_too_small_is_refused_with_the_bytes_that_are_missing(least):
    budget = 2 * least
    tight = replace(WISH, tiers=(replace(DISK, bytes=8 * MIB),))
    with pytest.raises(OutsizeError, match=r"disk 8\.00 MiB") as caught:
        chosen(budget, tight)
    enough = replace(WISH, tiers=(replace(DISK, bytes=8 * MIB + missing(caught.value)),))
    made = chosen(budget, enough)
    assert made.peak <= budget and 8 * MIB < made.below["disk"] <= enough.tiers[0].bytes


def test_updates_are_made_on_the_host_by_the_rates():
    """`shared` against all shares; a fast host takes part, a slow one does not."""
    for over, resting in ((1.0, 1.0), (1.0, 0.2), (1.0, 3.0), (0.1, 1.0), (5.0, 0.1), (0.01, 1.0)):
        pairs = ((n, k) for n in range(2, 65) for k in range(1, n))
        cost = {(n, k): max(k * over, (n - k) * resting) / n for n, k in pairs} | {(0, 1): over}
        assert cost[shared(over, resting)] == min(cost.values())
    request = replace(WISH, tiers=(HOST,), recompute=(), microbatch_rows=4)
    hardware = machine(50e9, 50e9, "host")
    hardware = replace(hardware, devices=(replace(hardware.devices[0], kind="cpu"),))
    top = choose(CONFIG, request, hardware)
    little = top.peak - (sum(top.static.values()) - top.static["data"]) * 7 // 10
    made = chosen(little, request, hardware)
    assert made.plan.stream.host >= 2 and "host" in {e.lane for e in made.trace.events}
    alone = replace(made.plan, stream=replace(made.plan.stream, host=0, over=1))
    request = replace(request, budget=little)
    predicted = predict(CONFIG, request, alone, hardware)
    assert predicted.seconds > made.seconds


# Away from 1, where neither side of the formula dominates.
@pytest.mark.parametrize("times", [0.25, 0.4, 2.0, 4.0])
def test_streaming_is_hidden_beyond_the_threshold(times):
    """A disk so quick that the threshold is at tokens / times: a predicted step takes what it
    computes beyond it, and before it what its weights take to come."""
    blocks = 8  # fewer, and what comes first and last is more than a hundredth
    config, segments = parse(FACTS | {"num_hidden_layers": blocks}), blocks + 2
    base = Plan(segments, per_segment(segments), 8, 1, 64, FP32, 64, order="layer")
    request = replace(WISH, rows=8)
    forecaster = forecaster_of(config, request, MACHINE)
    plain = forecaster.forecast(base)
    one = pace(plain, states(forecaster.facts, base))
    speed = one.parameters / (8 * 64 * one.forward) * times
    hardware = machine(speed, speed)
    inner = range(1, segments - 1)
    stages = tuple(
        replace(s, rest=Rest(parameters="disk") if i in inner else Rest())
        for i, s in enumerate(base.stages)
    )
    plan = replace(base, stages=stages, stream=Stream(policy="static"))
    limit = thresholds(plain, states(forecaster.facts, base), (DISK,), hardware)[0]
    # Gradients stay here, so only the forward passes' side of the threshold is met.
    assert limit.of == "step" and limit.tokens >= 8 * 64 / times * 0.999
    made = forecaster_of(config, request, hardware).forecast(plan)
    forward, back = one.forward * 512, one.backward * 512
    fetch = one.parameters / speed
    rest = plain.seconds - blocks * (forward + back)
    # An update comes for the parameters once more and writes them back; of two buffers one is
    # fetched, updated and written while the other one is.
    updated = max(one.update, fetch, (fetch + one.update + fetch) / 2)
    # What comes first hides behind nothing, the last block computes alone, and two are there at the
    # turn.
    there = fetch + blocks * forward if fetch < forward else blocks * fetch + forward
    again = blocks * back if fetch < back else 2 * back + (blocks - 2) * fetch
    want = there + again + blocks * (updated - one.update) + rest
    assert made.seconds == pytest.approx(want, rel=0.01)


def test_the_ladder_saves_ever_more():
    found = tradeoffs(forecaster_of(CONFIG, replace(WISH, rows=8), MACHINE), BLOCKS + 2)
    names = [one.technique for one in found]
    assert names[0] == "everything on the device" and "blocks computed again" in names
    at = names.index("optimizer states below")
    assert names[at : at + 3] == [
        "optimizer states below", "gradients below", "parameters below",
    ]  # fmt: skip
    below = [one.bytes for one in found[at - 1 : at + 3]]
    assert below == sorted(below, reverse=True)
    behind = tradeoffs(forecaster_of(CONFIG, replace(WISH, clip=None), MACHINE), BLOCKS + 2)
    names = [one.technique for one in behind]
    assert names.index("gradients below") < names.index("optimizer states below")


@pytest.mark.parametrize(
    ("name", "memory", "left"), [("llama-1.1b", 2.3, 0), ("llama-7b", 5.3, 29)]
)
def test_large_shapes_get_plans(name, memory, left):
    """Under the caps that the project promises, without a byte of the model; of a model's blocks
    that are left out, the cap has not what their inputs take."""
    facts = dict(PRESETS[name])
    blocks = facts["num_hidden_layers"] - left
    config = parse(facts | {"num_hidden_layers": blocks})
    tiers = (replace(DISK, bytes=(40 if name == "llama-1.1b" else 128) * GIB),)
    request = PlanRequest(
        2, 256, FP32, AdamW(), None, tiers=tiers, documents=(0, 256), recompute=("block",)
    )
    cap = int(memory * GIB) - left * 2 * 256 * facts["hidden_size"] * 4
    made = chosen(cap, request, MACHINE, config)
    assert made.peak <= cap
    parameters = sum(parameter.numel() for parameter in build(config).parameters())
    assert 10 * parameters < made.below["disk"] <= min(16 * parameters, tiers[0].bytes)


def test_without_a_budget_nothing_streams(plenty):
    assert not plenty.below and plenty.plan.stream == Stream()
    forecaster = forecaster_of(CONFIG, replace(WISH, budget=2 * plenty.peak), MACHINE)
    made = choose_offloaded(forecaster, [replace(plenty.plan, budget=2 * plenty.peak)])
    assert not made.below and made.peak == plenty.peak
