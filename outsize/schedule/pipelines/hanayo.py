"""Hanayo: microbatches run down the workers and up again, in any number of waves.

Liu et al., "Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model Training
Efficiency", 2023. A wave is a pass down and a pass up, so W waves cut the model into 2W stages a
worker. It has the bubbles of Chimera without a second copy of the model, and fewer with more waves.
"""

from __future__ import annotations

from outsize.schedule.pipelines.conditions import at_least, basic
from outsize.schedule.pipelines.costs import EQUAL, Costs
from outsize.schedule.pipelines.greedy import best_greedy
from outsize.schedule.pipelines.pipeline import Pipeline, pipeline
from outsize.schedule.place import one_way, waved


def hanayo(devices: int, microbatches: int, waves: int = 1, costs: Costs = EQUAL) -> Pipeline:
    """2 x `waves` stages a worker, which holds at most `devices` microbatches."""
    basic("Hanayo", devices, microbatches)
    at_least("Hanayo", "waves", waves, 1)
    place = one_way(devices, waved(devices, 2 * waves), microbatches)
    return pipeline("Hanayo", place, best_greedy(place, costs, devices))
