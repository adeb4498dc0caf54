"""Tokens of requests through the stages of one worker."""

from __future__ import annotations

from outsize.schedule.action import Action, Kind
from outsize.schedule.schedule import Schedule


def compile_tokens(stages: int, kind: Kind) -> Schedule:
    """Tokens of requests once through every stage: PREFILL of prompts, or DECODE of one each."""
    assert kind in (Kind.PREFILL, Kind.DECODE)
    return Schedule(stages, 1, (tuple(Action(kind, s, 0) for s in range(stages)),))
