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
from dataclasses import dataclass, field, replace
from mmap import mmap

from outsize.launch.heartbeat import Heartbeat

THREADS = 12  # of a worker that have places of their own; any others share the last
TEXT = 120  # bytes of an action, or of what is waited for
_WORD = 8  # bytes of a count; every part starts at a multiple of it
_HEAD = struct.Struct("=dHH4x")  # since (monotonic seconds), lengths of both texts
_SPOT = _HEAD.size + 2 * TEXT
_PLACE = _WORD + 2 * _SPOT
_WORKER = (1 + THREADS) * _PLACE  # first what the actions of its threads are part of


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

    def counted_from(self, now: float) -> Place:
        """With how long ago each change was instead of when, at a monotonic time, or back."""
        return replace(self, spots=tuple(replace(s, since=now - s.since) for s in self.spots))

    def __str__(self) -> str:
        actions = [spot.action for spot in self.spots if spot.action]
        return ", ".join([*([self.during] if self.during else []), *actions[:1]]) or "starting"


def memory(workers: int) -> mmap:
    """Memory for so many workers, shared with every process that is forked from here on."""
    return mmap(-1, workers * _WORKER)


@dataclass
class Board(Heartbeat):
    """The pulse of the worker `rank`, written into `memory`."""

    memory: mmap
    rank: int
    # By name: the threads of lanes come and go with every step.
    _places: dict[str, int] = field(default_factory=lambda: {"MainThread": 1})
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def during(self, what: str) -> None:
        self._write(0, what, "")

    def at(self, action: str) -> None:
        self._write(self._own(), action, "")

    def wait(self, what: str) -> None:
        self._write(self._own(), None, what)

    def go(self) -> None:
        self._write(self._own(), None, "")

    def _own(self) -> int:
        """The place of the calling thread."""
        name = threading.current_thread().name
        place = self._places.get(name)
        if place is None:
            with self._lock:
                place = self._places.setdefault(name, min(1 + len(self._places), THREADS))
        return place

    def _write(self, place: int, said: str | None, awaited: str) -> None:
        """said: None where the action goes on."""
        memory, start = self.memory, self.rank * _WORKER + place * _PLACE
        with memoryview(memory) as view, view.cast("Q") as words:
            changes, copies = words[start // _WORD], start + _WORD
            if said is None:
                before = copies + changes % 2 * _SPOT
                length, text = _HEAD.unpack_from(memory, before)[1], before + _HEAD.size
                action = memory[text : text + length]
            else:
                action = said.encode()[:TEXT]
            waits = awaited.encode()[:TEXT]
            at = copies + (changes + 1) % 2 * _SPOT
            text = at + _HEAD.size
            _HEAD.pack_into(memory, at, time.monotonic(), len(action), len(waits))
            memory[text : text + len(action)] = action
            memory[text + TEXT : text + TEXT + len(waits)] = waits
            words[start // _WORD] = changes + 1


def read(memory: mmap, rank: int) -> Place:
    """Where the worker `rank` is."""
    start = rank * _WORKER
    during, *spots = (_spot(memory, start + place * _PLACE) for place in range(1 + THREADS))
    said = "" if during is None else during.action
    return Place(said, tuple(spot for spot in spots if spot is not None))


def _spot(memory: mmap, start: int) -> Spot | None:
    """The copy that holds, read at once, so that a writer that never rests leaves time for it;
    None: no thread has this place yet."""
    with memoryview(memory) as view, view.cast("Q") as words:
        while True:
            changes = words[start // _WORD]
            first = start + _WORD + changes % 2 * _SPOT
            data = memory[first : first + _SPOT]
            if words[start // _WORD] == changes:
                break
    if not changes:
        return None
    since, action, waits = _HEAD.unpack_from(data)
    texts = data[_HEAD.size :]
    done, awaited = texts[:action], texts[TEXT : TEXT + waits]
    return Spot(done.decode(errors="replace"), awaited.decode(errors="replace"), since)
