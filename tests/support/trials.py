"""Trials before a run: tests look at what comes of them and not at how exact it is."""

from __future__ import annotations

import importlib

from outsize.simulate import worker_profile
from outsize.simulate.trial import LEAST
from outsize.train import timing


def shorten() -> None:
    """In this process, and in those that it forks: as few steps of blocks as there can be, and of a
    pipeline's actions one of a microbatch."""
    timing.PACING_SECONDS = 0.04  # busy ones, before a pipeline starts: 0.8 in train/test_pacing.py
    calibrate = importlib.import_module("outsize.simulate.calibrate")  # not the function
    calibrate.counted = lambda _: LEAST  # type: ignore[attr-defined]
    worker_profile.COUNTED = worker_profile.TURNS = 1
