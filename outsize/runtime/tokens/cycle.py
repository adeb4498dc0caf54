"""The cycle of a step that is played for ever: rooms of its stages, and the schedules over them.

Rooms come from memory/arrange.py, FETCHes from schedule/passes/offload.py; here the end of a step
holds the FETCHes for the beginning of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from outsize.memory.arrange import arrange, least, traffic
from outsize.runtime.tokens.source import Outline, Source
from outsize.schedule import Action, Kind, Lane, Schedule, State, compile_tokens, prove
from outsize.schedule.compile.tokens import sampled
from outsize.schedule.item import Item
from outsize.schedule.passes.offload import offload, visits
from outsize.schedule.residency import Presence, Residency, moved

Known = Source | Outline

AHEAD = 1  # stages fetched before the one at work


@dataclass(frozen=True)
class Layout:
    """Rooms of the pool and the schedules over them: that of FETCH fills it for the others.
    capacity: bytes that the pool might have had; read: bytes that each step reads, besides rows of
    the token embedding."""

    residency: Residency
    schedules: Mapping[Kind, Schedule]
    capacity: int
    pool: int
    read: int

    @property
    def filled(self) -> list[int]:
        """Stages that are in the pool when a step begins."""
        return [action.stage for action in self.schedules[Kind.FETCH].workers[0]]

    @property
    def kept(self) -> int:
        """Stages that stay in the pool."""
        fetched = {moved(a) for a in self.schedules[Kind.DECODE].workers[0] if a.kind is Kind.FETCH}
        return len(self.residency.rooms) - len(fetched)


def smallest(source: Known) -> int:
    """Bytes of the least pool."""
    needed, sizes = visits(_once(source, Kind.DECODE), _bare(source)), _sizes(source)
    return min(least(needed, sizes, ahead) for ahead in range(AHEAD + 1))


def layout_of(
    source: Known, capacity: int, steps: Callable[[Kind], Schedule] | None = None
) -> Layout:
    """The rooms in a pool of `capacity` bytes, and the schedules. A stage is fetched ahead where
    there is room for two. steps: of each kind, what is done but for FETCH and SAMPLE; None: all
    stages one after the other. OutsizeError for a pool that holds no stage."""
    bare, sizes, steps = _bare(source), _sizes(source), steps or partial(_once, source)
    needed = visits(_once(source, Kind.DECODE), bare)
    ahead = AHEAD if capacity >= least(needed, sizes, AHEAD) else 0
    found = arrange(needed, sizes, capacity, ahead=ahead)
    rooms = {name: (start, -(-sizes[name] // 64) * 64) for name, start in found.offsets.items()}
    residency = replace(bare, rooms=rooms)
    schedules = {
        kind: sampled(cyclic(steps(kind), residency, ahead)) for kind in (Kind.PREFILL, Kind.DECODE)
    }
    decode = schedules[Kind.DECODE]
    schedules[Kind.FETCH] = filling = _filling(decode)
    first = replace(filling, workers=((*filling.workers[0], *decode.workers[0]),))
    for schedule in (schedules[Kind.PREFILL], decode, first):
        prove(schedule)
    costs = {name: source.cost(name.stage) for name in sizes}
    fetched = [a for a in decode.workers[0] if a.kind is Kind.FETCH]
    read = sum(costs[moved(action)] for action in fetched)
    assert traffic(needed, sizes, found.offsets).fetches == len(fetched), "a cycle is what it was"
    return Layout(residency, schedules, capacity, found.extent, read)


def cyclic(schedule: Schedule, residency: Residency, ahead: int) -> Schedule:
    """One turn of a schedule that is played for ever, its first stages fetched by the turn before.

    Two turns are laid out; the second's own fetches, and those that the first holds for the second,
    are what every turn has.
    """
    once = schedule.workers[0]
    count = len(once)
    twice = offload(replace(schedule, workers=(once * 2,)), residency, ahead)
    turn: list[list[Action]] = [[] for _ in range(count)]
    place, waiting = 0, list[tuple[int, Action]]()  # fetches whose use has not come
    for action in twice.workers[0]:
        if action.kind is Kind.FETCH:
            waiting.append((place, action))
            continue
        needed = set(residency.needs(action, schedule.first))
        for at, fetch in [each for each in waiting if moved(each[1]) in needed]:
            waiting.remove((at, fetch))
            if place >= count:  # it is used in the second turn
                turn[at % count].append(fetch)
        place += 1
    worker = [a for before, action in zip(turn, once, strict=True) for a in (*before, action)]
    start = _left(worker, residency)
    return replace(schedule, workers=(tuple(worker),), residency=replace(residency, start=start))


def _left(worker: list[Action], residency: Residency) -> frozenset[Item]:
    """What is in the pool whenever a turn begins."""
    fetches = [action for action in worker if action.kind is Kind.FETCH]
    kept = frozenset(residency.rooms) - set(map(moved, fetches))
    presence = Presence(replace(residency, start=kept), 0)
    for fetch in fetches:
        presence.step(fetch)
    return frozenset(presence.present)


def _filling(schedule: Schedule) -> Schedule:
    """What brings into an empty pool all that a turn finds there."""
    residency = schedule.residency
    assert residency is not None, "it is of the pool"
    fetches = tuple(
        Action(Kind.FETCH, name.stage, lane=Lane.FETCH, state=name.state)
        for name in sorted(residency.start)
    )
    empty = replace(residency, start=frozenset[Item]())
    return replace(schedule, workers=(fetches,), residency=empty)


def _once(source: Known, kind: Kind) -> Schedule:
    return compile_tokens(len(source.stages), kind)


def _bare(source: Known) -> Residency:
    count = len(source.stages)
    below = frozenset(s for s, stage in enumerate(source.stages) if stage.bytes)
    return Residency(tuple((s,) for s in range(count)), parameters=below)


def _sizes(source: Known) -> dict[Item, int]:
    return {
        Item(State.PARAMETERS, s): stage.bytes
        for s, stage in enumerate(source.stages)
        if stage.bytes
    }
