"""Steps of a job whose actions of a kind are run by a test."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from forked import until

from outsize.collectives.courier import _carry
from outsize.runtime import Job
from outsize.runtime.engine import Loaded, Step
from outsize.runtime.lanes import _serve
from outsize.schedule import Action, Kind

Run = Callable[[Action, Callable[[], None]], None]


def intercept(job: Job, kind: Kind, run: Run) -> Loaded:
    """Have run(action, plainly) in place of each action of a kind. Gives the job's own list."""
    plain = job.loaded

    def other(step: Step) -> Step:
        if step.action.kind is not kind:
            return step

        def plainly() -> None:
            for call in step.calls:
                call()

        return replace(step, calls=(partial(run, step.action, plainly),))

    job.loaded = replace(plain, steps=tuple(map(other, plain.steps)))
    return plain


def no_lane_runs() -> bool:
    """Whether no lane's thread has anything to do soon: who has just said that it is through may
    still be on its way."""
    return until(_idle)


def _idle() -> bool:
    """Whether all of them are in Python where a lane, or who sends for one, waits for work."""
    frames = sys._current_frames()
    lanes = (thread for thread in threading.enumerate() if thread.name.startswith("lane "))
    found = (frames.get(lane.ident) for lane in lanes if lane.ident)
    waiting = (_serve.__code__, _carry.__code__)
    return all(frame.f_code in waiting for frame in found if frame is not None)
