"""Looped breadth-first: every microbatch through one chunk before any goes through the next.

Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2022. A stage's parameters are needed once
forward and once back, so that sharded ones are gathered twice a step; every microbatch is held.
"""

from __future__ import annotations

from outsize.schedule.pipelines.conditions import basic
from outsize.schedule.pipelines.pipeline import Pipeline, backward, forward, pipeline
from outsize.schedule.place import looped, one_way


def breadth_first(devices: int, microbatches: int, chunks: int = 2) -> Pipeline:
    """`chunks` stages a worker."""
    basic("BreadthFirst", devices, microbatches, chunks)
    place = one_way(devices, looped(devices, chunks), microbatches)
    orders = []
    for w in range(devices):
        stages = [c * devices + w for c in range(chunks)]
        ahead = [forward(s, m) for s in stages for m in range(microbatches)]
        back = [backward(s, m) for s in reversed(stages) for m in range(microbatches)]
        orders.append([*ahead, *back])
    return pipeline("BreadthFirst", place, orders)
