"""A world whose collectives say when they wait, so that a watcher sees who waits for whom.

A collective that raises leaves its worker marked as waiting: what it raised follows from what
happened to another one, and is not the first fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from outsize.collectives.collective import DONE, Call, Collective, Handle
from outsize.collectives.mesh import Mesh
from outsize.collectives.world import Key, Use, World
from outsize.launch.heartbeat import Heartbeat

T = TypeVar("T")


@dataclass(frozen=True)
class WatchedWorld:
    """`world`, whose groups tell `pulse`."""

    world: World
    pulse: Heartbeat

    @property
    def mesh(self) -> Mesh:
        return self.world.mesh

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def groups(self) -> Mapping[Key, Collective]:
        return self.world.groups

    def group(self, ranks: Sequence[int], use: Use = "compute") -> Collective:
        who = f"with {named(ranks)}"
        self.pulse.wait(f"making a group {who}")
        made = self.world.group(ranks, use)
        self.pulse.go()
        return made if made.size == 1 else Watched(made, self.pulse, who)


class Watched(Collective):
    """`inner`, telling `pulse` what it waits in and with whom."""

    def __init__(self, inner: Collective, pulse: Heartbeat, who: str) -> None:
        self.inner, self.size, self.rank, self.received = (
            inner,
            inner.size,
            inner.rank,
            inner.received,
        )
        self._pulse, self._who = pulse, who

    def start(self, call: Call) -> Handle:
        handle = self._telling(call, lambda: self.inner.start(call))
        return DONE if handle is DONE else Handle(lambda: self._telling(call, handle.wait))

    def _telling(self, call: Call, work: Callable[[], T]) -> T:
        self._pulse.wait(f"{call.name} {self._who}")
        found = work()
        self._pulse.go()
        return found


def named(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 2, 4", "ranks 0 to 7"."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 3 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
