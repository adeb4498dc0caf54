"""What a worker looks for while it waits for another one of its host.

Signals, an abort by anybody, and whether the awaited process still runs, is stopped, or has left.
So a dead worker is seen within a second, with its rank, by whoever waits for it, and a stopped one
within six; a launcher can do more (`Shared.states`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import psutil

from outsize.errors import OutsizeError

_ALIVE = 0.5  # seconds between looks at the awaited process
_STOPPED = 10  # such looks at a stopped process, in a row, before it is given up


@dataclass(frozen=True)
class Process:
    """A process of this host: its number, and when it began (seconds): numbers are used again."""

    pid: int
    started: float


@dataclass(frozen=True)
class State:
    """What a worker of a group is doing. rank: of the run. calls: operations begun so far."""

    rank: int
    operation: str
    calls: int
    waits_for: int | None


class Watched(Protocol):
    """A group, as its watch sees it. Places are those in the group."""

    members: tuple[int, ...]
    rank: int

    def state(self, place: int) -> State: ...
    def left(self, place: int) -> bool: ...
    def aborted(self) -> bool: ...


class Watch:
    """What a waiting worker looks for. trouble: why it gave up, which the group does not survive:
    pieces of the operation that it left are lost."""

    def __init__(self, group: Watched, processes: Sequence[Process], patience: float) -> None:
        self.trouble: BaseException | None = None
        self._group, self._patience = group, patience
        self._processes = [_found(p) for p in processes]
        self._since = self._looked = 0.0
        self._waited: tuple[int, int] | None = None
        self._stopped = 0

    def look(self, place: int) -> int:
        """Called by a worker that waits for the one at `place`, often: whether to give up. Python
        runs signal handlers in here; what they raise is raised by the operation."""
        try:
            self._check(place)
        except BaseException as error:
            self.trouble = error
            return 1
        return 0

    def _check(self, place: int) -> None:
        if self.trouble is not None:
            raise self.trouble
        if self._group.aborted():
            raise self._failed(place, "another worker aborted the run")
        now, wait = time.monotonic(), (place, self._group.state(self._group.rank).calls)
        if wait != self._waited:
            self._waited, self._since, self._looked, self._stopped = wait, now, now, 0
        if now - self._looked < _ALIVE:
            return
        self._looked = now
        if self._group.left(place):
            raise self._failed(place, "which has left the run")
        self._alive(place)
        if now - self._since > self._patience:
            raise self._failed(place, f"which did not come for {self._patience:.0f} s")

    def _alive(self, place: int) -> None:
        process = self._processes[place]
        status = _status(process)
        if process is None or status is None:
            raise self._failed(place, "whose process has ended")
        self._stopped = self._stopped + 1 if status == psutil.STATUS_STOPPED else 0
        if self._stopped >= _STOPPED:
            raise self._failed(place, f"whose process {process.pid} is stopped")

    def _failed(self, place: int, what: str) -> OutsizeError:
        group = self._group
        mine, theirs = group.state(group.rank), group.state(place)
        return OutsizeError(
            f"rank {mine.rank}: {mine.operation} (operation {mine.calls}) with ranks"
            f" {list(group.members)} waited for rank {theirs.rank}, {what}; its last was"
            f" {theirs.operation} (operation {theirs.calls}): see what it printed"
        )


def this_process() -> Process:
    """This process."""
    me = psutil.Process()
    return Process(me.pid, me.create_time())


def _found(process: Process) -> psutil.Process | None:
    try:
        found = psutil.Process(process.pid)
        return found if found.create_time() == process.started else None
    except psutil.Error:
        return None


def _status(process: psutil.Process | None) -> str | None:
    """What the process is about; None where it has ended."""
    try:
        status = process.status() if process is not None and process.is_running() else None
    except psutil.Error:
        return None
    return None if status == psutil.STATUS_ZOMBIE else status
