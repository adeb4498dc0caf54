"""The planner: from what a user requests to a plan that fits, by forecasting candidates."""

from outsize.search.ladder import Rung, ladder
from outsize.search.single import (
    PlanRequest,
    TooSmall,
    choose,
    chosen,
    forecaster_of,
    native_makers,
    pick,
    predict,
)
from outsize.search.thresholds import Threshold, thresholds

__all__ = [
    "PlanRequest",
    "Rung",
    "Threshold",
    "TooSmall",
    "choose",
    "chosen",
    "forecaster_of",
    "ladder",
    "native_makers",
    "pick",
    "predict",
    "thresholds",
]
