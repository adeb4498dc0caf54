"""Tokens of requests through the stages of one worker."""

from __future__ import annotations

from dataclasses import replace

from outsize.schedule.action import Action, Kind
from outsize.schedule.compile.forward import compile_forward
from outsize.schedule.schedule import Schedule

SERVING = (Kind.PREFILL, Kind.DECODE)


def compile_tokens(stages: int, kind: Kind) -> Schedule:
    """Tokens of requests once through every stage: PREFILL of prompts, or DECODE of one each."""
    assert kind in SERVING
    return compile_forward(stages, 1, kind)


def sampled(schedule: Schedule) -> Schedule:
    """The list that ends with the next tokens, which all workers learn."""
    (actions,) = schedule.workers
    return replace(schedule, workers=((*actions, Action(Kind.SAMPLE, microbatch=0)),))
