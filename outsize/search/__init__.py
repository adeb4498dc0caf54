"""The planner: from what a user wishes to a plan that fits, by forecasting candidates."""

from outsize.search.ladder import Rung, ladder
from outsize.search.single import TooSmall, Wish, choose, foretell, native_makers, oracle_of, pick
from outsize.search.thresholds import Threshold, thresholds

__all__ = [
    "Rung",
    "Threshold",
    "TooSmall",
    "Wish",
    "choose",
    "foretell",
    "ladder",
    "native_makers",
    "oracle_of",
    "pick",
    "thresholds",
]
