"""Compilers: a Plan (or a generation) into the Schedule that carries it out on one worker."""

from __future__ import annotations

from collections.abc import Iterator

from outsize.plan import Plan
from outsize.schedule.action import Action, Kind
from outsize.schedule.schedule import Schedule


def compile_plan(plan: Plan, trainable_from: int = 0) -> Schedule:
    """One training step: every microbatch forward and back, then the norm, then the updates.

    trainable_from: first stage that holds a trainable parameter; the stages before it need no
    backward pass.
    """
    actions: list[Action] = []
    for microbatch in range(plan.microbatches):
        actions += [Action(Kind.FORWARD, s, microbatch) for s in range(len(plan.stages))]
        actions += _backward(plan, microbatch, trainable_from)
    actions.append(Action(Kind.NORM))
    actions += [Action(Kind.UPDATE, s) for s in range(trainable_from, len(plan.stages))]
    again = frozenset(
        s for s, stage in enumerate(plan.stages) if stage.whole and s >= trainable_from
    )
    return Schedule(len(plan.stages), plan.microbatches, (tuple(actions),), again, trainable_from)


def _backward(plan: Plan, microbatch: int, trainable_from: int) -> Iterator[Action]:
    for s in reversed(range(trainable_from, len(plan.stages))):
        if plan.stages[s].whole:
            yield Action(Kind.RECOMPUTE, s, microbatch)
        if plan.split_backward:
            yield Action(Kind.BACKWARD_INPUT, s, microbatch)
            yield Action(Kind.BACKWARD_WEIGHT, s, microbatch)
        else:
            yield Action(Kind.BACKWARD, s, microbatch)


def compile_tokens(stages: int, kind: Kind) -> Schedule:
    """Tokens of requests once through every stage: PREFILL of prompts, or DECODE of one each."""
    assert kind in (Kind.PREFILL, Kind.DECODE)
    return Schedule(stages, 1, (tuple(Action(kind, s, 0) for s in range(stages)),))
