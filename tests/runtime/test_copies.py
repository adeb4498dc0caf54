"""Microbatches that are copied to a device with memory of its own, as COPY: forced on the CPU,
where the copies are memory of their own beside the batch."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace

import pytest
import streamed
import torch
from engines import intercept
from piped import check, piped
from streamed import ALL, PIECE, data_of, memory, model_of, plan_of, resting, trained
from subjects import PLANS, ROWS, SEQUENCE, config_of
from torch import nn

from outsize.errors import OutsizeError
from outsize.hardware import catalogue
from outsize.memory.ledger import Ledger
from outsize.models.build import build
from outsize.models.decoder import Decoder
from outsize.optim import SGD, AdamW
from outsize.plan import Local, Pipelined, Plan, Precision, Stream
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow, recipe
from outsize.runtime.making import AdoptedModel, NativeModel, make_job
from outsize.runtime.method import method_of
from outsize.runtime.recipe import Here, Recipe
from outsize.schedule import Action, Kind, Lane, prove
from outsize.schedule.compile.forward import compile_forward
from outsize.schedule.role import Role
from outsize.schedule.waits import waits
from outsize.search import PlanRequest, predict
from outsize.torch_private import DispatchMode, tree_leaves
from outsize.train.prepared.batches import cut

DATA = data_of(2)
# What a stage computes again or in tiles is one of them: "everything".
OF_ONE = ("plain", "accumulate", "uneven-microbatches", "one-stage", "two-stages", "everything")
CASES = {name: (PLANS[name], {}) for name in OF_ONE} | {
    "layers": ({"order": "layer"}, {}),
    "updates behind": ({"update": "behind"}, {}),
    "all below": ({"order": "layer", "microbatch_rows": 2}, ALL),
    "activations below": ({}, {"activations": "host"}),
}


def job_of(changes, rest, stores, apart, ledger=None):
    plan = plan_of("float64", **changes)
    if rest:
        plan = replace(resting(plan, **rest), stream=Stream(part=4 * PIECE))
    clip = None if plan.update == "behind" else 0.5
    here = Here(ledger=ledger, stores=stores, apart=apart)
    model = NativeModel(model_of("llama, untied", "float64"))
    return make_job(model, plan, Recipe(AdamW(weight_decay=0.1), clip), here)


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_those_of_rows_that_are_not_copied(name, monkeypatch):
    streamed.small(monkeypatch)
    outcomes, lanes = [], []
    for apart in (False, True):
        with memory() as stores:
            job = job_of(*CASES[name], stores, apart)
            outcomes.append(trained(job, DATA, ROWS))
            lanes.append({a.lane for a in job.schedule.workers[0]})
            job.close()
    assert outcomes[1].same(outcomes[0]), outcomes[1].differences(outcomes[0])
    assert Lane.COPY not in lanes[0] and Lane.COPY in lanes[1]


STEPS = {
    "local learning": {"local": Local(2, "momentum", 0.9)}, "zeroth-order": {},
    "frozen-by-dynamics": {},
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_whatever_steps_are_made_of(name):
    plan = plan_of("float64", approximate=(name.replace(" ", "-"),), **STEPS[name])
    said, outcomes = Recipe(AdamW(weight_decay=0.1), 0.5), []
    for apart in (False, True):
        model = NativeModel(model_of("llama, untied", "float64"))
        made = method_of(plan.approximate).recipe(said)
        job = make_job(model, plan, made, Here(apart=apart))
        outcomes.append(trained(job, DATA, ROWS))
        assert apart == any(a.kind is Kind.COPY for a in job.schedule.workers[0])
        job.close()
    assert outcomes[1].same(outcomes[0])


class Odd(nn.Module):
    """A module of somebody's own, whose batch is a mapping with a tensor in a list."""

    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.last = nn.Linear(8, 1)

    def forward(self, x, masks, note):
        x = self.first(x)
        for block in self.blocks:
            x = block(x).tanh() * masks[0]
        return self.last(x).square().sum()


def test_an_adopted_module_has_its_batch_as_it_came():
    torch.manual_seed(0)
    model, mask = Odd().double(), torch.rand(6, 1, dtype=torch.float64)
    batch = {"x": torch.randn(6, 4, dtype=torch.float64), "masks": [mask], "note": "any"}
    plan, found = Plan(4, per_segment(4), 6, 2, 0, Precision.named("float64")), []
    for apart in (False, True):
        mine = copy.deepcopy(model)
        blocks = [(f"blocks.{i}", block) for i, block in enumerate(mine.blocks)]
        adopted = AdoptedModel(mine, blocks, lambda out, _: out, cut)
        job = make_job(adopted, plan, Recipe(SGD(), None), Here(apart=apart))
        losses = [float(job.step(batch, 1e-2)) for _ in range(2)]
        found.append((losses, job.evaluate(batch, 6), [p.tolist() for p in mine.parameters()]))
        job.close()
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("schedule", "changes"),
    [
        ("zb-v", {}),
        ("interleaved:2", {"pipeline": Pipelined("interleaved:2", vocabulary=1)}),
    ],
)
def test_on_the_workers_of_a_pipeline(schedule, changes, monkeypatch):
    monkeypatch.setattr(recipe.accelerator, "apart", lambda device: True)
    check(piped(schedule, 2, 3, segments=5, **changes), "llama, untied", steps=1)


def test_after_its_copy_nothing_reads_the_batch():
    plain, job = (job_of({}, {}, {}, apart) for apart in (False, True))
    batch = data_of(1)[0]
    wanted = float(plain.step(batch))
    own = replace(batch, ids_BS=batch.ids_BS.clone(), targets_BS=batch.targets_BS.clone())

    def spoil(action, plainly):
        plainly()
        rows = slice(*job.plan.rows_of(action.microbatch, job.place))
        own.ids_BS[rows], own.targets_BS[rows] = 0, 1

    intercept(job, Kind.COPY, spoil)
    assert float(job.step(own)) == wanted
    assert not own.ids_BS.any()


FORETOLD = {
    "uneven": {"microbatch_rows": 2},
    "again": {"stages": per_segment(5, ("block",))},
    "split": {"split_backward": True, "loss_chunk": 7},
    "layers": {"order": "layer"},
}


@pytest.mark.parametrize(
    ("name", "weighed"), list(zip(FORETOLD, (True, False, True, False), strict=True))
)
def test_predicted_bytes_are_those_counted(name, weighed):
    """After every action, copies among them; the batch itself is not the device's."""
    plan, config = plan_of(**FORETOLD[name]), config_of("llama, untied")
    request = PlanRequest(
        ROWS, SEQUENCE, plan.precision, AdamW(), 1.0, documents=(0, 7, SEQUENCE), weighed=weighed,
        apart=True,
    )  # fmt: skip
    made = predict(config, request, plan, catalogue("H200"))
    ledger, flow = Ledger(), NativeFlow(build(config, seed=0), plan)
    job = Job(flow, plan, Recipe(AdamW(), 1.0), Here(ledger=ledger, apart=True))
    batch = request.batch(ROWS, (0, 7, SEQUENCE))
    assert ledger.live["data"] == 0 and "data" not in made.static
    for _ in range(2):
        job.step(batch, 1e-3)
    assert ledger.live["data"] == 0
    counted, foretold = (
        [e for e in trace.events if e.lane == "compute"] for trace in (job.report.trace, made.trace)
    )
    for ours, theirs in zip(foretold, counted, strict=True):
        assert (ours.kind, ours.stage, ours.microbatch) == (
            theirs.kind, theirs.stage, theirs.microbatch,
        )  # fmt: skip
        assert ours.live.get("device/data", 0) == theirs.live.get("device/data", 0), ours.name
        over = ours.peak - theirs.peak  # predicted as if no losses were added up
        assert 0 <= over <= 8 * plan.microbatches or ours.kind == "NORM", ours.name
    token = 3 * 8 + 4 * weighed  # id, target, position and weight
    most = ROWS if name == "layers" else min(2 * plan.microbatch_rows, ROWS)
    assert max(e.live.get("device/data", 0) for e in counted) == most * SEQUENCE * token
    job.evaluate(batch.rows(0, plan.microbatch_size), plan.microbatch_size)
    peak = max(ran.peak for ran in job.evaluated)
    assert 0.95 * made.evaluation <= peak <= made.evaluation


def copies(schedule):
    return [i for i, a in enumerate(schedule.workers[0]) if a.kind is Kind.COPY]


def with_actions(schedule, change):
    actions = list(schedule.workers[0])
    change(actions)
    return replace(schedule, workers=(tuple(actions),))


def test_a_microbatch_comes_while_the_one_before_it_is_computed_and_is_waited_for():
    job = job_of({"order": "microbatch"}, {}, {}, True)
    for schedule in (job.schedule, job.placement.evaluation(3)):
        actions, waiting = schedule.workers[0], waits(schedule)
        came = {actions[i].microbatch: i for i in copies(schedule)}
        first = {m: next(i for i, a in enumerate(actions) if a.microbatch == m and i not in
                         came.values()) for m in range(3)}  # fmt: skip
        assert sorted(came) == [0, 1, 2]
        for m in range(3):
            assert came[m] in waiting[first[m]]
            assert came[m] < first[max(0, m - 1)]
            assert m < 2 or came[m] > first[m - 2]
    assert not copies(job.placement.evaluation(1, Kind.PREFILL))


def late(actions):
    """COPY of the last microbatch behind its first user."""
    at = max(i for i, a in enumerate(actions) if a.kind is Kind.COPY)
    copy_of = actions.pop(at)
    user = next(i for i, a in enumerate(actions) if a.microbatch == copy_of.microbatch)
    actions.insert(user + 1, copy_of)


WRONG = {
    "late": (late, "comes before COPY of its microbatch"),
    "missing": (lambda actions: actions.pop(0), "comes before COPY of its microbatch"),
    "twice": (lambda actions: actions.insert(0, actions[0]), "runs a second time"),
    "another lane": (
        lambda actions: actions.insert(0, replace(actions.pop(0), lane=Lane.COMPUTE)),
        "is on the lane compute",
    ),
    "of a stage": (
        lambda actions: actions.insert(0, replace(actions.pop(0), stage=0)), "expected no stage"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("evaluates", [False, True])
def test_the_prover_refuses(name, evaluates):
    job = job_of({}, {}, {}, True)
    schedule = job.placement.evaluation(3) if evaluates else job.schedule
    prove(schedule)
    change, reason = WRONG[name]
    with pytest.raises(OutsizeError, match=reason):
        prove(with_actions(schedule, change))


def test_the_prover_refuses_copies_that_nobody_needs():
    apart = job_of({}, {}, {}, True).schedule
    with pytest.raises(OutsizeError, match="the schedule is of one that has none"):
        prove(replace(apart, copies=False))
    actions = [Action(Kind.COPY, microbatch=m, lane=Lane.COPY) for m in range(4)]
    evaluation = compile_forward(5, 3)
    made = (*actions, *evaluation.workers[0])
    more = replace(evaluation, workers=(made,), first=5, microbatches=4, copies=True,
                   role=Role(frozenset((s, m) for s in range(5) for m in range(3)),
                             frozenset(range(5))))  # fmt: skip
    with pytest.raises(OutsizeError, match="nobody has used microbatch 3"):
        prove(more)


class OneMemory(DispatchMode):
    """Refuses operators over tensors on several devices, numbers apart."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        every = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.ndim]
        assert len({x.device for x in every}) < 2, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "family"), [("accumulate", "gemma2"), ("everything", "gpt2")])
def test_on_another_device_no_action_but_copy_reads_host_memory(family, name):
    """ "meta" is one, whose operators do nothing; nobody says that it has memory of its own."""
    config, plan = config_of(family), plan_of(**PLANS[name])
    with torch.device("meta"):
        model = Decoder(config)
    ledger, batch = Ledger(device="meta"), weighted(data_of(1)[0])
    job = Job(NativeFlow(model, plan), plan, Recipe(AdamW(), None), Here(ledger=ledger))
    job.ready(batch, 1.0)
    for evaluates in (False, True):
        loaded = job.playable(job.placement.evaluation(2)) if evaluates else job.loaded
        if evaluates:
            job.method.microbatches.ready(batch, [(0, 2), (2, 3)], 1.0)
        with ledger, torch.set_grad_enabled(not evaluates):
            job.engine.begin(loaded)
            for step in loaded.steps:
                if step.action.kind is Kind.NORM:  # its number does not exist
                    continue
                with nullcontext() if step.action.kind is Kind.COPY else OneMemory():
                    job.engine.alone(step)
        assert job.method.microbatches.under_way == {} and ledger.live["data"] == 0


def weighted(batch):
    return replace(batch, weights_BS=torch.rand(batch.ids_BS.shape))
