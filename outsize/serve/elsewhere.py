"""Serving on hardware that is not here: how its devices are divided into copies of the model, and
what each division would bear.

Lin et al., "APEX", 2024: batching is replayed step by step, by the engine's own policies and books
of pages, with steps priced from data sheets (outsize/serve/described.py). A division is a number of
copies, each on the workers of one tensor axis, which lie within a node; requests go to the copies
in turn. Pipelines, and prompts and tokens on workers of their own, are not among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from outsize.errors import OutsizeError, counted
from outsize.foresight.shape import Shape
from outsize.hardware.cluster import Group
from outsize.models.coding import Format
from outsize.serve.asks import Room
from outsize.serve.described import Served
from outsize.serve.played import Arrival
from outsize.serve.published import LATER, room_of
from outsize.serve.slo import Slo
from outsize.serve.traffic import Way, check, most, ways, worth


@dataclass(frozen=True)
class Wanted:
    """precision: of products, and of the weights but where they lie in codes; requests: at once,
    and step: tokens of a step, of each copy; most: bytes of a device that serving may have, None
    for what is kept of it by default; context: tokens of a request, None for what the pages hold;
    tensor: workers of each copy, None for any; policies: of which the best is taken; smaller:
    whether shorter steps are tried too; codes: what the blocks' weights lie in."""

    precision: str
    requests: int
    step: int
    policies: tuple[str, ...]
    slo: Slo
    most: int | None = None
    context: int | None = None
    tensor: int | None = None
    smaller: bool = True
    codes: Format | None = None


@dataclass(frozen=True)
class Divided:
    """Copies of the model, the workers of each, and what came of the best way to serve so. weights,
    cache: bytes on a worker."""

    copies: int
    tensor: int
    weights: float
    cache: float
    room: Room
    way: Way

    def __str__(self) -> str:
        workers = counted(self.tensor, "device")
        copies = "1 copy" if self.copies == 1 else f"{self.copies} copies"
        return f"{copies} on {workers} each, {self.way}"


@dataclass(frozen=True)
class Found:
    """The best division first; left: those that were not tried, and why; bears: requests a second
    of all copies of the best."""

    divided: Sequence[Divided]
    left: Sequence[str]
    bears: float


def divide(
    shape: Shape, group: Group, wanted: Wanted, coming: Callable[[int], Sequence[Arrival]]
) -> Found:
    """The divisions of like devices by what they promise. coming: the requests that come to each of
    so many copies. OutsizeError where no division is left."""
    if shape.parts.recurring:
        raise OutsizeError("the model has recurrent states, whose reading is not priced yet")
    if shape.module is not None:
        raise OutsizeError("--serve: a module of one's own is not served; expected a decoder")
    found, left = list[Divided](), list[str]()
    for tensor in _sizes(group, wanted):
        try:
            found.append(_divided(shape, group, wanted, tensor, coming))
        except OutsizeError as error:
            left.append(f"{counted(tensor, 'device')} for each copy: {error}")
    if not found:
        raise OutsizeError(f"nothing is left to serve with: {'; '.join(left)}")
    found.sort(key=lambda one: (*worth(one.way, wanted.slo), one.tensor))
    best = found[0]
    return Found(found, left, best.copies * most(best.room, coming(best.copies), best.way))


def _sizes(group: Group, wanted: Wanted) -> Iterator[int]:
    """Workers of a copy: those that divide a node, or the ones that are said."""
    if wanted.tensor is not None:
        yield wanted.tensor
        return
    yield from (n for n in range(1, group.node + 1) if group.node % n == 0)


def _divided(
    shape: Shape,
    group: Group,
    wanted: Wanted,
    tensor: int,
    coming: Callable[[int], Sequence[Arrival]],
) -> Divided:
    if group.node % tensor:
        raise OutsizeError(f"a node has {counted(group.node, 'device')}, which it does not divide")
    if shape.heads % tensor:
        raise OutsizeError(f"it does not divide {counted(shape.heads, 'head')}")
    served = Served(shape, group, tensor, wanted.precision, *LATER, wanted.codes)
    room = room_of(served, wanted.step, wanted.most)
    held = room.context
    context = min(held, wanted.context or held)
    room = replace(room, slots=wanted.requests, slo=wanted.slo, context=context)
    copies = group.count // tensor
    mine = coming(copies)
    check(mine, room)
    way = ways(room, mine, wanted.policies, wanted.smaller)[0]
    return Divided(copies, tensor, served.weights, held * served.cached, room, way)
