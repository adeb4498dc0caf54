"""Microbatches forward on one worker alone: an evaluation, or tokens of requests."""

from __future__ import annotations

from outsize.schedule.action import Action, Kind
from outsize.schedule.schedule import Schedule


def forward(s: int, m: int, loses: int, kind: Kind = Kind.FORWARD) -> Action:
    """A stage of a microbatch forward. loses: see Schedule.loses. kind: FORWARD for losses."""
    return Action(Kind.LOSS if s == loses and kind is Kind.FORWARD else kind, s, m)


def compile_forward(stages: int, microbatches: int, kind: Kind = Kind.FORWARD) -> Schedule:
    """Every microbatch forward through every stage, a stage after the other."""
    order = ((s, m) for s in range(stages) for m in range(microbatches))
    actions = tuple(forward(s, m, stages - 1, kind) for s, m in order)
    return Schedule(stages, microbatches, (actions,))
