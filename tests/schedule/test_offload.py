"""The pass that inserts FETCH and EVICT: what moves when, against rules written down here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import streamed
from streamed import ALL, PIECE, job_of, memory, plan_of, resting

from outsize.plan import Stream
from outsize.plan.plan import per_segment
from outsize.schedule import Action, Kind, Lane, State, prove
from outsize.schedule.item import Item
from outsize.schedule.layout import Placement
from outsize.schedule.residency import moved, overlap

BELOW = {"parameters": "disk", "gradients": "disk", "optimizer": "disk"}
AGAIN = per_segment(5, ("block",))


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    streamed.small(monkeypatch, 4 * PIECE)


def placed(rest: dict[str, str], stream: dict | None = None, **changes) -> Placement:
    plan = resting(plan_of(**{"order": "layer", **changes}), **rest)
    plan = replace(plan, stream=Stream(part=4 * PIECE, **(stream or {})))
    with memory() as stores:
        return job_of(plan, stores, clip=None if plan.update == "behind" else 0.5).placement


def moves(placement: Placement, kind: Kind, state: State) -> list[Action]:
    actions = placement.schedule.workers[0]
    return [a for a in actions if a.kind is kind and a.state is state]


@pytest.mark.parametrize("update", ["apart", "behind"])
def test_the_computation_is_the_plans(update):
    """The pass moves nothing that computes, and drops nothing."""
    placement = placed(ALL, update=update)
    computing = [a for a in placement.schedule.workers[0] if a.lane is Lane.COMPUTE]
    assert computing == list(placement.base.workers[0])
    assert prove(placement.schedule).peaks[0] == 0


@pytest.mark.parametrize("stream", [{}, {"resident": 4}, {"resident": 3, "policy": "lru"}])
@pytest.mark.parametrize("update", ["apart", "behind"])
def test_every_part_of_the_optimizer_states_comes_and_goes_once(update, stream):
    placement = placed(BELOW, stream, update=update)
    parts = sorted((s, p) for s, n in placement.items.residency.parts.items() for p in range(n))
    assert len(parts) > 5
    for kind in (Kind.FETCH, Kind.EVICT):
        found = sorted((a.stage, a.part) for a in moves(placement, kind, State.OPTIMIZER))
        assert found == parts


def test_gradients_are_written_once_and_never_read_but_by_updates():
    placement = placed(BELOW)
    assert [a.stage for a in moves(placement, Kind.EVICT, State.GRADIENTS)] == [4, 3, 2, 1, 0]
    assert not moves(placement, Kind.FETCH, State.GRADIENTS)


def test_gradients_behind_the_backward_pass_never_leave():
    placement = placed(BELOW, update="behind")
    assert not moves(placement, Kind.EVICT, State.GRADIENTS)


@pytest.mark.parametrize("stages", [per_segment(5), AGAIN])
def test_parameters_come_at_most_twice_however_many_microbatches(stages):
    """Forward and back; what is still there when it is needed again is not fetched."""
    counts = set()
    for rows in (1, 3, 7):
        placement = placed({"parameters": "disk", "optimizer": "disk"}, rows=rows, stages=stages)
        found = moves(placement, Kind.FETCH, State.PARAMETERS)
        assert all(sum(a.stage == s for a in found) <= 2 for s in range(5))
        counts.add(len(found))
    assert len(counts) == 1 and counts.pop() < 10


@pytest.mark.parametrize("resident", [1, 2])
def test_as_many_stages_ahead_as_were_asked_for(resident):
    """A stage is asked for when the one `resident - 1` visits before it begins, not earlier."""
    placement = placed({"parameters": "disk"}, {"resident": resident, "policy": "static"})
    actions = placement.schedule.workers[0]
    stages = [a.stage for a in actions if a.lane is Lane.COMPUTE and a.kind is not Kind.NORM]
    starts = [n for n, s in enumerate(stages) if n == 0 or stages[n - 1] != s]
    visit_of = [sum(start <= n for start in starts) - 1 for n in range(len(stages))]
    done, ahead = 0, set()
    for action in actions:
        if action.lane is Lane.COMPUTE:
            done += action.kind is not Kind.NORM
        elif action.kind is Kind.FETCH:
            needed = done + stages[done:].index(action.stage)
            ahead.add(visit_of[needed] - visit_of[done])
    assert ahead and max(ahead) <= resident - 1


@pytest.mark.parametrize("resident", [3, 5])
def test_nothing_moves_where_all_stages_are_resident(resident):
    """Three blocks of three, with the prologue and the epilogue in what they leave over."""
    placement = placed({"parameters": "disk"}, {"resident": resident, "policy": "static"})
    assert placement.schedule.residency.start == {Item(State.PARAMETERS, s) for s in range(5)}
    assert not moves(placement, Kind.FETCH, State.PARAMETERS)


def test_rooms_of_what_is_needed_together_are_apart():
    placement = placed(ALL, {"resident": 3, "returned": 2}, update="behind")
    first = placement.schedule.first
    for action in placement.base.workers[0]:
        needed = list(placement.items.residency.needs(action, first))
        for n, one in enumerate(needed):
            for other in needed[n + 1 :]:
                assert not overlap(placement.rooms[one], placement.rooms[other])


def test_every_move_has_a_room_and_every_room_a_use():
    placement = placed(ALL)
    named = {moved(a) for a in placement.schedule.workers[0] if a.state is not State.ACTIVATIONS
             and a.state}  # fmt: skip
    made = {Item(State.GRADIENTS, s) for s in range(5)}
    assert named | made == set(placement.rooms)
    assert max(o + n for o, n in placement.rooms.values()) == placement.pool


def test_activations_leave_behind_forward_and_come_back_in_time():
    placement = placed({"activations": "disk"})
    actions = placement.schedule.workers[0]
    computing = [a for a in actions if a.lane is Lane.COMPUTE]
    for n, action in enumerate(actions):
        if action.kind is Kind.EVICT:
            before = [a for a in actions[:n] if a.lane is Lane.COMPUTE][-1]
            kind = Kind.LOSS if action.stage == 4 else Kind.FORWARD
            assert before == Action(kind, action.stage, action.microbatch)
    away = {(a.stage, a.microbatch) for a in actions if a.kind is Kind.EVICT}
    assert away == {(a.stage, a.microbatch) for a in actions if a.kind is Kind.FETCH}
    for s in range(5):
        for m in range(3):
            left = computing.index(Action(Kind.LOSS if s == 4 else Kind.FORWARD, s, m))
            back = computing.index(Action(Kind.BACKWARD, s, m))
            assert ((s, m) in away) is (back - left > 3), "what is read at once stays"


def test_an_evaluation_only_reads():
    placement = placed(ALL)
    actions = placement.evaluation(4).workers[0]
    assert {a.kind for a in actions} <= {Kind.FORWARD, Kind.LOSS, Kind.FETCH}
    assert {a.state for a in actions if a.state} == {State.PARAMETERS}
    found = [a.stage for a in actions if a.kind is Kind.FETCH]
    assert sorted(found) == sorted(set(found)), "once for all microbatches"
