"""Every microbatch forward through a worker's stage, then through its next one, and so back.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2018:
one stage a worker, which is idle for (devices - 1)(F + B). Lamy-Poirier, "Breadth-First Pipeline
Parallelism", 2022: several. A stage's parameters are needed once forward and once back, so that
sharded ones are gathered twice a step; every microbatch is held.
"""

from __future__ import annotations

from outsize.schedule.pipelines.conditions import basic
from outsize.schedule.pipelines.pipeline import Pipeline, backward, forward, pipeline
from outsize.schedule.place import looped, one_way


def gpipe(devices: int, microbatches: int) -> Pipeline:
    """One stage a worker."""
    return _by_stage("GPipe", devices, microbatches, 1)


def breadth_first(devices: int, microbatches: int, chunks: int = 2) -> Pipeline:
    """`chunks` stages a worker."""
    return _by_stage("BreadthFirst", devices, microbatches, chunks)


def _by_stage(name: str, devices: int, microbatches: int, chunks: int) -> Pipeline:
    basic(name, devices, microbatches, chunks)
    place = one_way(devices, looped(devices, chunks), microbatches)
    orders = []
    for w in range(devices):
        stages = [c * devices + w for c in range(chunks)]
        ahead = [forward(s, m) for s in stages for m in range(microbatches)]
        back = [backward(s, m) for s in reversed(stages) for m in range(microbatches)]
        orders.append([*ahead, *back])
    return pipeline(name, place, orders)
