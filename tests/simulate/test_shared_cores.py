"""Workers that share cores, against hand-made cases, a clock of small ticks, and real lists."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from clocks import Clock
from plain import batches
from streamed import model_of, plan_of
from subjects import SEQUENCE, VOCAB, config_of
from threads import play as workers

from outsize.collectives import Mesh
from outsize.errors import OutsizeError
from outsize.hardware import catalogue
from outsize.models.build import build
from outsize.models.families import parse
from outsize.models.presets import PRESETS
from outsize.optim import AdamW
from outsize.parallel.divide import divide
from outsize.plan import Pipelined, Plan, Precision, Stage
from outsize.plan.plan import per_segment
from outsize.plan.spread import Sharding, pipelined
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.schedule import Action, Kind, Lane, Schedule, State
from outsize.schedule.ends import named as named_ends
from outsize.schedule.pipelines import Pipeline, Shape, named
from outsize.schedule.pipelines.costs import Costs, EndCosts
from outsize.schedule.pipelines.pipeline import with_ends
from outsize.schedule.role import Role
from outsize.search import PlanRequest
from outsize.search import predict as predict_plan
from outsize.simulate.coarse import Times, play
from outsize.simulate.events import Node, run
from outsize.simulate.shared_cores import by_stage, on_cores, paces, predict
from outsize.simulate.worker_profile import durations, profiled
from outsize.trace import alone, merged

TICK = 2**-8
COARSE = ("gpipe", "1f1b", "interleaved:2", "zb-h1", "zb-v", "chimera")


def test_two_workers_on_one_core_take_turns():
    nodes = [Node(0, "compute", 3.0), Node(1, "compute", 1.0), Node(1, "network", 5.0)]
    got = run(nodes, cores=(1.0,))
    # Half as fast until the short one has had its second, which takes two; the rest is alone.
    assert got.ends == pytest.approx((4.0, 2.0, 5.0))
    assert run(nodes, cores=(1.0, 1.0)).ends == run(nodes).ends == (3.0, 1.0, 5.0)
    # Two cores with one memory: both at 0.8 until one has done its second.
    assert run(nodes, cores=(1.0, 0.8)).ends == pytest.approx((1.25 + 2.0, 1.25, 5.0))


def test_more_workers_than_paces_share_what_the_last_number_gets_done():
    nodes = [Node(worker, "compute", 1.0) for worker in range(4)]
    assert run(nodes, cores=(1.0, 0.8)).makespan == pytest.approx(4.0 / 1.6)
    for wrong in ((0.0,), (1.0, -1.0), (float("nan"),)):
        with pytest.raises(OutsizeError, match="paces"):
            run(nodes, cores=wrong)


def ticked(nodes: list[Node], cores: tuple[float, ...]) -> list[float]:
    """The ends of the nodes, by a clock that moves on in small ticks."""
    left, ends = [node.duration for node in nodes], [-1.0] * len(nodes)
    lanes = [(node.worker, node.lane) for node in nodes]
    ahead = [
        max((j for j in range(i) if lanes[j] == lanes[i]), default=-1) for i in range(len(nodes))
    ]
    now = 0.0
    while min(ends) < 0:
        ready = [
            i
            for i, n in enumerate(nodes)
            if ends[i] < 0
            and (ahead[i] < 0 or 0 <= ends[ahead[i]] <= now)
            and all(0 <= ends[j] <= now for j in n.needs)
        ]
        done = [i for i in ready if left[i] <= TICK / 16]
        if done:
            for i in done:
                ends[i] = now
            continue
        count = sum(nodes[i].lane == "compute" for i in ready)
        most = min(count, len(cores))
        for i in ready:
            computes = nodes[i].lane == "compute"
            left[i] -= TICK * (cores[most - 1] * most / count if computes else 1.0)
        now += TICK
    return ends


@pytest.mark.parametrize("seed", range(6))
def test_sharing_agrees_with_small_ticks(seed):
    rng = random.Random(seed)
    nodes = [
        Node(
            rng.randrange(4),
            rng.choice(("compute", "compute", "network")),
            rng.choice((0.5, 1.0, 2.0)),
            tuple(rng.sample(range(i), min(i, rng.randrange(3)))),
        )
        for i in range(25)
    ]
    cores = (1.0, 0.75)
    assert run(nodes, cores=cores).ends == pytest.approx(ticked(nodes, cores), abs=0.2)


LANES = {Kind.SEND: Lane.SEND, Kind.RECV: Lane.RECEIVE, Kind.EXCHANGE: Lane.EXCHANGE}


def lists_of(pipeline: Pipeline) -> list[Schedule]:
    """A pipeline's schedule as single workers' lists, what passes between them on own lanes."""
    whole, role = pipeline.schedule, Role(frozenset(), frozenset())
    return [
        Schedule(
            whole.stages, whole.microbatches,
            (tuple(replace(a, lane=LANES.get(a.kind, a.lane)) for a in actions),), role=role,
            ends=whole.ends,
        )
        for actions in whole.workers
    ]  # fmt: skip


def unit(worker: int, action: Action) -> float:
    return {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0}.get(action.kind, 0.0) or (
        1.0 if action.kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) else 0.0
    )


@pytest.mark.parametrize("name", COARSE)
def test_a_core_each_is_what_papers_simulate(name):
    pipeline = named(name, Shape(4, 8))
    told = predict(lists_of(pipeline), unit)
    times = Times(1.0, 1.0, 1.0)
    assert told.span() * pipeline.placement.share == pytest.approx(
        play(pipeline, times).run.makespan
    )
    assert {event.worker for event in told.events} == set(range(4))


@pytest.mark.parametrize("variant", [1, 2])
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_core_each_is_what_papers_simulate_of_a_cut_vocabulary(name, variant):
    head = EndCosts(2.0, 2.0, 2.0)
    pipeline = with_ends(named(name, Shape(4, 8)), named_ends("vocabulary", variant), Costs(), head)
    lists = lists_of(pipeline)
    told = predict(lists, lambda w, a: unit(w, a) + head.of_pass(a.kind, pipeline.schedule.ends, 4))
    times = Times(*[1.0 / pipeline.placement.share] * 3, ends=head)
    assert told.span() == pytest.approx(play(pipeline, times).run.makespan)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_on_one_core_a_step_takes_what_all_actions_take(name):
    """There is always somebody who can go on, so nothing is idle."""
    told = predict(lists_of(named(name, Shape(4, 8))), unit, (1.0,))
    stages = 8 if name == "zb-v" else 4
    assert told.span() == pytest.approx(8 * 3.0 * stages)


def move(kind: Kind, microbatch: int) -> Action:
    lane = Lane.SEND if kind is Kind.SEND else Lane.RECEIVE
    return Action(kind, 0, microbatch, lane, state=State.ACTIVATIONS)


def test_who_sends_waits_where_a_channel_is_full():
    """Three messages in no time to one who takes 10 s for each: two are under way at most."""
    count, role = 5, Role(frozenset(), frozenset())
    ahead = [a for m in range(count) for a in (Action(Kind.FORWARD, 0, m), move(Kind.SEND, m))]
    behind = [a for m in range(count) for a in (move(Kind.RECV, m), Action(Kind.FORWARD, 1, m))]
    lists = [Schedule(2, count, (tuple(each),), role=role) for each in (ahead, behind)]

    def seconds(worker: int, action: Action) -> float:
        return {Kind.RECV: 0.5, Kind.FORWARD: (1.0, 10.0)[worker]}[action.kind]

    told = predict(lists, seconds)
    starts = [e.start for e in told.events if e.kind == "FORWARD" and e.worker == 0]
    taken = [e.end for e in told.events if e.kind == "RECV.activations"]
    # Each of them is received when the action before it has ended: at 1.5, 12, 22.5, ...
    assert taken == pytest.approx([1.5, 12.0, 22.5, 33.0, 43.5])
    # The third message leaves when the first has come; the fourth when the second has.
    assert starts == pytest.approx([0.0, 1.0, 2.0, 3.0, 12.0])
    assert told.span() == pytest.approx(53.5)


def test_sums_end_together():
    norm = Action(Kind.NORM)
    lists = [Schedule(1, 1, ((Action(Kind.FORWARD, 0, 0), norm),)) for _ in range(3)]
    told = predict(lists, lambda w, a: w + 1.0 if a.kind is Kind.FORWARD else 0.25)
    assert [e.end for e in told.events if e.kind == "NORM"] == pytest.approx([3.25] * 3)


def test_paces_of_work_that_shares_nothing_and_of_work_that_shares_all(monkeypatch):
    clock, mesh = Clock(monkeypatch), Mesh(pipeline=3)
    for found in workers(mesh, lambda world: paces(world, lambda: clock.works(0.01), 0.1)):
        assert found == pytest.approx((1.0, 1.0, 1.0))
    for found in workers(mesh, lambda world: paces(world, lambda: clock.works_in_turn(0.01), 0.1)):
        assert found == pytest.approx((1.0, 1 / 2, 1 / 3))


def run_once(name: str):
    """The lists of a real step's workers, and the trace of it."""
    plan = plan_of(
        "float32", segments=10, stages=per_segment(10), rows=8, microbatch_rows=1,
        mesh=Mesh(pipeline=4), pipeline=pipelined(name),
    )  # fmt: skip
    batch = batches(1, 8, SEQUENCE, VOCAB)[0]

    def work(world):
        model = model_of("llama", num_hidden_layers=8)
        cuts = divide(model, world, plan)
        job = Job(NativeFlow(model, plan), plan, Recipe(AdamW(), 1.0), Here(world), cuts=cuts)
        job.step(batch)
        found = job.schedule, job.report.trace
        job.close()
        return found

    lists, traces = zip(*workers(plan.mesh, work), strict=True)
    return list(lists), merged(traces)


REAL = ("1f1b", "interleaved:2", "zb-v", "chimera", "1f1b+vocabulary:1", "zb-v+vocabulary:2")


@pytest.mark.parametrize("name", REAL)
def test_the_actions_of_a_real_step_are_those_that_are_predicted(name):
    lists, measured = run_once(name)
    known = {
        (label, s): 1.0 for label in ("FORWARD", "BACKWARD", "UPDATE", "NORM") for s in range(10)
    }
    known |= {(f"BACKWARD_{part}", s): 0.5 for part in ("INPUT", "WEIGHT") for s in range(10)}
    told = predict(lists, by_stage(known, lists, 0.125), (1.0, 1.0))
    assert alone(told, measured) == ([], [])
    work = sum(e.end - e.start for e in predict(lists, by_stage(known, lists)).events)
    assert told.span() >= work / 4 > 0
    norms = {e.worker: e for e in told.events if e.kind == "NORM"}
    held = [len(each.role.holds) for each in lists]
    assert len({e.end for e in norms.values()}) == 1
    assert max(held) <= max(e.end - e.start for e in norms.values()) + 1e-9


def pipeline_forecast(name: str, workers: int = 4, rows: int = 8, data: int = 1, cut: int = 1):
    config = config_of("llama, untied", num_hidden_layers=6)
    plan = Plan(
        8, per_segment(8), rows, 1, SEQUENCE, Precision.named("float32"),
        mesh=Mesh(pipeline=workers, data=data), pipeline=pipelined(name),
        shards=Sharding(1, 1, cut),
    )  # fmt: skip
    request = PlanRequest(
        rows, SEQUENCE, plan.precision, AdamW(), documents=(0, SEQUENCE), mesh=plan.mesh,
        pipeline=name,
    )  # fmt: skip
    return predict_plan(config, request, plan, catalogue("H200", plan.mesh.size))


def taken(made):
    """The seconds that a forecast has of what is computed."""
    return {
        (event.kind, event.stage): event.end - event.start
        for event in made.trace.events
        if event.lane == "compute" and event.kind != "NORM"
    }


@pytest.mark.parametrize("name", ["gpipe", "interleaved:2", *REAL[:1], *REAL[2:]])
def test_a_forecast_of_cores_apart_is_as_it_was(name):
    """With the times that it has of its actions itself; its bytes stay whatever the times are."""
    made = pipeline_forecast(name)
    known = taken(made)
    same = on_cores(made, known, ())
    assert same.seconds == pytest.approx(made.seconds, rel=0.02)
    shared = on_cores(made, known, (1.0,))
    work = sum(known[e.kind, e.stage] for e in made.trace.events if (e.kind, e.stage) in known)
    sums = sum(e.end - e.start for e in same.trace.events if e.kind.startswith("MERGE"))
    predicted = shared.seconds
    assert 0.99 * work < predicted < 1.05 * (work + sums)
    assert alone(shared.trace, made.trace) == ([], [])
    assert shared.trace.peak() == made.peak and shared.peak == made.peak


@pytest.mark.parametrize(("name", "cut"), [("1f1b", 1), ("1f1b", 2), ("zb-h1", 2)])
def test_copies_of_a_pipeline_with_states_that_are_cut_are_as_they_were(name, cut):
    """By the times of whole states, which one worker has alone; on one core all copies' work."""
    made, whole = (pipeline_forecast(name, workers=2, data=2, cut=n) for n in (cut, 1))
    known = taken(whole)
    same = on_cores(made, known, ())
    assert same.seconds == pytest.approx(made.seconds, rel=0.02)
    assert alone(same.trace, made.trace) == ([], [])
    shared = on_cores(made, known, (1.0,))
    timed = [e for e in made.trace.events if (e.kind, e.stage) in known]
    work = sum(known[e.kind, e.stage] / (cut if e.kind == "UPDATE" else 1) for e in timed)
    assert 2 * work < shared.seconds and shared.trace.peak() == made.peak


def test_messages_that_are_all_waited_for_take_no_longer_than_others():
    """The first of two workers waits for every gradient, as it has nothing else to do."""
    made = pipeline_forecast("1f1b", workers=2, rows=2)
    came = {e.kind: e.end - e.start for e in made.trace.events if e.kind.startswith("RECV")}
    known = {
        (event.kind, event.stage): event.end - event.start
        for event in made.trace.events
        if event.lane == "compute" and event.kind != "NORM"
    }
    assert came["RECV.gradients"] > 0.05 * made.seconds
    assert on_cores(made, known, ()).seconds == pytest.approx(made.seconds, rel=0.02)


def test_few_layers_of_each_sort_stand_for_all():
    config = parse(PRESETS["small"])
    stages = (
        Stage(0, 1),
        Stage(1, 4),
        *(Stage(i, i + 1, ("block",)) for i in range(4, 7)),
        Stage(7, 8),
    )
    plan = Plan(8, stages, rows=4, microbatch_rows=1, sequence=16, mesh=Mesh(pipeline=3))
    chosen = profiled(plan, config)
    # Of two sorts of three layers each, two a worker; the prologue and the epilogue are whole.
    assert chosen.whole == (0, 1, 1, 1, 2, 2, 2, 3) and chosen.here == (0, 1, 1, 2, 2, 3)
    assert len(chosen.config.layers) == 4 and chosen.plan.mesh.size == 1
    assert [bool(s.recompute) for s in chosen.plan.stages] == [sort == 2 for sort in chosen.here]


def test_a_worker_whose_microbatches_leave_out_stages_is_timed_with_all():
    line, named = Pipelined("skip-pipe:0.5"), ("partial-pipeline",)
    plan = Plan(
        4, per_segment(4), 3, 1, 16, mesh=Mesh(pipeline=3), pipeline=line, approximate=named
    )
    chosen = profiled(plan, parse(PRESETS["tiny"]))
    assert chosen.plan.approximate == () and chosen.plan.segments == 3


def test_durations_of_a_cut_vocabulary():
    """Its passes are timed on a worker's rows, by the stages that have them."""
    config = replace(parse(PRESETS["tiny"]), vocab=VOCAB, tied=False)
    line = Pipelined("1f1b", vocabulary=1)
    plan = Plan(
        4, per_segment(4), 4, 1, SEQUENCE, Precision.named("float32"), mesh=Mesh(pipeline=2),
        pipeline=line,
    )  # fmt: skip
    batch = batches(1, 4, SEQUENCE, VOCAB)[0]
    chosen = profiled(plan, config)
    model, cuts = chosen.build()
    assert (
        model.epilogue.head.weight.shape[0] == VOCAB // 2 == cuts["epilogue.head.weight"].local[0]
    )
    known = durations(plan, config, AdamW(), 1.0, lambda rows: batch.rows(0, rows))
    passes = {(label, stage) for label, stage in known if label.startswith(("EMBED", "OUTPUT"))}
    assert passes == {("EMBED", 0), ("EMBED_BACKWARD", 0), ("OUTPUT_S", 3), ("OUTPUT_T", 3)}
    assert not any(label.startswith("EXCHANGE") for label, _ in known)


def test_durations_name_every_action_of_a_step():
    config = replace(parse(PRESETS["tiny"]), vocab=VOCAB)
    plan = Plan(4, (Stage(0, 2), Stage(2, 4)), rows=4, microbatch_rows=1, sequence=SEQUENCE)
    batch = batches(1, 4, SEQUENCE, VOCAB)[0]
    known = durations(plan, config, AdamW(), 1.0, lambda rows: batch.rows(0, rows))
    labels = ("BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "UPDATE", "NORM")
    ahead = {("FORWARD", 0), ("LOSS", 1)}
    assert set(known) == {(label, stage) for label in labels for stage in range(2)} | ahead
    assert all(seconds > 0 for seconds in known.values())
    sizes = [
        sum(p.numel() for part in parts for p in part.parameters())
        for model in [build(config, seed=0)]
        for parts in ((model.prologue, model.blocks[0]), (model.blocks[1], model.epilogue))
    ]
    assert known["NORM", 0] / known["NORM", 1] == pytest.approx(sizes[0] / sizes[1])
