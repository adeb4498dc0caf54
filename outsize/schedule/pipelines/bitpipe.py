"""BitPipe: Chimera's two directions, each of them a V of two or more passes over the workers.

Wu et al., "BitPipe: Bidirectional Interleaved Pipeline Parallelism for Accelerating Large Models
Training", 2024. Smaller stages start the far workers sooner, and at the turn of a V a microbatch
stays on its worker.
"""

from __future__ import annotations

from outsize.schedule.pipelines.conditions import at_least, basic, even
from outsize.schedule.pipelines.costs import EQUAL, Costs
from outsize.schedule.pipelines.greedy import best_greedy
from outsize.schedule.pipelines.pipeline import Pipeline, pipeline
from outsize.schedule.place import two_way, waved


def bitpipe(devices: int, microbatches: int, chunks: int = 2, costs: Costs = EQUAL) -> Pipeline:
    """Half of the microbatches from each end, `chunks` passes each."""
    basic("BitPipe", devices, microbatches, chunks)
    even("BitPipe", "devices", devices)
    at_least("BitPipe", "microbatches", microbatches, 2)
    place = two_way(devices, waved(devices, chunks), microbatches)
    return pipeline("BitPipe", place, best_greedy(place, costs, devices))
