"""A world whose collectives say when they wait, so that a watcher sees who waits for whom.

A collective that raises leaves its worker marked as waiting: what it raised follows from what
happened to another one, and is not the first fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from outsize.collectives.collective import Collective, Operation, Span
from outsize.collectives.mesh import Mesh
from outsize.collectives.world import Key, Use, World
from outsize.launch.heartbeat import Heartbeat


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


@dataclass(frozen=True)
class Watched:
    """`inner`, telling `pulse` what it waits in and with whom."""

    inner: Collective
    pulse: Heartbeat
    who: str

    @property
    def size(self) -> int:
        return self.inner.size

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def received(self) -> Mapping[str, int]:
        return self.inner.received

    def all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> Tensor:
        self.pulse.wait(f"all_reduce {self.who}")
        result = self.inner.all_reduce(tensor, operation)
        self.pulse.go()
        return result

    def reduce_scatter(self, flat: Tensor, spans: Sequence[Span], out: Tensor) -> None:
        self.pulse.wait(f"reduce_scatter {self.who}")
        self.inner.reduce_scatter(flat, spans, out)
        self.pulse.go()

    def all_gather(self, mine: Tensor, spans: Sequence[Span], out: Tensor) -> None:
        self.pulse.wait(f"all_gather {self.who}")
        self.inner.all_gather(mine, spans, out)
        self.pulse.go()

    def all_to_all(self, given: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        self.pulse.wait(f"all_to_all {self.who}")
        self.inner.all_to_all(given, out)
        self.pulse.go()

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        self.pulse.wait(f"broadcast {self.who}")
        result = self.inner.broadcast(tensor, source)
        self.pulse.go()
        return result

    def barrier(self) -> None:
        self.pulse.wait(f"barrier {self.who}")
        self.inner.barrier()
        self.pulse.go()


def named(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 2, 4", "ranks 0 to 7"."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 3 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
