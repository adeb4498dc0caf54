"""Uniform interleaving: the passes of every microbatch at the same distances, for offloading.

Wan et al., "PipeOffload: Improving Scalability of Pipeline Parallelism with Memory Optimization",
2025. Interleaved 1F1B plays its stages in groups, so that all stages of a worker peak together, and
what leaves a stage of long life saves no more than its share. Here one building block is repeated
in every interval: a pass of one slot, from worker to worker one slot later forward and two slots
back. Then forwards, input gradients and weight gradients of a worker never meet, and what is held
of a stage is its life over the interval: the first stages' is the longest by far.
"""

from __future__ import annotations

from math import gcd

from outsize.schedule.action import Action
from outsize.schedule.pipelines.conditions import basic
from outsize.schedule.pipelines.pipeline import Pipeline, forward, of_input, of_weight, pipeline
from outsize.schedule.place import looped, one_way

_SLOTS = 3  # of a stage and a microbatch: forward, input gradient, weight gradient


def uniform(devices: int, microbatches: int, chunks: int = 2) -> Pipeline:
    """`chunks` stages a worker; holds about three quarters of what 1F1B does with two of them."""
    basic("uniform", devices, microbatches, chunks)
    place = one_way(devices, looped(devices, chunks), microbatches)
    orders = [_order(worker, devices, microbatches, chunks) for worker in range(devices)]
    return pipeline("Uniform", place, orders)


def _order(worker: int, devices: int, microbatches: int, chunks: int) -> list[Action]:
    """What a worker computes, by slot."""
    down = _SLOTS * _apart(devices, chunks)  # from a stage to the worker's next, forward
    up = _SLOTS * _apart(2 * devices - 1, chunks)
    turn = down * (chunks - 1) + devices + 2 * (devices - 1 - worker)
    placed: list[tuple[int, Action]] = []
    for microbatch in range(microbatches):
        begin = _SLOTS * chunks * microbatch
        for chunk in range(chunks):
            stage = chunk * devices + worker
            back = begin + turn + up * (chunks - 1 - chunk)
            placed += [
                (begin + down * chunk + worker, forward(stage, microbatch)),
                (back, of_input(stage, microbatch)),
                (back + 1, of_weight(stage, microbatch)),
            ]
    return [action for _, action in sorted(placed, key=lambda one: one[0])]


def _apart(slots: int, chunks: int) -> int:
    """The least number of passes that takes so many slots and puts stages into different ones."""
    count = -(-slots // _SLOTS)
    while gcd(count, chunks) > 1:
        count += 1
    return count
