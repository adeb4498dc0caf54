"""Hazards between lanes: every conflict of two actions is ordered by the waits.

The conflicts are found by brute force, byte range against byte range, by rules that are written
down here a second time; an order counts when it follows from waits and from the lanes' own order.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import streamed
from streamed import ALL, PIECE, job_of, memory, model_of, plan_of, resting

from outsize.plan import Stage, Stream
from outsize.plan.plan import per_segment
from outsize.schedule import Action, Kind, Lane, Schedule, State
from outsize.schedule.action import WHOLE
from outsize.schedule.item import Item
from outsize.schedule.waits import settled, waits

PASSES = (
    Kind.FORWARD, Kind.LOSS, Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT,
)  # fmt: skip
BELOW = {"parameters": "disk", "gradients": "disk", "optimizer": "disk"}
HOST = {"gradients": "host", "optimizer": "host"}
AGAIN = per_segment(5, ("block",))
CASES = {
    "all, layers": ("llama, untied", {"order": "layer"}, ALL, {}),
    "all, behind": ("llama, untied", {"order": "layer", "update": "behind"}, ALL, {}),
    "all, tied, microbatches": ("llama", {"stages": AGAIN}, ALL, {"resident": 3, "returned": 2}),
    "bfloat16": ("llama", {"named": "bfloat16", "order": "layer"}, ALL, {}),
    "two stages": ("llama", {"stages": (Stage(0, 2), Stage(2, 5))}, BELOW, {"resident": 1}),
    "split": ("llama, untied", {"split_backward": True}, ALL, {"policy": "lru"}),
    "host": ("llama", {"order": "layer"}, {**HOST, "parameters": "host"}, {"host": 2}),
    "host, parameters here": ("llama", {}, HOST, {"host": 3}),
    "parameters": ("llama, untied", {"order": "layer"}, {"parameters": "disk"}, {"resident": 4}),
}


def schedule_of(name: Item) -> Schedule:
    family, changes, rest, stream = CASES[name]
    plan = replace(
        resting(plan_of(**{"named": "float32", **changes}), **rest),
        stream=Stream(part=4 * PIECE, **stream),
    )
    clip = None if plan.update == "behind" else 0.5
    with memory() as stores:
        return job_of(plan, stores, clip=clip, model=model_of(family)).schedule


class Touches:
    """What actions read and write, as they come: (bytes of the pool or a name, written)."""

    def __init__(self, schedule: Schedule) -> None:
        self.residency, self.schedule = schedule.residency, schedule
        self.owner: dict[int, str] = {}  # by byte of the pool that begins a page, whose it is
        for name in schedule.residency.start:
            self._own(name)

    def _pages(self, name: Item) -> range:
        offset, size = self.residency.rooms[name]
        return range(offset, offset + size, 4096)

    def _own(self, name: Item) -> None:
        self.owner |= dict.fromkeys(self._pages(name), name)

    def _room(self, name: Item, written: bool):
        if written:
            self._own(name)
        return [(("page", page), written) for page in self._pages(name)]

    def of(self, a: Action):
        r, s = self.residency, a.stage
        if a.state is State.ACTIVATIONS:
            return [(("activations", s, a.microbatch), True)]
        weights, sums = Item(State.PARAMETERS, s), Item(State.GRADIENTS, s)
        states = Item(State.OPTIMIZER, s, a.part)
        if a.kind in (Kind.FETCH, Kind.EVICT):
            fetch = a.kind is Kind.FETCH
            name = states if a.state is State.OPTIMIZER else Item(a.state, s)
            found = [*self._room(name, fetch), (("rest", name), not fetch)]
            if a.state is State.OPTIMIZER and not r.direct:
                if fetch and s in r.gradients:
                    found.append((("rest", sums), False))
                if s in r.parameters and (s in r.own or not fetch):
                    found.append((("rest", weights), not fetch))
            return found
        if a.kind in PASSES:
            return self._of_pass(a)
        if a.kind is Kind.NORM:
            return [(("norm",), True)]
        if a.lane is Lane.HOST:
            found = [(("rest", states), True), (("rest", sums), False), (("norm",), False)]
            return [*found, (("rest", weights), True)] if s in r.parameters else found
        found = [] if r.direct else [(("norm",), False)]
        if a.part != WHOLE:
            found += self._room(states, True)
            holds = s in r.parameters and all(
                self.owner.get(page) == weights for page in self._pages(weights)
            )
            if holds and not r.direct:
                found += self._room(weights, True)
        if a.part == WHOLE or r.direct:
            for name, stages in ((weights, r.parameters), (sums, r.gradients)):
                if s in stages:
                    found += self._room(name, True)
        return found

    def _of_pass(self, a: Action):
        r, found = self.residency, []
        for s in r.uses[a.stage]:
            if s in r.parameters:
                found += self._room(Item(State.PARAMETERS, s), False)
            if s in r.gradients and a.kind is not Kind.FORWARD:
                found += self._room(Item(State.GRADIENTS, s), True)
        if a.stage in r.spills:
            here = ("activations", a.stage, a.microbatch)
            found.append((here, a.kind in (Kind.FORWARD, Kind.LOSS)))
        return found


def before(schedule: Schedule, found) -> list[int]:
    """By action, as bits, every earlier one that has surely ended when it begins."""
    reach: list[int] = []
    last: dict[Lane, int] = {}
    for index, action in enumerate(schedule.workers[0]):
        bits = 0
        for place in (*found[index], *((last[action.lane],) if action.lane in last else ())):
            bits |= reach[place] | 1 << place
        reach.append(bits)
        last[action.lane] = index
    return reach


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    streamed.small(monkeypatch, 4 * PIECE)


@pytest.mark.parametrize("name", CASES)
def test_every_conflict_is_ordered(name):
    schedule = schedule_of(name)
    actions = schedule.workers[0]
    found = waits(schedule)
    reach = before(schedule, found)
    touches = Touches(schedule)
    users: dict[object, list[tuple[int, bool]]] = {}
    conflicts = 0
    for index, action in enumerate(actions):
        for resource, written in touches.of(action):
            for place, wrote in users.setdefault(resource, []):
                if (written or wrote) and place != index:
                    conflicts += actions[place].lane is not action.lane
                    assert reach[index] >> place & 1, (str(actions[place]), str(action), resource)
            users[resource].append((index, written))
    assert conflicts > len(actions) / 4


@pytest.mark.parametrize("name", CASES)
def test_nothing_waits_without_a_conflict(name):
    """But for the computing action ahead, which whatever is not computed waits for."""
    schedule = schedule_of(name)
    actions, touches, compute = schedule.workers[0], Touches(schedule), -1
    used = [dict[object, bool]() for _ in actions]
    for index, (action, places) in enumerate(zip(actions, waits(schedule), strict=True)):
        for resource, written in touches.of(action):
            used[index][resource] = used[index].get(resource, False) or written
        for place in places:
            shared = used[place].keys() & used[index].keys()
            needed = any(used[place][one] or used[index][one] for one in shared)
            assert needed or place == compute, (str(actions[place]), str(action))
        compute = index if action.lane is Lane.COMPUTE else compute


@pytest.mark.parametrize("name", CASES)
def test_places_in_the_list_are_earliest_starts(name):
    """Nothing leaves a lane's queue before the computing action ahead of it has ended, and no
    action waits for more than one of each other lane, or for its own."""
    schedule = schedule_of(name)
    reach, compute = before(schedule, waits(schedule)), -1
    for index, (action, places) in enumerate(
        zip(schedule.workers[0], waits(schedule), strict=True)
    ):
        lanes = [schedule.workers[0][place].lane for place in places]
        assert action.lane not in lanes and len(set(lanes)) == len(lanes)
        assert all(place < index for place in places)
        if compute >= 0:
            assert reach[index] >> compute & 1
        compute = index if action.lane is Lane.COMPUTE else compute


def test_activations_are_let_go_before_the_second_action_after():
    schedule = schedule_of("all, layers")
    actions = schedule.workers[0]
    due = {place: at for at, places in settled(schedule).items() for place in places}
    leaving = [
        i for i, a in enumerate(actions) if a.kind is Kind.EVICT and a.state is State.ACTIVATIONS
    ]
    assert sorted(due) == leaving and leaving
    for place, at in due.items():
        between = [a for a in actions[place:at] if a.lane is Lane.COMPUTE]
        assert len(between) == 1
        back = replace(actions[place], kind=Kind.FETCH, lane=Lane.FETCH)
        assert actions.index(back) > at, "nothing is asked for before it has gone"
