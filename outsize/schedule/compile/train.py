"""A training step of one worker: what it computes, and the list with what moves beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from outsize.errors import OutsizeError
from outsize.plan import Plan
from outsize.schedule.action import Action, Kind, Lane
from outsize.schedule.ends import ends_of
from outsize.schedule.passes.ends import alone
from outsize.schedule.pipelined import Pipelining
from outsize.schedule.schedule import Schedule

NO_PARTS: Mapping[int, Sequence[Lane]] = MappingProxyType({})
_BACK = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def compile_plan(
    plan: Plan, trainable_from: int = 0, parts: Mapping[int, Sequence[Lane]] = NO_PARTS
) -> Schedule:
    """One training step: every microbatch forward and back, then the norm, then the updates.

    trainable_from: first stage that holds a trainable parameter; the stages before it need no
    backward pass. parts: by stage, the lanes of the parts in which it is updated, where it is
    updated in parts.
    """
    behind = plan.update == "behind"
    actions: list[Action] = []
    if plan.order == "layer":
        actions += _by_layer(plan, trainable_from, parts)
    else:
        for m in range(plan.microbatches):
            actions += [Action(Kind.FORWARD, s, m) for s in range(len(plan.stages))]
            last = m == plan.microbatches - 1
            for s in reversed(range(trainable_from, len(plan.stages))):
                actions += backward_of(plan, s, m)
                actions += updates_of(s, parts) if behind and last else ()
    actions.append(Action(Kind.NORM))
    if not behind:
        for s in range(trainable_from, len(plan.stages)):
            actions += updates_of(s, parts)
    again = frozenset(
        s for s, stage in enumerate(plan.stages) if stage.whole and s >= trainable_from
    )
    return Schedule(
        len(plan.stages), plan.microbatches, (tuple(actions),), again, trainable_from, None, behind
    )


def _by_layer(
    plan: Plan, trainable_from: int, parts: Mapping[int, Sequence[Lane]]
) -> Iterator[Action]:
    """Every microbatch of a stage before the next stage."""
    for s in range(len(plan.stages)):
        yield from (Action(Kind.FORWARD, s, m) for m in range(plan.microbatches))
    for s in reversed(range(trainable_from, len(plan.stages))):
        for m in range(plan.microbatches):
            yield from backward_of(plan, s, m)
        if plan.update == "behind":
            yield from updates_of(s, parts)


def backward_of(plan: Plan, s: int, m: int, kind: Kind = Kind.BACKWARD) -> Iterator[Action]:
    """A stage's backward pass of a kind. BACKWARD is in two where the plan says so."""
    if plan.stages[s].whole and kind is not Kind.BACKWARD_WEIGHT:
        yield Action(Kind.RECOMPUTE, s, m)
    if plan.split_backward and kind is Kind.BACKWARD:
        yield Action(Kind.BACKWARD_INPUT, s, m)
        yield Action(Kind.BACKWARD_WEIGHT, s, m)
    else:
        yield Action(kind, s, m)


def updates_of(s: int, parts: Mapping[int, Sequence[Lane]]) -> Iterator[Action]:
    """The update of a stage, whole or in parts."""
    if s not in parts:
        yield Action(Kind.UPDATE, s)
    for part, lane in enumerate(parts.get(s, ())):
        yield Action(Kind.UPDATE, s, lane=lane, part=part)


def computing(
    line: Pipelining, plan: Plan, worker: int, parts: Mapping[int, Sequence[Lane]]
) -> Schedule:
    """What a worker computes in a step."""
    role = line.role(worker)
    actions = [a for coarse in line.order(worker)[0] for a in fine_of(line, plan, coarse)]
    for s in sorted(role.holds):
        actions += updates_of(s, parts) if s >= line.first else ()
    again = frozenset(s for s in role.holds if s >= line.first and plan.stages[s].whole)
    return Schedule(
        len(plan.stages), plan.microbatches, (tuple(actions),), again, line.first,
        ends=line.coarse.schedule.ends, role=role,
    )  # fmt: skip


def fine_of(line: Pipelining, plan: Plan, coarse: Action) -> Iterator[Action]:
    """The plan's actions that an action of the pipeline stands for."""
    kind, m = coarse.kind, coarse.microbatch
    if kind is Kind.NORM:
        yield coarse
    elif kind is Kind.FORWARD:
        yield from (Action(kind, s, m) for s in line.fine(coarse.stage, m))
    elif kind in _BACK:
        for s in reversed(line.fine(coarse.stage, m)):
            yield from backward_of(plan, s, m, kind) if s >= line.first else ()
    elif kind.end:
        yield Action(kind, line.edge(kind), m)


def base_of(
    plan: Plan,
    first: int,
    lanes: Mapping[int, Sequence[Lane]],
    line: Pipelining | None,
    turn: int,
    head: int,
) -> Schedule:
    """A step's computing actions alone. first: the first stage that is trained. lanes: by stage,
    where its parts are updated. line, turn: a pipeline, and the worker's place there. head: the
    stage that has the parts of the last layer, where all workers have some."""
    if plan.update == "behind" and plan.stream.host:
        raise OutsizeError(
            f"plan: update is 'behind' and stream.host is {plan.stream.host}; expected update"
            " 'apart', or stream.host 0"
        )
    if line is not None:
        return computing(line, plan, turn, lanes)
    made = compile_plan(plan, first, lanes)
    ends = ends_of(plan.pipeline)
    return made if ends is None else alone(made, head, ends)
