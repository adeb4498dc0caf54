"""Lanes: the threads of a job beside the computing one, and what they tell each other.

A lane's thread is made when the job first needs it and lives as long as the job: steps,
evaluations and generations use the same ones. On an accelerator a lane has a stream of its own,
and what it makes is kept for the computing one.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from outsize import accelerator
from outsize.collectives import turns
from outsize.schedule import Lane

Work = Callable[[], None]
_Queue = queue.SimpleQueue[Work | None]
_TALKS = (Lane.NETWORK, Lane.SEND, Lane.RECEIVE, Lane.MERGE, Lane.EXCHANGE)  # with other workers
_GRACE = 1.0  # seconds that such a lane has to end after a fault


class Lanes:
    """The threads of one engine. device: where its computation runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._queues: dict[Lane, _Queue] = {}
        weakref.finalize(self, _end, self._queues)  # nobody may have closed the job

    def give(self, lane: Lane, work: Work) -> None:
        """Have work done by a lane, behind what it was given before, and behind what the calling
        thread has handed out: room may be made of what that still reads."""
        if lane not in self._queues:
            given: _Queue = queue.SimpleQueue()
            arguments = (
                given,
                accelerator.stream(self._device),
                accelerator.keeping(self._device),
                turns.here(),
            )
            threading.Thread(
                target=_serve, args=arguments, daemon=True, name=f"lane {lane}"
            ).start()
            self._queues[lane] = given
        mark = accelerator.mark(self._device)
        self._queues[lane].put(work if mark is None else partial(_behind, mark, self._device, work))

    def finish(self, lanes: Iterable[Lane], faulty: bool) -> None:
        """Wait until lanes have done what they were given. After a fault nothing may ever come from
        the workers that a lane waits for: the fault must be said all the same, and ends this worker
        or its wait. Such a thread is left behind."""
        marks = [(lane, threading.Event()) for lane in lanes if lane in self._queues]
        for lane, mark in marks:
            self._queues[lane].put(mark.set)
        with turns.aside():
            for lane, mark in marks:
                if not mark.wait(_GRACE if faulty and lane in _TALKS else None):
                    self._queues.pop(lane).put(None)

    def close(self) -> None:
        """End the threads."""
        _end(self._queues)


def _end(queues: dict[Lane, _Queue]) -> None:
    for given in queues.values():
        given.put(None)
    queues.clear()


def _behind(mark: torch.Event, device: torch.device, work: Work) -> None:
    accelerator.follow(mark, device)
    work()


def _serve(
    given: _Queue,
    stream: torch.Stream | None,
    keeping: AbstractContextManager[Any],
    among: turns.Turns | None,
) -> None:
    """A lane's thread. It holds nothing between one thing that it does and the next."""
    with torch.no_grad(), accelerator.on(stream), keeping:
        while (work := given.get()) is not None:
            with turns.among(among):
                work()
            del work


class Board:
    """Which actions of a list have ended, by their places, and the first fault."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._done = bytearray(count)
        self._marks: dict[int, torch.Event] = {}
        self._device = device
        self._changed = threading.Condition()
        self.fault: BaseException | None = None

    def wait(self, places: Iterable[int]) -> None:
        """Wait until actions have ended: the host, and the stream of the calling thread. Raises the
        fault of whichever lane had one."""
        for place in places:
            if not self._done[place]:
                with turns.aside(), self._changed:
                    while not self._done[place] and self.fault is None:
                        self._changed.wait()
            accelerator.follow(self._marks.get(place), self._device)
        if self.fault is not None:
            raise self.fault

    def end(self, place: int) -> None:
        """An action of the calling thread's lane has ended; its stream may still be at work."""
        mark = accelerator.mark(self._device)
        if mark is not None:
            self._marks[place] = mark
        with self._changed:
            self._done[place] = 1
            self._changed.notify_all()

    def fail(self, fault: BaseException) -> None:
        """Nothing more begins."""
        with self._changed:
            self.fault = self.fault or fault
            self._changed.notify_all()
