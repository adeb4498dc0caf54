"""What of the work that streams were given must come before what: from the device's own notes.

A piece of work comes behind what its stream was given before, behind the points that its stream
waits for, and behind what the thread that gave it had waited for by then. Threads that wait for one
another say so. What is not so ordered may run at the same time, however late the device is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

WORK, WAIT, POINT, SEEN, SAID = range(5)  # as in streams.h
TOLD, HEARD = range(2)  # what a thread says: others may go on; it has waited for that


class Note(NamedTuple):
    """stream: of all devices; or what is said. point: its number; or what it is said about."""

    kind: int
    stream: int
    point: int
    thread: int
    label: int


@dataclass
class Notes:
    """Labels of what threads give streams, and which come before which."""

    library: ctypes.CDLL
    taken: list[Note] = field(default_factory=list)

    @contextmanager
    def under(self, label: int) -> Iterator[None]:
        """What the calling thread gives streams within has a label, which is not negative."""
        self.library.strict_label(label)
        try:
            yield
        finally:
            self.library.strict_label(-1)

    def tell(self, value: int) -> None:
        """Threads that wait for `value` may go on, from what the calling one has waited for."""
        self.library.strict_say(TOLD, value)

    def heard(self, value: int) -> None:
        """The calling thread has waited for that."""
        self.library.strict_say(HEARD, value)

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Note what happens within."""
        self.library.strict_take_notes(1)
        try:
            yield
        finally:
            self.library.strict_take_notes(0)
            count = self.library.strict_count_notes()
            numbers = (ctypes.c_int64 * (len(Note._fields) * count))()
            self.library.strict_copy_notes(numbers)
            self.taken = [Note(*numbers[i : i + 5]) for i in range(0, len(numbers), 5)]

    @property
    def streams(self) -> set[int]:
        """Those that were given work."""
        return {note.stream for note in self.taken if note.kind == WORK}

    def before(self) -> dict[int, frozenset[int]]:
        """By label of some work, those of all work that must have run before the last of it."""
        found: dict[int, int] = {}
        for note, earlier in zip(self.taken, _earlier(self.taken), strict=True):
            if note.kind == WORK and note.label >= 0:
                found[note.label] = found.get(note.label, 0) | earlier
        return {label: frozenset(_labels(bits) - {label}) for label, bits in found.items()}


def _earlier(notes: Sequence[Note]) -> list[int]:
    """For each note the labels of the work before it, a bit each."""
    streams: dict[int, int] = {}  # by stream, thread, point and what was told: the labels so far
    threads: dict[int, int] = {}
    points: dict[int, int] = {}
    told: dict[int, int] = {}
    all_earlier = []
    for kind, stream, point, thread, label in notes:
        known = threads.get(thread, 0)
        if kind in (SEEN, SAID):
            if kind == SEEN:
                known |= points.get(point, 0)
            elif stream == HEARD:
                known |= told[point]
            else:
                told[point] = known
            threads[thread] = known
            all_earlier.append(known)
            continue
        earlier = known | streams.get(stream, 0)
        if kind == WAIT:
            earlier |= points.get(point, 0)
        all_earlier.append(earlier)
        if kind == WORK and label >= 0:
            earlier |= 1 << label
        streams[stream] = earlier
        if kind == POINT:
            points[point] = earlier
    return all_earlier


def _labels(bits: int) -> set[int]:
    return {i for i in range(bits.bit_length()) if bits >> i & 1}
