"""Rehearsal: one microbatch of a plan on fake tensors, to learn what each action costs.

The runtime itself plays the schedule, over tensors that have shapes but no memory, under the same
ledger that counts real ones. What comes out are the bytes each action leaves, the bytes it
needs while it runs, and its work; the whole step is then composed from these by replay.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from outsize.collectives import inside
from outsize.data import Batch
from outsize.kernels.product import elsewhere
from outsize.memory import Ledger
from outsize.plan import Plan, Rest, Sharding, Stream
from outsize.plan.approximate import PARTIAL
from outsize.runtime import AdoptedFlow, Job
from outsize.runtime.engine import Engine, Loaded, Step
from outsize.runtime.rows import Rows
from outsize.schedule import Action, Kind, Lane, Schedule, State
from outsize.schedule.pipelined import order_of
from outsize.simulate.costs import COPIED, PARTS, ActionCost, Costs, Moved, Said, facts_of, moved
from outsize.simulate.counter import Counter, Work


def rehearse(
    plan: Plan,
    job_of: Callable[[Plan, Ledger], Job],
    batch_of: Callable[[int], object],
    splits: tuple[bool, ...] | None = None,
    ledger_of: Callable[[], Ledger] = Ledger,
    kinds: Container[Kind] | None = None,
    apart: bool = False,
) -> Costs:
    """Costs of a plan's actions.

    job_of makes the job inside a fake mode with the ledger given; batch_of(rows) a batch of rows,
    called for all that a worker has of a step: they are there throughout, though one microbatch of
    them is played.
    splits: `splits_of` the plan for which this one stands. ledger_of: what counts, as the device
    does that the job is made for. kinds: of the actions that are asked for, where these are not
    all of a step's and an evaluation's. apart: the device is not this processor, so that what it
    multiplies does not hang on what this one can.
    """
    from outsize.simulate.fake import FakeMode

    splits = splits_of(plan) if splits is None else splits
    own, rows = plan.own_rows, plan.microbatch_size
    left = own % rows if plan.microbatches == -(-own // rows) else 0
    whole, short = _Played(), _Played()
    line, one = bool(splits), bare(plan)
    with FakeMode(), elsewhere(apart):
        for split in splits or (one.split_backward,):
            alone = replace(one, split_backward=split)
            ledger = ledger_of()
            job, data = _rehearsed(alone, own, job_of, batch_of, line, whole, ledger, kinds)
            if kinds is None and not whole.evaluated:
                _evaluate(job, batch_of(rows), ledger, whole, line)
            job.close()
            names = tuple(name for name, _ in job.flow.segments)
            facts = facts_of(job)
            if left:
                fewer = replace(alone, rows=left * one.mesh.rows, microbatch_rows=left)
                counts = ledger_of()
                _rehearsed(fewer, own, job_of, batch_of, line, short, counts, kinds)[0].close()
    return Costs(
        data, whole.actions, names, facts, short.actions, plan.microbatches - 1, whole.begun,
        short.begun, whole.earlier, whole.forward, whole.evaluated,
    )  # fmt: skip


@dataclass
class _Played:
    """What was learnt of one microbatch."""

    actions: dict[Moved, ActionCost] = field(default_factory=dict)
    begun: dict[str, int] = field(default_factory=dict)
    earlier: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    forward: dict[Moved, ActionCost] = field(default_factory=dict)  # of an evaluation
    evaluated: int = 0  # bytes of its batch


def splits_of(plan: Plan) -> tuple[bool, ...]:
    """Whether the schedule of a pipeline has the two gradients together (False), apart (True), or
    both at times; () where there is no pipeline."""
    if plan.mesh.pipeline == 1:
        return ()
    if plan.split_backward:
        return (True,)
    made = order_of(plan.pipeline, plan.mesh.pipeline, plan.microbatches)
    actions = (a for actions in made.schedule.workers for a in actions)
    kinds = {action.kind for action in actions}
    ways = (Kind.BACKWARD, False), (Kind.BACKWARD_WEIGHT, True)
    return tuple(split for kind, split in ways if kind in kinds)


def stacked(plan: Plan) -> Plan:
    """The plan with all stages on every worker, one after the other; what is cut over the pipeline
    stays cut."""
    rest = tuple(name for name in plan.approximate if name != PARTIAL)
    mesh = plan.mesh.having(pipeline=1)
    return replace(plan, mesh=mesh, pipeline=plan.pipeline.cutting, approximate=rest)


def _rehearsed(
    plan: Plan,
    rows: int,
    job_of: Callable[[Plan, Ledger], Job],
    batch_of: Callable[[int], object],
    line: bool,
    played: _Played,
    ledger: Ledger,
    kinds: Container[Kind] | None,
) -> tuple[Job, int]:
    """The job of a plan of one microbatch and the bytes of a batch of `rows` rows, counted by
    `ledger`; its costs go into `played`. line: for workers of a pipeline."""
    job = job_of(plan, ledger)
    left = _all_leave(job.schedule)
    program = job.playable(_weights_last(left) if line else left)
    job.ready(batch_of(rows), count=1.0)
    data = ledger.live["data"]
    with ledger:
        job.engine.begin(program)
        played.actions |= _copied(job, program, ledger)
        if line:
            _begin(job, ledger, played)
        _play(job, program, ledger, played, line, kinds)
    return job, data


def _copied(job: Job, program: Loaded, ledger: Ledger) -> dict[Moved, ActionCost]:
    """Bring the microbatch to the device, where that has memory of its own."""
    copies = (step for step in program.steps if step.action.kind is Kind.COPY)
    return {moved(step.action): cost_of(job.engine, step, ledger) for step in copies}


def _gone(played: _Played) -> dict[str, int]:
    """Bytes by kind of the microbatch as a worker of a pipeline takes it up."""
    copied = played.actions.get(COPIED)
    more = {} if copied is None else copied.allocates
    return {k: played.begun.get(k, 0) + more.get(k, 0) for k in played.begun | dict(more)}


def _begin(job: Job, ledger: Ledger, played: _Played) -> None:
    """Take up the microbatch, apart from its first action."""
    before = dict(ledger.live)
    job.method.microbatches.of(0)
    ledger.settle()
    played.begun.update(_change(ledger, before))


def _change(ledger: Ledger, before: Mapping[str, int]) -> dict[str, int]:
    """Bytes by kind that have come since."""
    return {k: ledger.live[k] - n for k, n in before.items() if ledger.live[k] != n}


def bare(plan: Plan) -> Plan:
    """One microbatch of a plan with every state on the device, all of it: what its actions cost by
    themselves. Activations leave as they do in the plan; a pipeline's stages follow one another."""
    rows = plan.microbatch_size
    stages = tuple(replace(s, rest=Rest(activations=s.rest.activations)) for s in plan.stages)
    one = stacked(plan)
    mesh = one.mesh.having(data=1)
    return replace(
        one, rows=rows * mesh.rows, microbatch_rows=rows, budget=None, stages=stages,
        order="microbatch", update="apart", stream=Stream(), mesh=mesh, shards=Sharding(),
        row_shares=(),
    )  # fmt: skip


def _all_leave(schedule: Schedule) -> Schedule:
    """The schedule with activations of every stage that spills gone as soon as they are made, and
    back when they are read: in one microbatch, the last stages' would not be gone in time."""
    spills = frozenset() if schedule.residency is None else schedule.residency.spills
    actions: list[Action] = []
    away: set[int] = set()
    for action in schedule.workers[0]:
        if action.state is State.ACTIVATIONS and action.kind in (Kind.FETCH, Kind.EVICT):
            continue
        leaves = Action(
            Kind.EVICT, action.stage, action.microbatch, Lane.EVICT, state=State.ACTIVATIONS
        )
        if action.stage in away and action.kind.way != "forward":
            away.remove(action.stage)
            actions.append(replace(leaves, kind=Kind.FETCH, lane=Lane.FETCH))
        actions.append(action)
        read = action.stage >= schedule.first
        if read and action.stage in spills and action.kind.way == "forward":
            away.add(action.stage)
            actions.append(leaves)
    return replace(schedule, workers=(tuple(actions),))


def _weights_last(schedule: Schedule) -> Schedule:
    """The schedule with the gradients of weights behind those of all inputs, as a worker of a
    pipeline has them: what both need is there until then."""
    actions = schedule.workers[0]
    late = tuple(a for a in actions if a.kind is Kind.BACKWARD_WEIGHT)
    rest = tuple(a for a in actions if a.kind is not Kind.BACKWARD_WEIGHT)
    norm = next(i for i, a in enumerate(rest) if a.kind is Kind.NORM)
    return replace(schedule, workers=((*rest[:norm], *late, *rest[norm:]),))


@torch.no_grad()
def _evaluate(job: Job, batch: object, ledger: Ledger, played: _Played, line: bool) -> None:
    """One microbatch forward, as an evaluation has it."""
    program = job.playable(job.placement.evaluation(1))
    microbatches = job.method.microbatches
    if isinstance(batch, Batch):
        batch = replace(batch, noise=None)
    microbatches.ready(batch, [(0, job.plan.microbatch_size)], 1.0)
    played.evaluated = ledger.live["data"]
    with ledger:
        job.engine.begin(program)
        played.forward |= _copied(job, program, ledger)
        if line:
            microbatches.of(0)
            ledger.settle()
        for step in program.steps:
            if step.action.kind is Kind.COPY:
                continue
            last = step is program.steps[-1] and program.schedule.ends is None
            gone = _gone(played) if line and last else {}
            played.forward[moved(step.action)] = cost_of(job.engine, step, ledger, gone)
    handed = ((Kind.SEND, State.ACTIVATIONS), (Kind.RECV, State.ACTIVATIONS))
    played.forward |= {key: cost for key, cost in played.actions.items() if key[:2] in handed}


def _play(
    job: Job,
    program: Loaded,
    ledger: Ledger,
    played: _Played,
    line: bool,
    kinds: Container[Kind] | None,
) -> None:
    """The actions one after the other; what moves, moves nothing."""
    schedule = program.schedule
    for step in program.steps:
        action = step.action
        # The bytes of a norm are nothing and its number does not exist; a copy was the first.
        if action.kind in (Kind.NORM, Kind.COPY) or (kinds and action.kind not in kinds):
            continue
        passed, before = _passed(job), heard(job)
        loss = _loss_bytes(job) if line and action.kind.way == "back" else 0
        gone = _gone(played) if line and _ends(schedule, action) else {}
        cost = cost_of(job.engine, step, ledger, gone)
        delta = dict(cost.allocates)
        if loss and action.stage == schedule.first:
            delta["activations"] = delta.get("activations", 0) + loss
        if loss and action.stage == schedule.stages - 1:  # whoever has the loss lets it go
            delta["activations"] = delta.get("activations", 0) - loss
        moves = _passed(job) - passed
        if action.kind is Kind.EXCHANGE and job.rows is not None:
            moves = job.rows.summed(action.state, 0)
        said = tuple(since(before, heard(job)))
        played.actions[moved(action)] = replace(cost, allocates=delta, moves=moves, said=said)
        if line and action.kind is Kind.FORWARD and action.stage < schedule.stages - 1:
            _crossing(job, action.stage, played)
        elif line and job.rows is not None:
            played.actions |= _given(job.rows, schedule, action)


def cost_of(
    engine: Engine, step: Step, ledger: Ledger, gone: Mapping[str, int] | None = None
) -> ActionCost:
    """What an action takes, alone. ledger: entered. gone: bytes by kind of a microbatch that goes
    with it."""
    before, total, counter = dict(ledger.live), ledger.total, Counter()
    ledger.told = counter.count
    try:
        event = engine.alone(step)
    finally:
        ledger.told = None
    delta = _change(ledger, before)
    if gone:
        delta = {k: delta.get(k, 0) + gone.get(k, 0) for k in delta | dict(gone)}
    return ActionCost(delta, max(0, event.peak - total), counter.work)


def _loss_bytes(job: Job) -> int:
    """Of the loss that the microbatch keeps, once the last stage has run forward."""
    loss = job.method.microbatches.of(0).loss
    return 0 if loss is None else loss.nbytes


def _ends(schedule: Schedule, action: Action) -> bool:
    """Whether a microbatch has no more to do then."""
    if schedule.ends is not None:
        return action.kind is schedule.ends.passes[-1]
    return action.kind.way == "back" and action.stage == schedule.first


def _crossing(job: Job, stage: int, played: _Played) -> None:
    """Note what crosses behind a stage; nothing of it is held."""
    walk = job.method.microbatches.of(0)
    outputs = walk.take(stage)
    walk.put(stage, outputs)
    played.actions |= _handed_on(State.ACTIVATIONS, stage, outputs)
    floating = [t for t in outputs if t.is_floating_point()]
    played.actions |= _handed_on(State.GRADIENTS, stage, floating)
    played.earlier[stage] = _earlier(job, stage, outputs)


def _given(rows: Rows, schedule: Schedule, action: Action) -> dict[Moved, ActionCost]:
    """What it costs to send an end of a microbatch's path to the workers with other parts."""
    if action.kind is Kind.FORWARD and action.stage == schedule.stages - 1:
        state = State.ACTIVATIONS
    elif action.kind.way == "back" and action.stage == 0:
        state = State.GRADIENTS
    else:
        return {}
    return _handed_on(state, PARTS, [rows.given(state, 0)])


def _handed_on(state: State, stage: int, tensors: Sequence[Tensor]) -> dict[Moved, ActionCost]:
    """What it costs to send tensors to another worker, and to receive them."""
    size = sum(tensor.nbytes for tensor in tensors)
    return {
        (kind, state, stage): ActionCost({"activations": sign * size}, 0, Work(), size, said)
        for kind, sign, said in (
            (Kind.SEND, -1, ()),
            (Kind.RECV, 1, (Said("pipeline", "receive", size),)),
        )
    }


def _earlier(job: Job, stage: int, outputs: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Of what crosses behind a stage, what was given before its last block."""
    if not isinstance(job.flow, AdoptedFlow):
        return []
    ends = [each.last - 1 for each in job.plan.stages]
    given = zip(job.flow.crossing(stage), outputs, strict=True)
    return [
        (next(s for s, end in enumerate(ends) if end > source.segment), tensor.nbytes)
        for source, tensor in given
        if source.segment < ends[stage]
    ]


def heard(job: Job) -> dict[Said, int]:
    """Bytes that layers and exchanges of all workers have brought, of a world that is not
    there; by axis and operation."""
    found: dict[Said, int] = {}
    for one in inside(job.world):
        for operation, count in one.group.received.items():
            found[Said(one.axis, operation, 0, one.beside)] = count
    if job.rows is not None:
        for axis, count in job.rows.received.items():
            found[Said(axis, "exchange", 0)] = count
    return found


def since(before: Mapping[Said, int], now: Mapping[Said, int]) -> Iterator[Said]:
    """What was said in between."""
    for said, count in now.items():
        if more := count - before.get(said, 0):
            yield replace(said, bytes=more)


def _passed(job: Job) -> int:
    """Bytes that its stores have moved."""
    return sum(store.bytes_read + store.bytes_written for store in job.stores.values())
