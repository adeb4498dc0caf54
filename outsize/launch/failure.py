"""How a worker's fault reaches the one who reports it: a few lines of JSON through a pipe."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from dataclasses import asdict, dataclass
from typing import Literal

from outsize.errors import OutsizeError

ERROR, CRASH = 2, 1  # exit codes: one line that says what to do, and a traceback
MOST = 60_000  # bytes of a report: a pipe holds 64 KiB


@dataclass(frozen=True)
class Failure:
    """kind: "error" is a line for the user, "crash" a traceback, "ended" what it was to begin with
    (a signal, or an exit that nobody asked for). followed: it came out of a collective, so that the
    fault probably lies with another worker. when: monotonic seconds."""

    kind: Literal["error", "crash", "ended", "interrupted"]
    text: str
    code: int
    followed: bool = False
    when: float = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Failure:
        return Failure(**json.loads(text))


def failure_of(error: BaseException, followed: bool) -> Failure:
    """What an exception is to whoever started the run."""
    now = time.monotonic()
    if isinstance(error, OutsizeError):
        return Failure("error", " ".join(str(error).split()), ERROR, followed, now)
    if isinstance(error, KeyboardInterrupt):
        return Failure("interrupted", "interrupted", 128 + signal.SIGINT, followed, now)
    if isinstance(error, SystemExit):
        return Failure("ended", f"has left with exit code {error.code}", CRASH, followed, now)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__package__") == __package__:
        trace = trace.tb_next  # the launcher's own frames say nothing
    text = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    return Failure("crash", text[-MOST:], CRASH, followed, now)


def failure_by_status(status: int) -> Failure:
    """What the end of a process that said nothing is. status: as `os.waitpid` gives it."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        name = signal.Signals(-code).name
        why = " (the system may have been out of memory)" if -code == signal.SIGKILL else ""
        return Failure("ended", f"was killed by {name}{why}", 128 - code, False, time.monotonic())
    text = f"ended without a word, with exit code {code}"
    return Failure("ended", text, code or CRASH, False, time.monotonic())
