"""Hanayo: microbatches run down the workers and up again, in any number of waves.

Liu et al., "Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model Training
Efficiency", 2023. A wave is a pass down and a pass up, so W waves cut the model into 2W stages a
worker. There is no second copy of the model as in Chimera, and less waiting with more waves.
"""

from __future__ import annotations

from outsize.schedule.action import Action, Kind
from outsize.schedule.pipelines.conditions import at_least, basic
from outsize.schedule.pipelines.costs import EQUAL, Costs
from outsize.schedule.pipelines.greedy import best_greedy
from outsize.schedule.pipelines.pipeline import Pipeline, backward, pipeline
from outsize.schedule.pipelines.zb_v import zb_v
from outsize.schedule.place import one_way, waved


def hanayo(devices: int, microbatches: int, waves: int = 1, costs: Costs = EQUAL) -> Pipeline:
    """2 x `waves` stages a worker, which holds at most `devices` microbatches."""
    basic("Hanayo", devices, microbatches)
    at_least("Hanayo", "waves", waves, 1)
    place = one_way(devices, waved(devices, 2 * waves), microbatches)
    # One wave is the V of ZB-V, whose order keeps more microbatches than devices moving.
    vee = waves == 1 and microbatches >= devices
    also = [_whole_backwards(zb_v(devices, microbatches, costs))] if vee else []
    return pipeline("Hanayo", place, best_greedy(place, costs, devices, also=also))


def _whole_backwards(made: Pipeline) -> list[list[Action]]:
    """Its orders with both gradients where the input gradient was."""
    return [
        [
            action if action.kind is Kind.FORWARD else backward(action.stage, action.microbatch)
            for action in actions
            if action.kind in (Kind.FORWARD, Kind.BACKWARD_INPUT)
        ]
        for actions in made.schedule.workers
    ]
