"""The optimizer's states come and go beside updates, and batches come beside the computation:
nothing orders them. Shown from the device's own notes of what streams were given and wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import strict
from cases import LAYERS, Case, device, stores_of

from outsize.runtime import engine, lanes
from outsize.runtime.engine import Engine, Step
from outsize.runtime.lanes import Board, Lanes
from outsize.schedule import Action, Kind, Lane, Schedule, State
from outsize.schedule.waits import waits

RESTS = {"optimizer": "host", "gradients": "host"}


@contextmanager
def noting(notes: strict.Notes, actions: dict[int, Action]) -> Iterator[None]:
    """Work has the place of its action as its label; threads say when they wait for each other."""
    move, end, wait, give, behind = (
        Engine._move, Board.end, Board.wait, Lanes.give, lanes._behind
    )  # fmt: skip
    given: dict[Any, int] = {}  # handed to a lane: its number, apart from those of places

    def labelled(self: Engine, step: Step, begin: float) -> Any:
        actions[step.index] = step.action
        with notes.under(step.index):
            return move(self, step, begin)

    def ended(self: Board, place: int) -> None:
        notes.tell(place)
        end(self, place)

    def waited(self: Board, places: Iterable[int]) -> None:
        places = list(places)
        wait(self, places)
        for place in places:
            notes.heard(place)

    def handed(self: Lanes, lane: Lane, work: Callable[[], None]) -> None:
        given[work] = number = 1_000_000 + len(given)
        notes.tell(number)
        give(self, lane, work)

    def taken(mark: Any, on: Any, work: Callable[[], None]) -> None:
        notes.heard(given[work])
        behind(mark, on, work)

    with ExitStack() as stack:
        for owner, name, new in (
            (Engine, "_move", labelled), (Board, "end", ended), (Board, "wait", waited),
            (Lanes, "give", handed), (lanes, "_behind", taken),
        ):  # fmt: skip
            stack.enter_context(patch.object(owner, name, new))
        stack.enter_context(notes.taking())
        yield


def noted(case: Case, folder: Path) -> tuple[dict[int, Action], dict[int, frozenset[int]]]:
    """Of a second step: its actions by their places, and what comes before the work of each."""
    strict.start("demand", device_bytes=1 << 28)
    notes, actions = strict.notes(), dict[int, Action]()
    with stores_of(case, device(), folder) as stores:
        job, data = case.job(device(), stores), case.batches(2)
        job.step(data[0], 1e-2)
        with noting(notes, actions):
            job.step(data[1], 1e-2)
        job.close()
    every = {a.lane for a in actions.values()}
    assert notes.streams <= set(range(len(every))), "each lane has the stream of the first step"
    before = notes.before()
    return {place: action for place, action in actions.items() if place in before}, before


def states_beside_updates(case: Case, folder: Path) -> tuple[int, int, int]:
    """Pairs of updates that follow one another, of how many the later one's states come beside the
    earlier update, and of how many the earlier one's go beside the later update."""
    actions, before = noted(case, folder)
    copies = {
        (a.kind, a.stage, a.part): i for i, a in actions.items() if a.state is State.OPTIMIZER
    }
    updates = [(i, (a.stage, a.part)) for i, a in sorted(actions.items()) if a.kind is Kind.UPDATE]
    pairs = come = go = 0
    for (this, own), (later, others) in pairwise(updates):
        leave, arrive = copies[Kind.EVICT, *own], copies[Kind.FETCH, *others]
        assert this in before[leave] and arrive in before[later], "what must be ordered is"
        pairs += 1
        come += this not in before[arrive]
        go += leave not in before[later]
    return pairs, come, go


def batches_beside_computation(case: Case, folder: Path) -> tuple[int, int]:
    """Microbatches behind the first, and how many of them are copied beside some computation of
    the one before: neither comes before the other."""
    actions, before = noted(case, folder)
    beside, copies = set(), {a.microbatch: i for i, a in actions.items() if a.kind is Kind.COPY}
    for place, a in actions.items():
        copy = copies.get(a.microbatch + 1)
        if a.kind.way and copy and place not in before[copy] and copy not in before[place]:
            beside.add(copy)
    return len(copies) - 1, len(beside)


def _all_before(schedule: Schedule) -> Any:
    """A computing action waits for all that lanes were given before it."""
    latest, found = dict[Lane, int](), []
    for index, (action, needed) in enumerate(
        zip(schedule.workers[0], waits(schedule), strict=True)
    ):
        if action.lane is Lane.COMPUTE:
            found.append(tuple(sorted({*needed, *latest.values()})))
        else:
            found.append(needed)
            latest[action.lane] = index
    return tuple(found)


def test_states_come_and_go_beside_updates(tmp_path: Path) -> None:
    pairs, come, go = states_beside_updates(Case(LAYERS, RESTS), tmp_path)
    assert pairs >= 4 and come == go == pairs, (pairs, come, go)


def test_batches_come_beside_computation(tmp_path: Path) -> None:
    assert batches_beside_computation(Case(), tmp_path) == (2, 2)


def test_states_come_after_the_update_where_there_is_room_for_one(tmp_path: Path) -> None:
    pairs, come, _ = states_beside_updates(Case(LAYERS, RESTS, {"resident": 1}), tmp_path)
    assert pairs and not come


def test_a_wait_more_is_shown(tmp_path: Path) -> None:
    with patch.object(engine, "waits", _all_before):
        pairs, _, go = states_beside_updates(Case(LAYERS, RESTS), tmp_path)
        assert go < pairs
        assert batches_beside_computation(Case(), tmp_path)[1] < 2
