"""BitPipe and Chimera: two directions over the same workers, each a run of passes over them.

Li and Hoefler, "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional
Pipelines", 2021: one pass from each end. Every worker holds two stages, every stage lives on two
workers, and each pipeline fills the other's waits. With as many microbatches as devices the longest
chain is D forwards and 2D - 2 backwards, so that a worker is idle for (D - 2)B where B is at least
F. Wu et al., "BitPipe: Bidirectional Interleaved Pipeline Parallelism for Accelerating Large Models
Training", 2024: a V of two or more passes. Smaller stages start the far workers sooner, and at the
turn of a V a microbatch stays on its worker. With more microbatches than devices forwards of later
ones go ahead of backwards that are ready, and a worker is idle for (D - 2)B / chunks still; it has
at most D + (D - 1) / chunks of them, as under interleaved 1F1B.
"""

from __future__ import annotations

from dataclasses import replace

from outsize.schedule.action import Action
from outsize.schedule.pipelines.conditions import at_least, basic, even
from outsize.schedule.pipelines.costs import EQUAL, Costs
from outsize.schedule.pipelines.greedy import best_greedy, greedy
from outsize.schedule.pipelines.pipeline import Pipeline, pipeline
from outsize.schedule.place import Placement, two_way, waved


def bitpipe(devices: int, microbatches: int, chunks: int = 2, costs: Costs = EQUAL) -> Pipeline:
    """Half of the microbatches from each end, `chunks` passes each."""
    place = _placed("BitPipe", devices, microbatches, chunks)
    early = _early(place, costs, chunks) if microbatches > devices else []
    return pipeline("BitPipe", place, best_greedy(place, costs, devices, also=early))


def chimera(devices: int, microbatches: int, costs: Costs = EQUAL) -> Pipeline:
    """Half of the microbatches from each end, at most `devices` of them held by a worker."""
    place = _placed("Chimera", devices, microbatches, 1)
    return pipeline("Chimera", place, best_greedy(place, costs, devices))


def _placed(name: str, devices: int, microbatches: int, chunks: int) -> Placement:
    basic(name, devices, microbatches, chunks)
    even(name, "devices", devices)
    at_least(name, "microbatches", microbatches, 2)
    return two_way(devices, waved(devices, chunks), microbatches)


def _early(place: Placement, costs: Costs, chunks: int) -> list[list[list[Action]]]:
    """Orders with forwards first, for each number of microbatches that a worker may hold. Without
    transfers too: short ones hinder less than an order that gives way to each."""
    devices = place.workers
    most = devices + (devices - 1) // chunks
    tries = (
        greedy(place, rule.whole(), held, under_way, early=True)
        for rule in (costs, replace(costs, transfer=0.0))
        for held in range(devices, most + 1)
        for under_way in sorted({2 * devices, place.microbatches})
    )
    return [orders for orders in tries if orders is not None]
