"""Training runs: their values, the loop, metrics, progress, reports."""

from typing import TYPE_CHECKING

from outsize.lazy import importing

if TYPE_CHECKING:
    from outsize.train.config import RunConfig
    from outsize.train.resolve import Resolved, resolve

__all__ = ["Resolved", "RunConfig", "resolve"]

__getattr__ = importing(__name__)
