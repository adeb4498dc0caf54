"""Training runs: their values, the loop, metrics, progress, reports."""

from outsize.train.config import RunConfig
from outsize.train.resolve import Resolved, resolve

__all__ = ["Resolved", "RunConfig", "resolve"]
