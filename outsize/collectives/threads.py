"""Workers of one run as threads of this process: a World whose collectives are exact and quick.

    results = play(Mesh(tensor=2), lambda world: ...)   # what each worker's call gave, by rank

Sums are taken in the order of the ranks, so their bits are the same everywhere. A worker that
raises ends the others' waiting, and `play` raises its error. Ctrl-C ends them all at their next
collective, and is raised when they have ended. For proofs, not for speed: what is said to others is
copied, and they compute in turns. On accelerators each has one of its own, since the backward
passes of one are one thread's.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial, reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from outsize import accelerator
from outsize.collectives.collective import (
    DONE,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Call,
    Collective,
    Handle,
    ReduceScatter,
)
from outsize.collectives.mesh import Mesh
from outsize.collectives.turns import Turns, aside
from outsize.collectives.world import Key, Use, World

T = TypeVar("T")
WAIT = 600.0  # seconds that the others may be behind


class Disagreement(RuntimeError):
    """Workers of a group ask for different things at once."""


class Meeting:
    """Where the workers of a group lay down what they have and look at what the others have."""

    def __init__(self, size: int) -> None:
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)

    def exchange(self, rank: int, mine: Any, use: Callable[[list[Any]], T]) -> T:
        """use(what all have), while nobody can change it."""
        self.slots[rank] = mine
        with aside():
            self.barrier.wait(WAIT)
        found = use(self.slots)
        with aside():
            self.barrier.wait(WAIT)
        self.slots[rank] = None  # or it would stay until the next time
        return found


class Threads(Collective):
    """The Collective of one worker. calls: (operation, bytes of the whole tensor), as they came."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank = meeting, rank
        self.size = len(meeting.slots)
        self.received = Counter()
        self.calls: list[tuple[str, int]] = []

    @torch.no_grad()
    def start(self, call: Call) -> Handle:
        """Over when this returns. Workers that ask for different things are at fault."""
        self.calls.append((call.name, _whole(call)))
        self.count(call)
        said = call, _mark(call.device)
        heard, late = self._meeting.exchange(self.rank, said, partial(_behind, self.rank))
        if late:  # nobody writes what others have still to read
            follow = partial(_follow, call.device)
            self._meeting.exchange(self.rank, _mark(call.device), follow)
        for part, place in zip(heard, _places(call), strict=True):
            place.copy_(part)
        return DONE


def _mark(device: torch.device | None) -> torch.Event | None:
    return None if device is None else accelerator.mark(device)


def _follow(device: torch.device | None, marks: Sequence[torch.Event | None]) -> None:
    if device is not None and accelerator.queues(device):
        for mark in marks:
            accelerator.follow(mark, device)


def _behind(
    rank: int, said: Sequence[tuple[Call, torch.Event | None]]
) -> tuple[list[Tensor], bool]:
    """What a worker has of what all say; and whether that is on its way, as on accelerators."""
    calls, marks = [call for call, _ in said], [mark for _, mark in said]
    own = calls[rank].device
    if not any(marks) or own is None:
        return _heard(calls, rank), False
    for call in calls:
        _follow(call.device, marks)
    return _heard([call.mapped(lambda x: x.to(own)) for call in calls], rank), True


def _heard(calls: Sequence[Any], rank: int) -> list[Tensor]:
    """What a worker has of what all say, in tensors of its own."""
    _agree([call.name for call in calls])
    match calls[rank]:
        case AllReduce(operation=operation):
            _agree([(call.tensor.shape, call.tensor.dtype) for call in calls])
            join = torch.add if operation == "sum" else torch.maximum
            return [reduce(join, [call.tensor for call in calls])]
        case ReduceScatter(spans=spans):
            _agree([call.flat.shape for call in calls])
            here = slice(*spans[rank])
            return [reduce(torch.add, [call.flat[here] for call in calls]).clone()]
        case AllGather(spans=spans):
            _agree([[len(call.mine) for call in calls], [b - a for a, b in spans]])
            return [call.mine.clone() for call in calls]
        case AllToAll():
            return [call.given[rank].clone() for call in calls]
        case Broadcast(source=source):
            return [calls[source].tensor.clone()]
    return []


def _places(call: Call) -> Sequence[Tensor]:
    """Where that belongs."""
    match call:
        case AllReduce(tensor) | Broadcast(tensor):
            return [tensor]
        case ReduceScatter(out=out):
            return [out]
        case AllGather(spans=spans, out=out):
            return [out[first:last] for first, last in spans]
        case AllToAll(out=parts):
            return parts
    return []


def _whole(call: Call) -> int:
    match call:
        case AllReduce(tensor) | Broadcast(tensor) | ReduceScatter(tensor) | AllGather(out=tensor):
            return tensor.nbytes
        case AllToAll(given):
            return sum(x.nbytes for x in given)
    return 0


def _agree(said: Sequence[Any]) -> None:
    if any(one != said[0] for one in said):
        raise Disagreement(f"workers ask for different things: {list(said)}")


class Board:
    """The meetings of a run; once a worker has failed, nobody waits at any of them."""

    def __init__(self) -> None:
        self._meetings: dict[Hashable, Meeting] = {}
        self._lock = threading.Lock()
        self._failed = False

    def meeting(self, key: Hashable, size: int) -> Meeting:
        """The one of a key."""
        with self._lock:
            meeting = self._meetings.setdefault(key, Meeting(size))
            if self._failed:
                meeting.barrier.abort()
        return meeting

    def fail(self) -> None:
        """A worker has failed."""
        with self._lock:
            self._failed = True
            for meeting in self._meetings.values():
                meeting.barrier.abort()


class ThreadWorld:
    """The World of one thread. Groups of the same ranks and use meet at one Meeting."""

    def __init__(self, mesh: Mesh, rank: int, board: Board) -> None:
        self.mesh, self.rank, self._board = mesh, rank, board
        self.groups: dict[Key, Threads] = {}

    def group(self, ranks: Sequence[int], use: Use = "compute") -> Threads:
        key = (tuple(ranks), use)
        if key not in self.groups:
            meeting = self._board.meeting(key, len(ranks))
            self.groups[key] = Threads(meeting, list(ranks).index(self.rank))
        return self.groups[key]


def play(mesh: Mesh, work: Callable[[World], T]) -> list[T]:
    """work(world) in a thread for each worker of the mesh; the results by rank."""
    board, turns = Board(), Turns()
    results: dict[int, T] = {}
    faults: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with turns.taken():
                results[rank] = work(ThreadWorld(mesh, rank, board))
        except threading.BrokenBarrierError as error:
            faults.append(error)
        except BaseException as error:
            faults.insert(0, error)
            board.fail()
        finally:
            ended[rank].set()

    ended = [threading.Event() for _ in range(mesh.size)]
    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(mesh.size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        board.fail()
        # Python aborts if it leaves while one is inside an operator. Not joined again: a `join`
        # that was interrupted takes its thread for ended (3.11).
        for thread, end in zip(threads, ended, strict=True):
            if thread.ident is not None:
                end.wait()
        raise
    if faults:
        raise faults[0]
    return [results[rank] for rank in range(mesh.size)]
