"""Message: how one worker says it is, in the store, for workers of other machines to read."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass

from outsize.launch.activity import Activity, activity
from outsize.launch.board import Place, Spot
from outsize.launch.watchdog import Sample


@dataclass(frozen=True)
class Message:
    """beat: counts up. machine: a number; pid: on it. leaving: its part of the run is done.
    spots: of its threads (action, what it waits in, seconds since the last change)."""

    beat: int
    host: str
    machine: int
    pid: int
    leaving: bool
    during: str
    spots: tuple[tuple[str, str, float], ...]
    activity: Activity

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Message:
        said = json.loads(text)
        spots = tuple((str(a), str(w), float(s)) for a, w, s in said.pop("spots"))
        return Message(spots=spots, activity=Activity(**said.pop("activity")), **said)

    def sample(self, heard: float) -> Sample:
        """heard: seconds ago."""
        now = time.monotonic()
        spots = tuple(Spot(a, w, now - heard - seconds) for a, w, seconds in self.spots)
        place = Place(self.during, spots)
        waits = place.waits
        return Sample(self.activity, place, None if waits is None else now - waits.since, heard)


def word(beat: int, machine: int, leaving: bool, place: Place) -> Message:
    """Of this process, which is at `place`."""
    now = time.monotonic()
    spots = tuple((s.action, s.waits, now - s.since) for s in place.spots)
    host, pid = socket.gethostname(), os.getpid()
    return Message(beat, host, machine, pid, leaving, place.during, spots, activity(pid))
