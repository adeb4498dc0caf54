"""Interleaved 1F1B: several stages a worker, groups of microbatches through one after the other.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
2021. Each worker is idle for (devices - 1)(F + B) / chunks.
"""

from __future__ import annotations

from outsize.schedule.pipelines.conditions import basic
from outsize.schedule.pipelines.one_f_one_b import one_by_one
from outsize.schedule.pipelines.pipeline import Pipeline, backward, forward, pipeline
from outsize.schedule.place import looped, one_way


def interleaved(devices: int, microbatches: int, chunks: int = 2) -> Pipeline:
    """`chunks` stages a worker.

    Where the devices do not divide the microbatches, the step is that of the next number which
    they divide, without the microbatches that are too many.
    """
    basic("Interleaved1F1B", devices, microbatches, chunks)
    place = one_way(devices, looped(devices, chunks), microbatches)
    rounds = range(0, microbatches, devices)
    turns = [(c, m) for at in rounds for c in range(chunks) for m in range(at, at + devices)]
    orders = []
    for w in range(devices):
        forwards = [forward(c * devices + w, m) for c, m in turns]
        backwards = [backward((chunks - 1 - c) * devices + w, m) for c, m in turns]
        order = one_by_one(forwards, backwards, 2 * (devices - 1 - w) + (chunks - 1) * devices)
        orders.append([action for action in order if action.microbatch < microbatches])
    return pipeline("Interleaved1F1B", place, orders)
