"""Workers of one run as threads of this process: a World whose collectives are exact and quick.

    results = play(Mesh(tensor=2), lambda world: ...)   # what each worker's call gave, by rank

Sums are taken in the order of the ranks, so their bits are the same everywhere. A worker that
raises ends the others' waiting, and `play` raises its error. For proofs, not for speed: what is
said to others is copied, and Python runs one thread at a time.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from outsize.collectives.collective import Operation, Span
from outsize.collectives.mesh import Mesh
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
        self.barrier.wait(WAIT)
        found = use(self.slots)
        self.barrier.wait(WAIT)
        self.slots[rank] = None  # or it would stay until the next time
        return found


class Threads:
    """The Collective of one worker. calls: (operation, bytes of the whole tensor), as they came."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank = meeting, rank
        self.size = len(meeting.slots)
        self.received: Counter[str] = Counter()
        self.calls: list[tuple[str, int]] = []

    def _exchange(
        self, name: str, mine: Any, use: Callable[[list[Any]], T], nbytes: int, had: float
    ) -> T:
        """`name` goes along: workers that ask for different things are at fault."""
        self.calls.append((name, nbytes))
        self.received[name] += round(had)

        def checked(found: list[Any]) -> T:
            said = [what for what, _ in found]
            _agree(said)
            return use([value for _, value in found])

        return self._meeting.exchange(self.rank, (name, mine), checked)

    def all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> Tensor:
        def combine(found: list[Tensor]) -> Tensor:
            _agree([(x.shape, x.dtype) for x in found])
            with torch.no_grad():
                return reduce(torch.add if operation == "sum" else torch.maximum, found)

        n = self.size
        had = 2 * (n - 1) / n * tensor.nbytes
        with torch.no_grad():
            total = self._exchange("all_reduce", tensor, combine, tensor.nbytes, had)
            return tensor.copy_(total)

    def reduce_scatter(self, flat: Tensor, spans: Sequence[Span], out: Tensor) -> None:
        _as_many(spans, self.size)
        here = slice(*spans[self.rank])

        def combine(found: list[Tensor]) -> Tensor:
            _agree([x.shape for x in found])
            return reduce(torch.add, [x[here] for x in found]).clone()

        had = (self.size - 1) * out.nbytes
        with torch.no_grad():
            out.copy_(self._exchange("reduce_scatter", flat, combine, flat.nbytes, had))

    def all_gather(self, mine: Tensor, spans: Sequence[Span], out: Tensor) -> None:
        _as_many(spans, self.size)

        def combine(found: list[Tensor]) -> list[Tensor]:
            _agree([[len(x) for x in found], [b - a for a, b in spans]])
            return [x.clone() for x in found]

        with torch.no_grad():
            had = (sum(b - a for a, b in spans) - len(mine)) * out.element_size()
            parts = self._exchange("all_gather", mine, combine, out.nbytes, had)
            for (first, last), part in zip(spans, parts, strict=True):
                out[first:last] = part

    def all_to_all(self, given: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        nbytes = sum(x.nbytes for x in given)
        had = sum(x.nbytes for i, x in enumerate(out) if i != self.rank)

        def take(found: list[Sequence[Tensor]]) -> list[Tensor]:
            return [x[self.rank].clone() for x in found]

        with torch.no_grad():
            parts = self._exchange("all_to_all", given, take, nbytes, had)
            for target, part in zip(out, parts, strict=True):
                target.copy_(part)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        had = 0 if self.rank == source else tensor.nbytes
        with torch.no_grad():
            whole = self._exchange(
                "broadcast", tensor, lambda found: found[source].clone(), tensor.nbytes, had
            )
            return tensor.copy_(whole)

    def barrier(self) -> None:
        self._exchange("barrier", None, lambda _: None, 0, 0)


def _agree(said: Sequence[Any]) -> None:
    if any(one != said[0] for one in said):
        raise Disagreement(f"workers ask for different things: {list(said)}")


def _as_many(spans: Sequence[Span], size: int) -> None:
    if len(spans) != size:
        raise Disagreement(f"{len(spans)} spans in a group of {size}")


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
    board = Board()
    results: dict[int, T] = {}
    faults: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadWorld(mesh, rank, board))
        except threading.BrokenBarrierError as error:
            faults.append(error)
        except BaseException as error:
            faults.insert(0, error)
            board.fail()

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(mesh.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
    return [results[rank] for rank in range(mesh.size)]
