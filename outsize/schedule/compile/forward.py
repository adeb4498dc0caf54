"""Microbatches forward on one worker alone: an evaluation, or tokens of requests."""

from __future__ import annotations

from outsize.schedule.action import Action, Kind
from outsize.schedule.schedule import Schedule


def compile_forward(stages: int, microbatches: int, kind: Kind = Kind.FORWARD) -> Schedule:
    """Every microbatch forward through every stage, a stage after the other."""
    order = ((s, m) for s in range(stages) for m in range(microbatches))
    return Schedule(stages, microbatches, (tuple(Action(kind, s, m) for s, m in order),))
