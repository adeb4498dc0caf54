"""What the workers of a pipeline are predicted to hold, hear and take, beside what they count and
what formulas and the simulator of schedules say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from subjects import config_of
from threads import play

from outsize.collectives import Mesh, received
from outsize.data import Batch
from outsize.errors import OutsizeError
from outsize.hardware import catalogue
from outsize.memory import Ledger
from outsize.models.build import build
from outsize.optim import AdamW
from outsize.parallel.divide import divide
from outsize.plan import Pipelined, Plan, Precision, zero
from outsize.plan.plan import per_segment
from outsize.plan.spread import pipelined
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.schedule import Action, Kind
from outsize.schedule.compile.train import computing
from outsize.schedule.ends import ends_of
from outsize.schedule.passes.pipeline import linked
from outsize.schedule.pipelined import coarse_of, pipelining_of
from outsize.schedule.pipelines import Shape, named
from outsize.schedule.pipelines.costs import Costs, EndCosts
from outsize.search import PlanRequest, predict
from outsize.simulate import coarse as simulator
from outsize.simulate.replay import Player, play_together

LAYERS, ROWS, SEQUENCE = 4, 7, 32
CONFIG = config_of("llama, untied", num_hidden_layers=LAYERS)
TIED = config_of("gpt2", n_layer=LAYERS)
OPTIMIZER = AdamW()
HARDWARE = catalogue("H200", 4)


def plan_of(schedule: str, mesh: Mesh, **more) -> Plan:
    """Four microbatches of two rows on each worker of the data axis, the last of one row."""
    count = LAYERS + 2
    stages = per_segment(count, more.pop("recompute", ()))
    line = pipelined(schedule)
    precision = Precision.named(more.pop("precision", "float32"))
    return Plan(
        count, stages, ROWS * mesh.data, 2, SEQUENCE, precision,
        more.pop("loss_chunk", 0 if line.vocabulary else 32), mesh=mesh, pipeline=line, **more,
    )  # fmt: skip


def predicted(plan: Plan, config=CONFIG):
    request = PlanRequest(
        plan.rows, SEQUENCE, plan.precision, OPTIMIZER, documents=(0, SEQUENCE), mesh=plan.mesh,
        shards=plan.shards, pipeline=plan.pipeline.said,
    )  # fmt: skip
    return predict(config, request, plan, HARDWARE)


def heard(job: Job) -> int:
    return received(job.world, "network", "merge", "stages", "exchange").total()


def alone(batch: Batch) -> Batch:
    """In memory of its own, as a worker reads it."""
    return batch.changed(torch.clone, batch.bounds)


def measured(plan: Plan, config=CONFIG) -> list[tuple[int, int, int]]:
    """(peak, bytes from others) of the second step, and the peak of an evaluation before them, by
    worker."""
    ids = torch.randint(0, config.vocab, (plan.rows, SEQUENCE + 1))
    batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), ((0, SEQUENCE),) * plan.rows)
    size = plan.microbatch_size

    def work(world) -> tuple[int, int, int]:
        model, ledger = build(config, seed=0), Ledger()
        cuts = divide(model, world, plan)
        job = Job(
            NativeFlow(model, plan), plan, Recipe(OPTIMIZER), Here(world, ledger=ledger), cuts=cuts
        )
        evaluated = alone(batch.rows(job.place * size, (job.place + 1) * size))
        job.evaluate(evaluated, size)
        del evaluated
        mine, had = alone(batch.rows(*plan.rows_at(job.place))), []
        for _ in range(2):
            had.append(heard(job))
            job.step(mine)
        had.append(heard(job))
        job.close()
        evaluation = max((ran.peak for ran in job.evaluated), default=0)
        return job.report.trace.peak(), had[2] - had[1], evaluation

    return play(plan.mesh, work)


CASES = {
    "1f1b": plan_of("1f1b", Mesh(pipeline=2)),
    "gpipe on four": plan_of("gpipe", Mesh(pipeline=4)),
    "interleaved": plan_of("interleaved:2", Mesh(pipeline=2)),
    "gradients late": plan_of("zb-2p", Mesh(pipeline=2)),
    "a V": plan_of("zb-v", Mesh(pipeline=2)),
    "recompute": plan_of("1f1b", Mesh(pipeline=2), recompute=("block",)),
    "zero 3": plan_of("1f1b", Mesh(2, 1, 2), shards=zero(3, 2)),
    "rows, two barriers": plan_of("1f1b+vocabulary:1", Mesh(pipeline=2)),
    "rows, one barrier": plan_of("1f1b+vocabulary:2", Mesh(pipeline=4)),
    "rows, gradients apart": plan_of("zb-h1+vocabulary:2", Mesh(pipeline=2)),
    "rows, both ways": plan_of("chimera+vocabulary:2", Mesh(pipeline=2)),
    "rows, zero 3": plan_of("1f1b+vocabulary:2", Mesh(2, 1, 2), shards=zero(3, 2)),
    "rows, logits in chunks": plan_of("1f1b+vocabulary:1", Mesh(pipeline=2), loss_chunk=32),
    "rows, tensor": plan_of("1f1b+vocabulary:2", Mesh(1, 2, 2)),
    "rows, bfloat16": plan_of("1f1b+vocabulary:1", Mesh(pipeline=2), precision="bfloat16"),
}


@pytest.mark.parametrize("case", CASES)
def test_peaks_and_bytes_are_those_that_workers_count(case):
    """Of a step; and an evaluation holds no more than was predicted."""
    made = predicted(CASES[case])
    plan = made.plan
    for rank, (peak, heard, evaluation) in enumerate(measured(plan)):
        turn = made.ranks[plan.mesh.index("pipeline", rank)]
        assert peak <= turn.peak <= 1.05 * peak, (rank, peak / turn.peak)
        assert evaluation <= turn.evaluation <= 1.05 * evaluation, (rank, evaluation)
        if plan.mesh.data == 1:  # inside layers is counted apart
            parts = (part.total for name, part in turn.received.items() if name != "tensor")
            assert sum(parts) == heard
    assert made.peak == max(turn.peak for turn in made.ranks)
    assert made.below == {}, "what is sent rests nowhere"


def test_a_forecast_is_refused_where_one_worker_would_wait_for_another():
    """Each list alone could run: two tensors are sent in the other order."""
    made = predicted(plan_of("1f1b", Mesh(pipeline=2)))
    made.prove()
    first = made.placements[0]
    actions = list(first.schedule.workers[0])
    one, two, *_ = (i for i, a in enumerate(actions) if a.kind is Kind.SEND)
    actions.insert(two, actions.pop(one))
    vars(first)["schedule"] = replace(first.schedule, workers=(tuple(actions),))
    with pytest.raises(OutsizeError, match="worker 0 sent activations 2 1 before it"):
        made.prove()


def test_a_tied_embedding_is_on_both_ends():
    made = predicted(plan_of("1f1b", Mesh(pipeline=2)), TIED)
    first, last = made.ranks
    assert 0 in first.stages and 0 in last.stages
    assert {"stages", "merge"} <= first.received.keys()
    for turn, (peak, heard, _) in zip(made.ranks, measured(made.plan, TIED), strict=True):
        assert peak <= turn.peak <= 1.05 * peak
        assert sum(part.total for part in turn.received.values()) == heard


def test_workers_have_as_even_rows_of_a_vocabulary_as_can_be():
    """Of 107 on four workers: 26, then 27 each."""
    config = config_of("llama, untied", num_hidden_layers=LAYERS, vocab_size=107)
    made = predicted(plan_of("1f1b+vocabulary:2", Mesh(pipeline=4)), config)
    found = predicted(
        replace(made.plan, pipeline=replace(made.plan.pipeline, vocabulary=0)), config
    )
    more = [a.parameters - b.parameters for a, b in zip(made.ranks, found.ranks, strict=True)]
    rows = [config.hidden * 2 * count for count in (26, 27, 27, 27)]
    ends = [config.hidden * 107, 0, 0, config.hidden * 107]
    assert more == [mine - whole for mine, whole in zip(rows, ends, strict=True)]
    for turn, (peak, heard, _) in zip(made.ranks, measured(made.plan, config), strict=True):
        assert peak <= turn.peak <= 1.05 * peak
        assert sum(part.total for part in turn.received.values()) == pytest.approx(heard, abs=100)


def test_bytes_between_stages_follow_the_formula():
    """Every boundary is crossed by the hidden states of all tokens, and back by their gradients."""
    made = predicted(plan_of("1f1b", Mesh(pipeline=4)))
    crossed = ROWS * SEQUENCE * CONFIG.hidden * 4
    heard = [turn.received["stages"].total for turn in made.ranks]
    assert heard == [crossed, 2 * crossed, 2 * crossed, crossed]
    assert (
        sum(turn.parameters for turn in made.ranks)
        == predicted(replace(plan_of("1f1b", Mesh()), pipeline=Pipelined())).parameters
    )


def lists(plan: Plan) -> list[Player]:
    """The workers' lists as the runtime has them, of stages that use their own parameters alone."""
    count = len(plan.stages)
    tables = (0, count - 1) if plan.pipeline.vocabulary else ()
    line = pipelining_of(plan, 0, [(stage,) for stage in range(count)], tables)
    made = (computing(line, plan, worker, {}) for worker in range(plan.mesh.pipeline))
    return [Player(linked(s, line, plan, w), {}, w) for w, s in enumerate(made)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved:2", "zb-h1", "zb-v", "chimera"])
def test_a_step_is_as_long_as_the_simulator_of_schedules_says(schedule):
    """With the same seconds for every stage, and links that take none."""
    devices, count, times = 4, 8, simulator.Times(3.0, 2.0, 4.0)
    coarse = named(schedule, Shape(devices, count, Costs(3.0, 2.0, 4.0)))
    stages = coarse.placement.stages
    plan = Plan(
        stages, per_segment(stages), count, mesh=Mesh(pipeline=devices),
        pipeline=Pipelined(schedule, costs=(3.0, 2.0, 4.0)),
    )  # fmt: skip

    def seconds(_: int, action: Action) -> float:
        kind = Kind.FORWARD if action.kind is Kind.LOSS else action.kind
        return times.of(replace(action, kind=kind), coarse.placement.share)

    made = play_together(lists(plan), [seconds] * devices)
    assert made.span() == pytest.approx(simulator.play(coarse, times).run.makespan)
    assert made.workers == tuple(range(devices))


@pytest.mark.parametrize("variant", [1, 2])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-v", "chimera"])
def test_so_it_is_with_a_cut_vocabulary(schedule, variant):
    """Exchanges take no time there, as little as messages."""
    devices, head = 4, EndCosts(6.0, 4.0, 8.0)
    line = Pipelined(schedule, costs=(3.0, 2.0, 4.0), vocabulary=variant, head=head.output)
    stages = named(schedule, Shape(devices, 8)).placement.stages
    plan = Plan(stages, per_segment(stages), 8, mesh=Mesh(pipeline=devices), pipeline=line)
    coarse, times = coarse_of(plan), simulator.Times(3.0, 2.0, 4.0, ends=head)
    share = coarse.placement.share

    def seconds(_: int, action: Action) -> float:
        return times.of(action, share) + head.of_pass(action.kind, ends_of(line), devices)

    made = play_together(lists(plan), [seconds] * devices)
    assert made.span() == pytest.approx(simulator.play(coarse, times).run.makespan)


def test_an_exchange_ends_for_nobody_before_all_have_begun_theirs():
    """The last worker's passes take longer than those of others, who wait for it."""
    line = Pipelined("1f1b", vocabulary=1)
    plan = Plan(4, per_segment(4), 8, mesh=Mesh(pipeline=4), pipeline=line)

    def of(worker: int):
        passes = dict.fromkeys(ends_of(line).passes, 3.0 if worker == 3 else 0.5)
        lengths = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.EXCHANGE: 0.25} | passes
        return lambda _, action: lengths.get(action.kind, 0.0)

    made = play_together(lists(plan), [of(worker) for worker in range(4)])
    groups: dict[tuple[str, int], list] = {}
    for event in made.events:
        if event.kind.startswith("EXCHANGE"):
            groups.setdefault((event.kind, event.microbatch), []).append(event)
    assert len(groups) == 3 * 8
    for events in groups.values():
        last = max(event.start for event in events)
        assert [event.end for event in events] == pytest.approx([last + 0.25] * 4)
    assert any(min(e.start for e in g) < max(e.start for e in g) - 1 for g in groups.values())


def test_what_takes_time_on_the_way_holds_the_next_worker_up():
    """GPipe: the last worker begins three messages later, and the first ends three later."""
    plan = Plan(4, per_segment(4), 4, mesh=Mesh(pipeline=4), pipeline=Pipelined("gpipe"))

    def seconds(_: int, action: Action) -> float:
        lengths = {Kind.FORWARD: 1.0, Kind.LOSS: 1.0, Kind.BACKWARD: 2.0, Kind.RECV: 0.25}
        return lengths.get(action.kind, 0.0)

    made = play_together(lists(plan), [seconds] * 4)
    assert made.span() == pytest.approx((4 + 3) * 3 + 6 * 0.25)
    assert made.span() == pytest.approx(max(event.end for event in made.events))
