"""The planner: from what a user requests to a plan that fits, by forecasting candidates."""

from outsize.search.savings import Saving, savings
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
    "Saving",
    "Threshold",
    "TooSmall",
    "choose",
    "chosen",
    "forecaster_of",
    "native_makers",
    "pick",
    "predict",
    "savings",
    "thresholds",
]
