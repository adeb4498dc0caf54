"""Board: the pulses of workers in memory that the processes of one machine share.

    worker r: "step 12" | thread 0: changes, since, "FORWARD 3 0", "" | thread 1: ..., "all_reduce"

A writer raises a count before and after each change, and a reader that meets an odd count, or two
different ones, reads again (a sequence lock): writers never wait. A count is a whole word of the
memory and goes in and out at once; `struct` clears its place first and goes byte by byte. No file
has a name, so nothing stays behind whoever is killed.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from mmap import mmap

THREADS = 12  # of a worker that have places of their own; any others share the last
TEXT = 120  # bytes of an action, or of what is waited for
_WORD = 8  # bytes of a count; every part starts at a multiple of it
_HEAD = struct.Struct("=dHH4x")  # since (monotonic seconds), lengths of both texts
_TEXTS = _WORD + _HEAD.size
_PLACE = _TEXTS + 2 * TEXT
_LENGTH = struct.Struct("=H6x")
_DURING = _WORD + _LENGTH.size + TEXT
_WORKER = _DURING + THREADS * _PLACE
_TRIES = 50  # a writer that died within a change leaves an odd count: then as it is
_PAUSE = 0.002  # seconds between them: a busy machine may have put the writer aside


@dataclass(frozen=True)
class Spot:
    """Where one thread of a worker is. waits: for other workers, in what; "": it does not wait.
    since: the monotonic time of its last change."""

    action: str
    waits: str
    since: float


@dataclass(frozen=True)
class Place:
    """Where a worker is. spots: of its threads, the main one first."""

    during: str = ""
    spots: tuple[Spot, ...] = ()

    @property
    def waits(self) -> Spot | None:
        """The thread that has waited longest for other workers."""
        return min((s for s in self.spots if s.waits), key=lambda s: s.since, default=None)

    def __str__(self) -> str:
        actions = [spot.action for spot in self.spots if spot.action]
        return ", ".join([*([self.during] if self.during else []), *actions[:1]]) or "starting"


def memory(workers: int) -> mmap:
    """Memory for so many workers, shared with every process that is forked from here on."""
    return mmap(-1, workers * _WORKER)


@dataclass
class Board:
    """The pulse of the worker `rank`, written into `memory`."""

    memory: mmap
    rank: int
    # By name: the threads of lanes come and go with every step.
    _places: dict[str, int] = field(default_factory=lambda: {"MainThread": 0})
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def during(self, what: str) -> None:
        text, start = what.encode()[:TEXT], self.rank * _WORKER
        with _change(self.memory, start):
            _LENGTH.pack_into(self.memory, start + _WORD, len(text))
            at = start + _WORD + _LENGTH.size
            self.memory[at : at + len(text)] = text

    def at(self, action: str) -> None:
        self._write(action.encode()[:TEXT], b"")

    def wait(self, what: str) -> None:
        self._write(None, what.encode()[:TEXT])

    def go(self) -> None:
        self._write(None, b"")

    def _write(self, action: bytes | None, waits: bytes) -> None:
        start, memory = self._start(), self.memory
        text = start + _TEXTS
        with _change(memory, start):
            if action is None:
                length = _HEAD.unpack_from(memory, start + _WORD)[1]
            else:
                length = len(action)
                memory[text : text + length] = action
            _HEAD.pack_into(memory, start + _WORD, time.monotonic(), length, len(waits))
            memory[text + TEXT : text + TEXT + len(waits)] = waits

    def _start(self) -> int:
        name = threading.current_thread().name
        place = self._places.get(name)
        if place is None:
            with self._lock:
                place = self._places.setdefault(name, min(len(self._places), THREADS - 1))
        return self.rank * _WORKER + _DURING + place * _PLACE


def read(memory: mmap, rank: int) -> Place:
    """Where the worker `rank` is."""
    start = rank * _WORKER
    spots = (_spot(memory, start + _DURING + i * _PLACE) for i in range(THREADS))
    return Place(_during(memory, start), tuple(spot for spot in spots if spot is not None))


def _during(memory: mmap, start: int) -> str:
    _, data = _whole(memory, start, _DURING)
    (length,) = _LENGTH.unpack_from(data, _WORD)
    at = _WORD + _LENGTH.size
    return data[at : at + length].decode(errors="replace")


def _spot(memory: mmap, start: int) -> Spot | None:
    """None: no thread has this place yet."""
    changes, data = _whole(memory, start, _PLACE)
    if not changes:
        return None
    since, action, waits = _HEAD.unpack_from(data, _WORD)
    done, awaited = data[_TEXTS : _TEXTS + action], data[_TEXTS + TEXT : _TEXTS + TEXT + waits]
    return Spot(done.decode(errors="replace"), awaited.decode(errors="replace"), since)


def _whole(memory: mmap, start: int, size: int) -> tuple[int, bytes]:
    """Changes so far, and bytes of the memory between two of them: copied at once, so that a writer
    that never rests leaves time for it."""
    with memoryview(memory) as view, view.cast("Q") as words:
        at = start // _WORD
        for _ in range(_TRIES):
            changes = words[at]
            data = memory[start : start + size]
            if changes % 2 == 0 and words[at] == changes:
                break
            time.sleep(_PAUSE)
    return changes, data


@contextmanager
def _change(memory: mmap, start: int) -> Iterator[None]:
    with memoryview(memory) as view, view.cast("Q") as words:
        odd = words[start // _WORD] | 1
        words[start // _WORD] = odd
        yield
        words[start // _WORD] = odd + 1
