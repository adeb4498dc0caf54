"""The planner: from what a user wishes to a plan that fits, by forecasting candidates."""

from outsize.search.single import Wish, choose, foretell, native_makers, pick

__all__ = ["Wish", "choose", "foretell", "native_makers", "pick"]
