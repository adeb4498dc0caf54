"""World: the workers of a run, and the groups among them. An argument everywhere; never global."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from outsize.collectives.collective import Alone, Collective
from outsize.collectives.mesh import Mesh

Use = Literal["compute", "network", "overlap", "stages", "merge", "exchange"]


class World(Protocol):
    """The workers of one run as one of them sees them."""

    @property
    def mesh(self) -> Mesh: ...

    @property
    def rank(self) -> int:
        """This worker, from 0 to mesh.size - 1."""

    def group(self, ranks: Sequence[int], use: Use = "compute") -> Collective:
        """The collective of some workers, this one among them, in the order given. Made at its
        first call, which all of them make in the same order. use: the thread that calls it; two
        threads never share a collective."""


class Lone:
    """A run of one worker."""

    mesh, rank = Mesh(), 0

    def group(self, ranks: Sequence[int], use: Use = "compute") -> Collective:
        return Alone()


def along(world: World, axis: str, use: Use = "compute") -> Collective:
    """The collective of the workers that differ from this one on an axis alone."""
    return world.group(world.mesh.ranks(axis, world.rank), use)


def everyone(world: World, use: Use = "compute") -> Collective:
    """The collective of all workers."""
    return world.group(tuple(range(world.mesh.size)), use)
