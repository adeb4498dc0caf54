"""Courier: a thread that communicates while the caller computes.

It works off what it is sent in that order, so all workers that send the same have the same order.
On an accelerator it has a stream of its own: what it is sent runs there behind what the caller had
issued, and who waits makes his stream wait, not the host alone.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from outsize import accelerator
from outsize.collectives import turns
from outsize.collectives.turns import aside
from outsize.torch_private import disable_current_modes, rehearsing


class Flight:
    """Something that a courier is at."""

    def __init__(self, work: Callable[[], None], device: torch.device) -> None:
        self.work: Callable[[], None] | None = work
        self.device = device
        self.sent = accelerator.mark(device)
        self._over = threading.Event()
        self._fault: BaseException | None = None
        self._arrived: torch.Event | None = None

    def run(self, stream: torch.Stream | None) -> None:
        """In the courier's thread."""
        assert self.work is not None
        try:
            with torch.no_grad(), accelerator.on(stream):
                accelerator.follow(self.sent, self.device)
                self.work()
                self._arrived = accelerator.mark(self.device)
        except BaseException as fault:  # it is raised where somebody waits
            self._fault = fault
        if self._arrived is None:  # else its stream may have hardly begun
            self.work = None  # the tensors that it held go with it
        self._over.set()

    @property
    def over(self) -> bool:
        """Whether the courier has done it."""
        return self._over.is_set()

    def wait(self) -> None:
        """Until it is done; raises what it raised."""
        if not self._over.is_set():
            with aside():
                self._over.wait()
        if self._fault is not None:
            raise self._fault
        accelerator.follow(self._arrived, self.device)
        self.work = None  # who made its tensors comes behind what reads them


class Courier:
    """The thread begins with the first errand and ends when nobody holds the courier any more, or
    with `close`. limit: errands that may be under way at once, 0 for any number. name: the
    thread's."""

    def __init__(self, limit: int = 0, name: str = "courier") -> None:
        self._flights: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._free = threading.Semaphore(limit) if limit else None
        self._name = name
        self._thread: threading.Thread | None = None

    def send(self, work: Callable[[], None], device: torch.device) -> Flight:
        """Have work done; device: where its tensors are. They may not change until `wait`. Waits
        while as many errands are under way as may be. In a rehearsal the caller does it: the
        tensors of two threads would share a mode that only one may be in."""
        if rehearsing():
            # As in a thread of its own, whose bytes an accelerator's allocator counts all the same.
            counted = accelerator.queues(device)
            with nullcontext() if counted else disable_current_modes():
                flight = Flight(work, device)
                flight.run(None)
            return flight
        if self._free is not None:
            with aside():
                self._free.acquire()
        if self._thread is None:
            weakref.finalize(self, self._flights.put, None)
            self._thread = threading.Thread(
                target=_carry,
                args=(self._flights, self._free, accelerator.keeping(device), turns.here()),
                daemon=True,
                name=self._name,
            )
            self._thread.start()
        flight = Flight(work, device)
        self._flights.put(flight)
        return flight

    def close(self) -> None:
        """End the thread once it has done everything."""
        if self._thread is not None:
            self._flights.put(None)
            self._thread.join()
            self._thread = None


def _carry(
    flights: queue.SimpleQueue[Flight | None],
    free: threading.Semaphore | None,
    keeping: AbstractContextManager[Any],
    among: turns.Turns | None,
) -> None:
    stream = None
    with keeping:
        while (flight := flights.get()) is not None:
            stream = stream or accelerator.stream(flight.device)
            with turns.among(among):
                flight.run(stream)
            del flight
            if free is not None:
                free.release()
