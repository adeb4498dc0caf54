"""Compilers: a Plan (or a generation) into the Schedule that carries it out on one worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from outsize.plan import Plan
from outsize.schedule.action import Action, Kind, Lane
from outsize.schedule.schedule import Schedule

NO_PARTS: Mapping[int, Sequence[Lane]] = MappingProxyType({})


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


def compile_forward(stages: int, microbatches: int) -> Schedule:
    """Every microbatch forward through every stage, a stage after the other: an evaluation."""
    order = ((s, m) for s in range(stages) for m in range(microbatches))
    return Schedule(stages, microbatches, (tuple(Action(Kind.FORWARD, s, m) for s, m in order),))


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


def compile_tokens(stages: int, kind: Kind) -> Schedule:
    """Tokens of requests once through every stage: PREFILL of prompts, or DECODE of one each."""
    assert kind in (Kind.PREFILL, Kind.DECODE)
    return Schedule(stages, 1, (tuple(Action(kind, s, 0) for s in range(stages)),))
