"""The planner: from what a user requests to a plan that fits, by forecasting candidates."""

from outsize.search.planner import TooSmall, choose, chosen, forecaster_of, pick, predict, replayed
from outsize.search.request import PlanRequest, native_makers
from outsize.search.thresholds import Threshold, thresholds
from outsize.search.tradeoffs import Tradeoff, tradeoffs
