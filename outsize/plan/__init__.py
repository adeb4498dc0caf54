"""Plan: how a model is spread over hardware, as data."""

from outsize.plan.plan import APPROXIMATE, Plan, Precision, Stage
from outsize.plan.text import explain, from_yaml, to_yaml

__all__ = ["APPROXIMATE", "Plan", "Precision", "Stage", "explain", "from_yaml", "to_yaml"]
