"""Partitions against every partition there is; costs against the bytes and times they come from."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from clocks import Clock
from streamed import memory
from subjects import config_of
from torch import nn

import outsize
from outsize.data import Batch
from outsize.errors import OutsizeError
from outsize.hardware import Rate, catalogue
from outsize.hardware.hardware import Tier
from outsize.memory.tiers import TierSpec
from outsize.optim import AdamW
from outsize.plan import Plan, Precision, Rest, Stage, Stream
from outsize.runtime.making import make_job
from outsize.runtime.recipe import Recipe
from outsize.schedule.pipelines import Shape, make
from outsize.schedule.place import looped, one_way, two_way
from outsize.search import PlanRequest, predict
from outsize.search.branch_and_bound import Cost
from outsize.search.partition import best, in_flight, partition
from outsize.search.pipeline_cuts import costs_of
from outsize.simulate import calibrate as calibrating
from outsize.simulate.calibrate import blocks, calibrate, portion
from outsize.simulate.coarse import Times, play
from outsize.trace import Trace

NAMES = ("1f1b", "gpipe", "interleaved", "zb-v", "hanayo", "chimera", "bitpipe")


def drawn(rng: random.Random):
    """A pipeline and a few fine stages more than it has stages."""
    made = make(rng.choice(NAMES), Shape(rng.choice((2, 4)), rng.choice((4, 5))))
    stages = made.placement.stages
    count = rng.randint(stages, max(9, stages + 3))
    costs = [
        Cost(rng.choice((1.0, 2.0, 3 * rng.random())), rng.randint(0, 9), rng.randint(0, 5))
        for _ in range(count)
    ]
    return made, costs


def loads(costs, cuts, placement):
    """Seconds of each worker in a step, microbatch by microbatch."""
    edges = [0, *cuts, len(costs)]
    busy = [0.0] * placement.workers
    for microbatch in range(placement.microbatches):
        for stage in range(placement.stages):
            worker = placement.worker(stage, microbatch)
            busy[worker] += sum(c.seconds for c in costs[edges[stage] : edges[stage + 1]])
    return busy


def peaks(made, costs, cuts):
    """Bytes of each worker, by walking its list with the bytes of its stages."""
    edges = [0, *cuts, len(costs)]
    spans = [costs[a:b] for a, b in pairwise(edges)]
    found = []
    for worker, actions in enumerate(made.schedule.workers):
        held = {s for s in range(len(spans)) if worker in made.placement.holders(s)}
        live = peak = sum(c.static for s in held for c in spans[s])
        for action in actions:
            step = {"FORWARD": 1, "BACKWARD": -1, "BACKWARD_WEIGHT": -1}.get(action.kind, 0)
            if step:
                live += step * sum(c.activations for c in spans[action.stage])
            peak = max(peak, live)
        found.append(peak)
    return found


def every(made, costs):
    """(seconds of the slowest worker, bytes of the fullest, cuts) of every partition."""
    inner = range(1, len(costs))
    for cuts in combinations(inner, made.placement.stages - 1):
        yield max(loads(costs, cuts, made.placement)), max(peaks(made, costs, cuts)), cuts


@pytest.mark.parametrize("seed", range(60))
def test_no_partition_is_quicker(seed):
    made, costs = drawn(random.Random(seed))
    found = best(costs, made.placement, None, in_flight(made))
    assert found.seconds == pytest.approx(min(every(made, costs))[0], rel=1e-9)
    assert found.least == pytest.approx(found.seconds, rel=1e-9)
    assert max(loads(costs, found.cuts, made.placement)) == pytest.approx(found.seconds)
    assert list(found.bytes) == peaks(made, costs, found.cuts)


@pytest.mark.parametrize("seed", range(60, 120))
def test_no_partition_that_fits_is_quicker(seed):
    rng = random.Random(seed)
    made, costs = drawn(rng)
    all_ = list(every(made, costs))
    least, most = min(b for _, b, _ in all_), max(b for _, b, _ in all_)
    memory = rng.randint(least, most)
    found = best(costs, made.placement, memory, in_flight(made))
    assert max(peaks(made, costs, found.cuts)) <= memory
    fitting = min(seconds for seconds, size, _ in all_ if size <= memory)
    assert found.seconds == pytest.approx(fitting, rel=1e-9)
    if least:
        with pytest.raises(OutsizeError, match=rf"too small: 1 byte missing.* is {least}$"):
            best(costs, made.placement, least - 1, in_flight(made))


@pytest.mark.parametrize("workers", [4, 8, 16])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_alike_blocks_between_two_ends_are_split_optimally_at_once(workers, chunks):
    """The least is known: with 6 blocks a stage nobody can have fewer, but a head of more than the
    time of a block makes room for itself on its worker."""
    count = 6 * workers * chunks
    costs = [Cost(0.25), *(Cost(1.0) for _ in range(count)), Cost(2.5)]
    found = best(costs, one_way(workers, looped(workers, chunks), 8))
    blocks = count // workers
    # Beside the head a worker has 3 fewer blocks, which others take: some have one more.
    assert found.seconds == 8 * (blocks + 1)
    assert found.least == found.seconds


def test_workers_that_share_their_stages_are_split_optimally_at_once():
    """Two routes: a pair of workers has two stages, each of them for half of the microbatches."""
    costs = [Cost(0.25), *(Cost(1.0) for _ in range(64)), Cost(2.5)]
    found = best(costs, two_way(8, looped(8, 1), 16))
    # 66.75 seconds over 4 pairs are 16.7 each, and somebody has 17 blocks.
    assert found.seconds == found.least == 8 * 17


def test_many_different_blocks_are_split_to_a_bound():
    rng = random.Random(1)
    costs = [Cost(rng.uniform(0.5, 1.5)) for _ in range(66)]
    found = best(costs, one_way(8, looped(8, 2), 16), limit=20_000)
    predicted = found.seconds
    assert found.least <= predicted <= 1.03 * found.least


@pytest.mark.parametrize("name", NAMES)
def test_what_is_in_flight_is_what_the_simulator_holds(name):
    made = make(name, Shape(4, 8))
    peaks_ = play(made, Times(1, 1, 1)).run.peaks
    share = made.placement.share
    # Of GPipe and the like a chunk's microbatches weigh the same, whatever its stage.
    assert [max(map(sum, held)) * share for held in in_flight(made)] == pytest.approx(peaks_)


def test_a_stage_without_blocks_is_refused():
    place = one_way(4, looped(4, 2), 4)
    with pytest.raises(
        OutsizeError, match=r"8 stages for 6 fine stages: a stage without blocks .* at most 6"
    ):
        partition([Cost(1.0)] * 6, place)


@pytest.mark.parametrize(
    "wrong", [Cost, lambda s: Cost(1.0, int(s)), lambda s: Cost(1.0, 0, int(s))]
)
def test_negative_costs_are_refused(wrong):
    with pytest.raises(OutsizeError, match="not negative"):
        wrong(-1.0)


CONFIG = config_of("llama")


def forecast_of(stages, host=0):
    tiers = (TierSpec("host", "memory", (), 1 << 30), TierSpec("disk", "disk", (), 1 << 30))
    request = PlanRequest(4, 32, Precision.named("float32"), AdamW(), None, tiers=tiers)
    plan = Plan(5, stages, rows=4, microbatch_rows=2, sequence=32, stream=Stream(host=host))
    rate = Rate(1e9, "B/s", "declared", "2026-11-23")
    machine = catalogue("H200")
    below = (Tier(name, 1 << 30, rate, rate) for name in ("host", "disk"))
    machine = replace(machine, tiers=(*machine.tiers, *below))
    return predict(CONFIG, request, plan, machine)


def test_costs_of_a_decoder_are_those_of_its_forecast():
    made = forecast_of(tuple(Stage(i, i + 1) for i in range(5)))
    costs = costs_of(made)
    work = sum(
        e.end - e.start
        for e in made.trace.events
        if e.kind.startswith(("FORWARD", "LOSS", "BACKWARD", "RECOMPUTE"))
    )
    assert sum(c.seconds for c in costs) * made.plan.microbatches == pytest.approx(work)
    states = sum(n for kind, n in made.static.items() if kind not in ("data", "window"))
    assert sum(c.static for c in costs) == states
    assert costs[1].static == costs[2].static == costs[3].static > 0
    assert costs[1].activations > costs[0].activations
    # Two segments as one stage cost what they cost apart.
    (first, *_) = costs_of(forecast_of((Stage(0, 2), Stage(2, 4), Stage(4, 5))))
    assert first.static == costs[0].static + costs[1].static
    assert first.activations == pytest.approx(costs[0].activations + costs[1].activations, rel=0.05)


def rows_of(rows: int) -> Batch:
    ids = torch.arange(rows * 32).reshape(rows, 32) % CONFIG.vocab
    return Batch(ids, ids, tuple((0, 32) for _ in range(rows)))


def timed(made):
    with memory() as stores:
        return calibrate(made, CONFIG, Recipe(AdamW()), rows_of, lambda *_: nullcontext(stores))[0]


def test_blocks_that_were_timed_take_the_place_of_rates():
    made = forecast_of(tuple(Stage(i, i + 1) for i in range(5)))
    costs = costs_of(timed(made))
    assert [c.static for c in costs] == [c.static for c in costs_of(made)]
    assert costs[1].seconds == costs[2].seconds  # blocks of one sort, of which one was timed
    assert costs[1].seconds > costs[0].seconds  # which looks up rows and multiplies nothing


def test_blocks_of_states_that_stream_are_timed_too():
    """What computes takes what one of its sort took; what moves, what the rates say."""
    made = forecast_of(tuple(Stage(i, i + 1, rest=Rest("disk", "disk", "disk")) for i in range(5)))
    own = timed(made)
    assert own.peak == made.peak and own.below == made.below

    def took(forecast, kind):
        return [e.end - e.start for e in forecast.trace.events if e.kind == kind]

    for kind in ("FETCH.parameters", "FETCH.optimizer", "EVICT.optimizer"):
        assert took(own, kind) == pytest.approx(took(made, kind)) and took(own, kind)
    forwards = {(e.stage, e.microbatch): e.end - e.start for e in own.trace.events
                if e.kind == "FORWARD"}  # fmt: skip
    assert forwards[1, 0] > 0 and forwards[1, 0] == pytest.approx(forwards[3, 1])
    assert took(own, "UPDATE") != pytest.approx(took(made, "UPDATE"))
    tight = replace(made, plan=replace(made.plan, budget=1 << 12))
    assert timed(tight) is tight, "no block fits the budget"


def test_a_sample_is_as_long_as_its_blocks_and_lies_where_the_runs_states_do(monkeypatch):
    made = forecast_of(tuple(Stage(i, i + 1, rest=Rest("disk", "disk", "disk")) for i in range(5)))
    events = made.trace.events
    took = [
        sum(e.end - e.start for e in events if e.stage in each) for each in ([2, 3], range(-1, 5))
    ]
    chosen = blocks(made.plan, CONFIG)
    assert portion(made, chosen) == pytest.approx(1 - took[0] / took[1])
    whole = forecast_of((Stage(0, 5),))
    assert 0.3 < portion(whole, blocks(whole.plan, CONFIG)) < 1, "three of five segments"
    sizes = list[int]()

    def making(model, *words):
        sizes.extend(x.untyped_storage().nbytes() for x in model.model.parameters())
        return make_job(model, *words)

    monkeypatch.setattr(calibrating, "make_job", making)
    counts = (2, 1)
    with memory() as stores:
        one, other = calibrate(
            made, CONFIG, Recipe(AdamW()), rows_of, lambda *_: nullcontext(stores), "cpu", counts
        )
    assert torch.get_num_threads() == 1 and one.seconds != other.seconds
    assert sizes and set(sizes) == {4}, "no memory beside the job's"


def test_a_block_that_rests_elsewhere_than_its_like_is_updated_as_rates_say():
    """The first of its sort rests in memory, where its update is made; another partly on a disk."""
    below = {name: Rest(name, "host", "host") for name in ("host", "disk")}
    rests = [below[name] for name in ("host", "host", "disk", "disk", "disk")]
    stages = tuple(Stage(i, i + 1, rest=rest) for i, rest in enumerate(rests))
    made = forecast_of(stages, host=2)
    own = timed(made)
    lanes = {e.stage: e.lane for e in made.trace.events if e.kind == "UPDATE"}
    assert (lanes[1], lanes[2]) == ("host", "compute")

    def took(forecast, stage):
        (event,) = [e for e in forecast.trace.events if (e.kind, e.stage) == ("UPDATE", stage)]
        return event.end - event.start

    assert took(own, 2) == pytest.approx(took(made, 2)) and took(own, 1) > 0


class Taking(nn.Linear):
    """A layer that takes so many seconds of a test's clock."""

    def __init__(self, works: Callable[[float], None], seconds: float) -> None:
        super().__init__(8, 8)
        self.works, self.seconds = works, seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.works(self.seconds)
        return super().forward(x)


class Uneven(nn.Module):
    """Blocks of a module of somebody's own, the third of them eight times as long."""

    def __init__(self, works: Callable[[float], None]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(Taking(works, seconds)) for seconds in (1, 1, 8, 1, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def test_a_module_is_split_by_the_times_of_its_first_steps(monkeypatch):
    clock = Clock(monkeypatch)
    model = Uneven(lambda seconds: clock.works(seconds))  # functions are copied by reference
    job = outsize.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), memory="1GiB")
    traces = []
    for _ in range(4):
        job.step((torch.randn(4, 8),))
        traces.append(job.report.trace)
    assert job.forecast is not None
    events = tuple(event for trace in traces[1:] for event in trace.events)
    costs = costs_of(replace(job.forecast, trace=Trace("measured", events)))
    assert [c.seconds for c in costs[1:6]] == pytest.approx([1, 1, 8, 1, 1])
    place = one_way(3, looped(3, 1), 4)
    found = best(costs, place)
    predicted = found.seconds
    assert predicted <= max(loads(costs, (2, 4), place)) and found.cuts[0] <= 3 < found.cuts[1]
