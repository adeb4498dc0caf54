"""Predicting: what a schedule's actions cost, and what a whole step holds and takes."""

from typing import TYPE_CHECKING

from outsize.lazy import called, importing

if TYPE_CHECKING:
    from outsize.simulate.forecast import Forecast

__getattr__ = importing(__name__)
called(__name__, "outsize.train.planned")  # outsize.simulate(...)
