"""Where the workers of a group meet: a thread that carries out its operations one after another.

Before each operation the workers compare what they are at. While one waits for the others it looks
whether two groups cross: it is in this operation, and has one of another group behind it in which
a worker is that it waits for, and who has this one behind that. Nothing can let them go on.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

Deed = Callable[[Any, list[Tensor]], None]  # what the thread does over gloo with host copies
_SAID = 96  # bytes of an operation's words
_LOOK = 0.05  # seconds between looks at whom a worker waits for

_meetings: weakref.WeakSet[Meeting] = weakref.WeakSet()  # of this process


@dataclass
class Job:
    """An operation. said: compared among all workers, unless it is "". mark: a point of the stream
    behind which it begins; gate: opened when it is over. number: among those compared."""

    said: str
    deed: Deed
    host: list[Tensor]
    mark: int | None
    gate: int
    number: int = 0


@dataclass(eq=False)
class Meeting:
    """A group's workers, seen by one of them."""

    library: Any
    store: Any
    rank: int
    size: int
    timeout: timedelta
    jobs: queue.SimpleQueue[Job | None] = field(default_factory=queue.SimpleQueue)
    waiting: list[Job] = field(default_factory=list)  # the one that is carried out first
    fault: BaseException | None = None

    def __post_init__(self) -> None:
        from torch.distributed import ProcessGroupGloo

        self.gloo: Any = ProcessGroupGloo(self.store, self.rank, self.size, self.timeout)
        if self.rank == 0:
            self.store.set("name", uuid.uuid4().hex)
        self.name = self.store.get("name").decode()
        self._count, self._lock = 0, threading.Lock()
        _meetings.add(self)
        threading.Thread(target=self._carry, daemon=True).start()

    def put(self, job: Job) -> None:
        self._count += bool(job.said)
        job.number = self._count
        with self._lock:
            self.waiting.append(job)
        self.jobs.put(job)

    def end(self) -> None:
        self.jobs.put(None)

    def _carry(self) -> None:
        """After a fault nothing is sent, and what waits goes on: it reads NaN."""
        while (job := self.jobs.get()) is not None:
            self.library.strict_reach(job.mark)
            with self._lock:
                self.library.strict_forget(job.mark)
                job.mark = None
            try:
                if self.fault is None:
                    self._agree(job)
                    job.deed(self.gloo, job.host)
            except BaseException as fault:  # it is raised where somebody waits
                self.fault = fault
            with self._lock:
                self.waiting.remove(job)
            self.library.strict_open(job.gate)

    def _agree(self, job: Job) -> None:
        """See that all are at the same operation. Raises RuntimeError."""
        if not job.said:
            return
        text = job.said.encode()[:_SAID].ljust(_SAID)
        words = list(torch.zeros(self.size, _SAID, dtype=torch.uint8).unbind())
        mine = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        work = self.gloo.allgather([words], [mine])
        pause = _LOOK / 256
        while not work.is_completed():
            time.sleep(pause)
            pause *= 2
            if pause > _LOOK:
                pause = _LOOK
                self._look(job)
        work.wait()
        all_said = [bytes(x.tolist()).decode().rstrip() for x in words]
        if len(set(all_said)) > 1:
            raise RuntimeError(
                "operations in another order: "
                + ", ".join(f"rank {rank} is at {text}" for rank, text in enumerate(all_said))
            )

    def _look(self, job: Job) -> None:
        """Tell other groups which of their operations `job` holds up here, and raise RuntimeError
        where one of them holds up `job` on another worker."""
        held: dict[str, tuple[Meeting, Job]] = {}
        for other in list(_meetings):
            if other is not self and (behind := other.behind(job.gate)) is not None:
                held[f"{other.name} {behind.number}"] = other, behind
                text = f"{behind.number} {self.name} {job.number} {job.said}"
                other.store.set(f"held by {other.rank}", text)
        for peer in range(self.size):
            key = f"held by {peer}"
            if peer == self.rank or not held or not self.store.check([key]):
                continue
            mine, name, number, *said = self.store.get(key).decode().split(" ")
            if int(mine) == job.number and f"{name} {number}" in held:
                other, behind = held[f"{name} {number}"]
                other.fault = RuntimeError(
                    f"operations of two groups cross: rank {self.rank} is at {job.said} and has"
                    f" {behind.said} of another group behind it, rank {peer} is at"
                    f" {' '.join(said)} of that group and has the first behind it"
                )
                raise other.fault

    def behind(self, gate: int) -> Job | None:
        """The next operation here, where it cannot begin before a gate is opened."""
        with self._lock:
            first = next((job for job in self.waiting if job.said), None)
            if first is None or first.mark is None:
                return None
            closed = self.library.strict_before(first.mark)
            return first if closed == self.library.strict_named(gate) else None
