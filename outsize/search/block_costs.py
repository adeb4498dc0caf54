"""Costs of a model's fine stages, for the partition of a pipeline.

A forecast knows the bytes of every segment and the seconds of every action, from counted operations
and a machine's rates, or from blocks that were timed (`calibrate`); the trace of a real run on one
worker, of a decoder or of any module that `prepare` took, knows measured seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from outsize.errors import OutsizeError
from outsize.schedule.action import Kind
from outsize.search.cuts import Cost
from outsize.simulate import Forecast
from outsize.trace import Trace

_WORK = (
    Kind.FORWARD,
    Kind.RECOMPUTE,
    Kind.BACKWARD,
    Kind.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT,
)
_KEPT, _PASSING = "activations", "workspace"  # of a segment's bytes: by microbatch, not static


def costs_of(made: Forecast, measured: Sequence[Trace] = ()) -> list[Cost]:
    """By fine stage of the forecast's plan. measured: steps of the same plan, whose times take the
    place of the predicted ones: of each action the shortest, what disturbs it only adds."""
    plan = made.plan
    seconds = _seconds(measured or (made.trace,), len(plan.stages))
    found = []
    for stage, time in zip(plan.stages, seconds, strict=True):
        kinds = [kinds for _, kinds in made.segments[stage.first : stage.last]]
        static = sum(n for k in kinds for name, n in k.items() if name not in (_KEPT, _PASSING))
        kept = sum(k.get(_KEPT, 0) for k in kinds)  # negative where it frees more of its input
        found.append(Cost(time, static, max(0, kept)))
    return found


def _seconds(traces: Sequence[Trace], stages: int) -> list[float]:
    """Of a microbatch, forward to backward, by stage: the mean over a step's microbatches."""
    shortest: dict[tuple[int, int, str], float] = {}
    for event in (event for trace in traces for event in trace.events):
        if event.kind in _WORK:
            key = (event.stage, event.microbatch, event.kind)
            took = event.end - event.start
            shortest[key] = min(took, shortest.get(key, took))
    microbatches = {microbatch for _, microbatch, _ in shortest}
    missing = sorted(set(range(stages)) - {stage for stage, _, _ in shortest})
    if missing:
        raise OutsizeError(
            f"partition: stage {missing[0]} is not in the trace; expected actions of all {stages}"
            " stages: measure the whole model on one worker"
        )
    total = [0.0] * stages
    for (stage, _, _), took in shortest.items():
        total[stage] += took
    return [seconds / len(microbatches) for seconds in total]
