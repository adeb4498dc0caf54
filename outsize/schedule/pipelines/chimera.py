"""Chimera: two pipelines over the same workers, one from each end.

Li and Hoefler, "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional
Pipelines", 2021. Every worker holds two stages, every stage lives on two workers, and each pipeline
fills the other's waits. With as many microbatches as devices the longest chain is D forwards and
2D - 2 backwards, so that a worker is idle for (D - 2)B where B is at least F.
"""

from __future__ import annotations

from outsize.schedule.pipelines.conditions import at_least, basic, even
from outsize.schedule.pipelines.costs import EQUAL, Costs
from outsize.schedule.pipelines.greedy import best_greedy
from outsize.schedule.pipelines.pipeline import Pipeline, pipeline
from outsize.schedule.place import looped, two_way


def chimera(devices: int, microbatches: int, costs: Costs = EQUAL) -> Pipeline:
    """Half of the microbatches from each end, at most `devices` of them held by a worker."""
    basic("Chimera", devices, microbatches)
    even("Chimera", "devices", devices)
    at_least("Chimera", "microbatches", microbatches, 2)
    place = two_way(devices, looped(devices, 1), microbatches)
    return pipeline("Chimera", place, best_greedy(place, costs, devices))
