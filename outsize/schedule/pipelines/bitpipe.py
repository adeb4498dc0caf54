"""BitPipe and Chimera: two directions over the same workers, each a run of passes over them.

Li and Hoefler, "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional
Pipelines", 2021: one pass from each end. Every worker holds two stages, every stage lives on two
workers, and each pipeline fills the other's waits. With as many microbatches as devices the longest
chain is D forwards and 2D - 2 backwards, so that a worker is idle for (D - 2)B where B is at least
F. Wu et al., "BitPipe: Bidirectional Interleaved Pipeline Parallelism for Accelerating Large Models
Training", 2024: a V of two or more passes. Smaller stages start the far workers sooner, and at the
turn of a V a microbatch stays on its worker.
"""

from __future__ import annotations

from outsize.schedule.pipelines.conditions import at_least, basic, even
from outsize.schedule.pipelines.costs import EQUAL, Costs
from outsize.schedule.pipelines.greedy import best_greedy
from outsize.schedule.pipelines.pipeline import Pipeline, pipeline
from outsize.schedule.place import two_way, waved


def bitpipe(devices: int, microbatches: int, chunks: int = 2, costs: Costs = EQUAL) -> Pipeline:
    """Half of the microbatches from each end, `chunks` passes each."""
    return _both_ways("BitPipe", devices, microbatches, chunks, costs)


def chimera(devices: int, microbatches: int, costs: Costs = EQUAL) -> Pipeline:
    """Half of the microbatches from each end, at most `devices` of them held by a worker."""
    return _both_ways("Chimera", devices, microbatches, 1, costs)


def _both_ways(name: str, devices: int, microbatches: int, chunks: int, costs: Costs) -> Pipeline:
    basic(name, devices, microbatches, chunks)
    even(name, "devices", devices)
    at_least(name, "microbatches", microbatches, 2)
    place = two_way(devices, waved(devices, chunks), microbatches)
    return pipeline(name, place, best_greedy(place, costs, devices))
