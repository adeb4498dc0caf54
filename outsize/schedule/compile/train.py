"""A training step of one worker: what it computes, and the list with what moves beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

from outsize.errors import OutsizeError
from outsize.plan import Plan
from outsize.schedule.action import WHOLE, Action, Kind, Lane
from outsize.schedule.compile.forward import forward
from outsize.schedule.ends import ends_of
from outsize.schedule.passes.ends import alone
from outsize.schedule.pipelined import Pipelining
from outsize.schedule.schedule import Schedule

NO_PARTS: Mapping[int, Sequence[Lane]] = MappingProxyType({})


def compile_plan(
    plan: Plan,
    trainable_from: int = 0,
    parts: Mapping[int, Sequence[Lane]] = NO_PARTS,
    cuts: Sequence[int] = (),
) -> Schedule:
    """One training step: every microbatch forward and back, then the norm, then the updates.

    trainable_from: first stage that holds a trainable parameter; the stages before it need no
    backward pass. parts: by stage, the lanes of the parts in which it is updated, where it is
    updated in parts. cuts: as Schedule has them; each group makes a whole step before the next one.
    """
    stages, behind, actions = len(plan.stages), plan.update == "behind", list[Action]()
    for begin, end in pairwise((0, *cuts, stages)):
        trained = range(max(begin, trainable_from), end)
        actions += _passes(plan, range(begin, end), trained, parts)
        actions.append(Action(Kind.NORM, begin if cuts else WHOLE))
        for s in () if behind else trained:
            actions += updates_of(s, parts)
    again = frozenset(s for s in range(trainable_from, stages) if plan.stages[s].whole)
    return Schedule(
        stages, plan.microbatches, (tuple(actions),), again, trainable_from, None, behind,
        cuts=frozenset(cuts),
    )  # fmt: skip


def _passes(
    plan: Plan, stages: range, trained: range, parts: Mapping[int, Sequence[Lane]]
) -> Iterator[Action]:
    """Every microbatch forward and back, one after the other or a stage after the other."""
    every = range(plan.microbatches)
    for mine in [every] if plan.order == "layer" else [range(m, m + 1) for m in every]:
        yield from (forward(s, m, stages[-1]) for s in stages for m in mine)
        for s in reversed(trained):
            for m in mine:
                yield from backward_of(plan, s, m)
            if plan.update == "behind" and mine[-1] == every[-1]:
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
    elif kind.end:
        yield Action(kind, line.edge(kind), m)
    elif kind is Kind.FORWARD:
        yield from (forward(s, m, line.loses) for s in line.fine(coarse.stage, m))
    elif kind.adds:
        for s in reversed(line.fine(coarse.stage, m)):
            yield from backward_of(plan, s, m, kind) if s >= line.first else ()


def base_of(
    plan: Plan,
    first: int,
    lanes: Mapping[int, Sequence[Lane]],
    line: Pipelining | None,
    turn: int,
    head: int,
    cuts: Sequence[int] = (),
) -> Schedule:
    """A step's computing actions alone. first: the first stage that is trained. lanes: by stage,
    where its parts are updated. line, turn: a pipeline, and the worker's place there. head: the
    stage that has the parts of the last layer, where all workers have some. cuts: as Schedule has
    them, on one worker of a pipeline."""
    if plan.update == "behind" and plan.stream.host:
        raise OutsizeError(
            f"plan: update is 'behind' and stream.host is {plan.stream.host}; expected update"
            " 'apart', or stream.host 0"
        )
    if line is not None:
        return computing(line, plan, turn, lanes)
    made = compile_plan(plan, first, lanes, cuts)
    ends = ends_of(plan.pipeline)
    return made if ends is None else alone(made, head, ends)
