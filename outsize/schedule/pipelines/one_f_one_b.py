"""1F1B: after a warm-up, one forward and one backward in turn.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019, in the form
that flushes at the end of a step. As idle as GPipe, but worker w holds devices - w microbatches.
"""

from __future__ import annotations

from outsize.schedule.action import Action
from outsize.schedule.pipelines.conditions import basic
from outsize.schedule.pipelines.pipeline import Pipeline, backward, forward, pipeline
from outsize.schedule.place import looped, one_way


def one_f_one_b(devices: int, microbatches: int) -> Pipeline:
    """One stage a worker."""
    basic("1F1B", devices, microbatches)
    place = one_way(devices, looped(devices, 1), microbatches)
    orders = []
    for s in range(devices):
        forwards = [forward(s, m) for m in range(microbatches)]
        backwards = [backward(s, m) for m in range(microbatches)]
        orders.append(one_by_one(forwards, backwards, devices - 1 - s))
    return pipeline("1F1B", place, orders)


def one_by_one(forwards: list[Action], backwards: list[Action], warm: int) -> list[Action]:
    """`warm` forwards, then a forward and a backward in turn, then the backwards that are left."""
    warm = min(warm, len(forwards))
    pairs = zip(forwards[warm:], backwards, strict=False)
    turns = [action for pair in pairs for action in pair]
    return [*forwards[:warm], *turns, *backwards[len(forwards) - warm :]]
