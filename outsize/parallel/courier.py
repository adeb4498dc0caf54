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

import torch

from outsize import accelerator


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
        self.work = None  # the tensors that it held go with it
        self._over.set()

    def wait(self) -> None:
        """Until it is done; raises what it raised."""
        self._over.wait()
        if self._fault is not None:
            raise self._fault
        accelerator.follow(self._arrived, self.device)


class Courier:
    """The thread begins with the first errand and ends when nobody holds the courier any more."""

    def __init__(self) -> None:
        self._flights: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._begun = False

    def send(self, work: Callable[[], None], device: torch.device) -> Flight:
        """Have work done; device: where its tensors are. They may not change until `wait`."""
        if not self._begun:
            self._begun = True
            weakref.finalize(self, self._flights.put, None)
            arguments = (self._flights,)
            threading.Thread(target=_carry, args=arguments, daemon=True, name="courier").start()
        flight = Flight(work, device)
        self._flights.put(flight)
        return flight


def _carry(flights: queue.SimpleQueue[Flight | None]) -> None:
    stream = None
    while (flight := flights.get()) is not None:
        stream = stream or accelerator.stream(flight.device)
        flight.run(stream)
        del flight
