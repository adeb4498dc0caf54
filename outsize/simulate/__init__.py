"""Predicting: what a schedule's actions cost, and what a whole step holds and takes."""

from outsize.lazy import called
from outsize.simulate.calibrate import calibrate
from outsize.simulate.costs import Costs
from outsize.simulate.forecast import Forecast, forecast
from outsize.simulate.rehearse import rehearse
from outsize.simulate.replay import annotate, play

called(__name__, "outsize.train.planned")  # outsize.simulate(...)
