"""GPipe: every microbatch forward, then every one back.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2018.
Each worker is idle for (devices - 1)(F + B), and holds every microbatch.
"""

from __future__ import annotations

from outsize.schedule.pipelines.conditions import basic
from outsize.schedule.pipelines.pipeline import Pipeline, backward, forward, pipeline
from outsize.schedule.place import looped, one_way


def gpipe(devices: int, microbatches: int) -> Pipeline:
    """One stage a worker."""
    basic("GPipe", devices, microbatches)
    place = one_way(devices, looped(devices, 1), microbatches)
    every = range(microbatches)
    orders = [
        [*(forward(s, m) for m in every), *(backward(s, m) for m in every)] for s in range(devices)
    ]
    return pipeline("GPipe", place, orders)
