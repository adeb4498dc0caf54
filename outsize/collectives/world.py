"""World: the workers of a run, and the groups among them. An argument everywhere; never global."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol

import torch

from outsize.collectives.axes import Axis
from outsize.collectives.collective import Alone, Collective
from outsize.collectives.mesh import Mesh

Use = Literal["compute", "network", "beside", "stages", "merge", "exchange", "agreement"]
LAYERS: tuple[Use, Use] = ("compute", "beside")  # the thread that computes, and one beside it
Key = tuple[tuple[int, ...], Use]  # ranks in their order, and who calls them


class World(Protocol):
    """The workers of one run as one of them sees them."""

    @property
    def mesh(self) -> Mesh: ...

    @property
    def rank(self) -> int:
        """This worker, from 0 to mesh.size - 1."""

    @property
    def groups(self) -> Mapping[Key, Collective]:
        """The collectives that there are by now."""

    def group(self, ranks: Sequence[int], use: Use = "compute") -> Collective:
        """The collective of some workers, this one among them, in the order given. Made at its
        first call, which all of them make in the same order. use: the thread that calls it; two
        threads never share a collective."""


class Lone:
    """A run of one worker."""

    mesh, rank = Mesh(), 0
    groups: Mapping[Key, Collective] = MappingProxyType({})

    def group(self, ranks: Sequence[int], use: Use = "compute") -> Collective:
        return Alone()


def along(world: World, axis: str, use: Use = "compute") -> Collective:
    """The collective of the workers that differ from this one on an axis alone."""
    return world.group(world.mesh.ranks(axis, world.rank), use)


def together(world: World, wanted: Callable[[Axis], bool], use: Use = "compute") -> Collective:
    """The collective of the workers that differ from this one on the axes that are wanted alone."""
    return world.group(world.mesh.along(wanted, world.rank), use)


@dataclass(frozen=True)
class Within:
    """What layers talk over. axis: of whose workers; beside: from a thread beside the one that
    computes."""

    axis: str
    beside: bool
    group: Collective


def inside(world: World) -> Iterator[Within]:
    """The collectives that actions of the computing lane have used by now."""
    for axis in world.mesh.axes:
        for use in LAYERS if axis.inside else ():
            found = world.groups.get((world.mesh.ranks(axis.name, world.rank), use))
            if found is not None:
                yield Within(axis.name, use == LAYERS[True], found)


def received(world: World, *uses: Use) -> Counter[str]:
    """Bytes by operation that this worker has had from others, through collectives of some uses, or
    of all."""
    from outsize.collectives.hierarchical import own  # of those who say anything to others

    total = Counter[str]()
    for (_, use), group in list(world.groups.items()):
        if not uses or use in uses:
            total.update(own(group))
    return total


def everyone(world: World, use: Use = "compute") -> Collective:
    """The collective of all workers."""
    return world.group(tuple(range(world.mesh.size)), use)


def told(world: World, numbers: Sequence[float]) -> list[list[float]]:
    """What every worker says, by rank; whole numbers are exact. All of them ask."""
    mine = torch.tensor(numbers, dtype=torch.float64)
    count, size = len(mine), world.mesh.size
    out = mine.new_empty(count * size)
    spans = [(count * rank, count * (rank + 1)) for rank in range(size)]
    everyone(world, "agreement").all_gather(mine, spans, out)
    return [list(each) for each in out.view(size, count).tolist()]


def steady(machines: Sequence[Hashable]) -> bool:
    """Whether workers on such machines sum in an order that does not depend on where in a tensor a
    number lies: on one in that of the ranks, then between two. A ring goes round by place."""
    counts = Counter(machines)
    return len(counts) == 1 or (len(counts) == 2 and len(set(counts.values())) == 1)
