"""Board: the pulses of workers in memory that the processes of one machine share.

    worker r: "step 12" | thread 0: changes, since, "FORWARD 3 0", "" | thread 1: ..., "all_reduce"

There are two copies of everything: a writer fills the one that nobody reads and then raises a
count, which says which of them holds. A reader that meets another count afterwards reads again. So
nobody waits, not even for a writer that is put aside or killed within a change. A count is a whole
word of the memory and goes in and out at once; `struct` clears its place first and goes byte by
byte. No file has a name, so nothing stays behind whoever is killed.
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
_SPOT = _HEAD.size + 2 * TEXT
_PLACE = _WORD + 2 * _SPOT
_LENGTH = struct.Struct("=H6x")
_NOTE = _LENGTH.size + TEXT
_DURING = _WORD + 2 * _NOTE
_WORKER = _DURING + THREADS * _PLACE


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
        text = what.encode()[:TEXT]
        with _change(self.memory, self.rank * _WORKER, _NOTE) as (_, at):
            _LENGTH.pack_into(self.memory, at, len(text))
            self.memory[at + _LENGTH.size : at + _LENGTH.size + len(text)] = text

    def at(self, action: str) -> None:
        self._write(action.encode()[:TEXT], b"")

    def wait(self, what: str) -> None:
        self._write(None, what.encode()[:TEXT])

    def go(self) -> None:
        self._write(None, b"")

    def _write(self, action: bytes | None, waits: bytes) -> None:
        memory = self.memory
        with _change(memory, self._start(), _SPOT) as (before, at):
            if action is None:
                length = _HEAD.unpack_from(memory, before)[1]
                action = memory[before + _HEAD.size : before + _HEAD.size + length]
            text = at + _HEAD.size
            _HEAD.pack_into(memory, at, time.monotonic(), len(action), len(waits))
            memory[text : text + len(action)] = action
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
    _, data = _whole(memory, start, _NOTE)
    (length,) = _LENGTH.unpack_from(data)
    return data[_LENGTH.size : _LENGTH.size + length].decode(errors="replace")


def _spot(memory: mmap, start: int) -> Spot | None:
    """None: no thread has this place yet."""
    changes, data = _whole(memory, start, _SPOT)
    if not changes:
        return None
    since, action, waits = _HEAD.unpack_from(data)
    texts = data[_HEAD.size :]
    done, awaited = texts[:action], texts[TEXT : TEXT + waits]
    return Spot(done.decode(errors="replace"), awaited.decode(errors="replace"), since)


def _whole(memory: mmap, start: int, size: int) -> tuple[int, bytes]:
    """Changes so far, and the copy that holds: read at once, so that a writer that never rests
    leaves time for it."""
    with memoryview(memory) as view, view.cast("Q") as words:
        at = start // _WORD
        while True:
            changes = words[at]
            first = start + _WORD + changes % 2 * size
            data = memory[first : first + size]
            if words[at] == changes:
                return changes, data


@contextmanager
def _change(memory: mmap, start: int, size: int) -> Iterator[tuple[int, int]]:
    """Where the copy that holds begins, and the one that shall."""
    with memoryview(memory) as view, view.cast("Q") as words:
        changes, copies = words[start // _WORD], start + _WORD
        yield copies + changes % 2 * size, copies + (changes + 1) % 2 * size
        words[start // _WORD] = changes + 1
