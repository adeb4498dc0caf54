"""The planner: from what a user requests to a plan that fits, by forecasting candidates."""

from typing import TYPE_CHECKING

from outsize.lazy import importing

if TYPE_CHECKING:
    from outsize.search.planner import (
        TooSmall,
        choose,
        chosen,
        forecaster_of,
        pick,
        predict,
        replayed,
    )
    from outsize.search.request import PlanRequest, native_makers
    from outsize.search.thresholds import Threshold
    from outsize.search.tradeoffs import Tradeoff

__getattr__ = importing(__name__)
