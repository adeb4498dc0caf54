"""Foretelling: what a schedule's actions cost, and what a whole step holds and takes."""

from outsize.simulate.calibrate import calibrate
from outsize.simulate.forecast import Forecast, forecast
from outsize.simulate.rehearse import Costs, rehearse
from outsize.simulate.replay import annotate, play

__all__ = ["Costs", "Forecast", "annotate", "calibrate", "forecast", "play", "rehearse"]
