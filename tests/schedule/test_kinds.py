"""Kinds of actions are declared: a technique's own are placed and proved with no word elsewhere."""

from __future__ import annotations

import copy
import pickle

import pytest

from outsize.errors import OutsizeError
from outsize.plan import Plan
from outsize.plan.plan import per_segment
from outsize.schedule import Action, Kind, Schedule, State, compile_plan, prove
from outsize.schedule.action import KINDS
from outsize.schedule.ends import Ends
from outsize.schedule.passes.ends import alone
from outsize.schedule.waits import waits


def test_a_kind_is_one_object_wherever_it_goes():
    for kind in map(Kind, KINDS.names()):
        assert pickle.loads(pickle.dumps(kind)) is copy.deepcopy(kind) is kind == str(kind)
    with pytest.raises(OutsizeError, match="'FORWRAD' is not known; did you mean 'FORWARD'"):
        Kind("FORWRAD")
    with pytest.raises(OutsizeError, match="'FORWARD' is registered twice"):
        Kind.add("FORWARD")


@pytest.fixture
def toy():
    """A technique whose last layer has one pass: what it sums is the gradient of its input."""
    made = [Kind.add("TOY", "own", end="first"), Kind.add("TOY_LAST", "own", True, "last"),
            Kind.add("TOY_BACK", "own", True, "first")]  # fmt: skip
    first, last, back = made
    yield Ends(
        "toy", 1, tuple(made), {first: State.ACTIVATIONS, last: State.GRADIENTS}, {},
        State.ACTIVATIONS, State.GRADIENTS,
        {last: State.ACTIVATIONS, back: State.GRADIENTS}, {}, (last, last),
    )  # fmt: skip
    for kind in made:
        del KINDS._entries[kind]


def refusal(schedule: Schedule, actions: list[Action]) -> str:
    try:
        prove(
            Schedule(schedule.stages, schedule.microbatches, (tuple(actions),), ends=schedule.ends)
        )
    except OutsizeError as error:
        return str(error)
    return ""


def test_passes_that_a_technique_declares_are_placed_and_proved(toy):
    plain = compile_plan(Plan(3, per_segment(3), 4, 2, 8))
    made = alone(plain, 2, toy)
    actions = list(made.workers[0])
    assert not refusal(made, actions)
    mine = [i for i, a in enumerate(actions) if a.kind.end or a.kind is Kind.EXCHANGE]
    assert len(mine) == 2 * (3 + 2), "three passes and two sums of each microbatch"
    for place in mine:
        assert refusal(made, actions[:place] + actions[place + 1 :]), f"without {actions[place]}"
    before = waits(made)
    for place, action in enumerate(actions):
        if action.kind is Kind.BACKWARD and action.stage == 2:
            summed = actions[before[place][0]]
            assert summed.kind is Kind.EXCHANGE and summed.state is State.GRADIENTS
    assert "cut over all workers" in refusal(
        compile_plan(Plan(3, per_segment(3), 4, 2, 8)), actions
    )
