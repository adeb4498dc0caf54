"""Plan: how a model is spread over hardware, as data."""

from outsize.plan.plan import APPROXIMATE, DEVICE, Plan, Precision, Rest, Stage, Stream
from outsize.plan.text import explain, from_yaml, to_yaml

__all__ = [
    "APPROXIMATE",
    "DEVICE",
    "Plan",
    "Precision",
    "Rest",
    "Stage",
    "Stream",
    "explain",
    "from_yaml",
    "to_yaml",
]
