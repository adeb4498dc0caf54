"""The stable text form of schedules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.errors import OutsizeError
from outsize.plan import Plan, Stage
from outsize.plan.plan import per_segment
from outsize.schedule import Action, Kind, Schedule, compile_plan, validate
from outsize.schedule.action import WHOLE, State

INDEX = st.one_of(st.just(WHOLE), st.integers(0, 9))
BYTES = st.tuples(
    st.sampled_from(["device/activations", "host/optimizer", "disk/a-b+c"]),
    st.integers(-(2**50), 2**50),
)
ACTIONS = st.builds(
    Action,
    st.sampled_from(list(Kind)),
    INDEX,
    INDEX,
    allocates=st.lists(BYTES, max_size=3).map(tuple),
    workspace=st.integers(0, 2**50),
    state=st.sampled_from(list(State)),
    part=INDEX,
)
SCHEDULES = st.builds(
    Schedule,
    st.integers(1, 9),
    st.integers(1, 9),
    st.lists(st.lists(ACTIONS, max_size=5).map(tuple), max_size=4).map(tuple),
    st.frozensets(st.integers(0, 8)),
    st.integers(0, 8),
)


@given(SCHEDULES)
def test_what_is_written_is_read_back(schedule):
    text = schedule.to_text()
    assert Schedule.from_text(text) == schedule
    assert Schedule.from_text(text).to_text() == text


def test_the_form_is_what_the_documentation_says():
    plan = Plan(4, (Stage(0, 1), Stage(1, 3, ("block",)), Stage(3, 4)), rows=2)
    schedule = compile_plan(plan)
    lines = schedule.to_text().splitlines()
    assert lines[0] == "schedule stages=3 microbatches=2 recompute=1 first=0 workers=1"
    assert lines[1:8] == [
        "0 FORWARD 0 0 compute",
        "0 FORWARD 1 0 compute",
        "0 FORWARD 2 0 compute",
        "0 BACKWARD 2 0 compute",
        "0 RECOMPUTE 1 0 compute",
        "0 BACKWARD 1 0 compute",
        "0 BACKWARD 0 0 compute",
    ]
    assert lines[15:] == ["0 NORM * * compute", *(f"0 UPDATE {s} * compute" for s in range(3))]
    written = Action(Kind.FORWARD, 1, 0, allocates=(("device/activations", 1024),), workspace=2048)
    assert str(written) == "FORWARD 1 0 compute device/activations+1024 workspace=2048"


def test_a_text_written_by_hand_is_read_and_proved():
    text = """schedule stages=2 microbatches=1 recompute=- first=1 workers=1
0 FORWARD 0 0 compute device/activations+100 workspace=130
0 FORWARD 1 0 compute device/activations+20

0 BACKWARD 1 0 compute device/activations-120 workspace=15
0 NORM * * compute
0 UPDATE 1 * compute
"""
    assert validate(Schedule.from_text(text), static=1000) == 1000 + 120 + 15


HEAD = "schedule stages=2 microbatches=1 recompute=- first=0 workers=1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: ''; expected 'schedule stages="),
        ("schedule stages=two microbatches=1 recompute=- first=0 workers=1", "line 1"),
        ("schedule stages=2 microbatches=1 recompute=a first=0 workers=1", "line 1"),
        ("schedule stages=2 microbatches=1", "line 1"),
        (HEAD + "0 FORWRD 0 0 compute", "line 2: kind 'FORWRD'; did you mean 'FORWARD'"),
        (HEAD + "\n0 FORWARD 0 0 nowhere", "line 3: .*nowhere"),
        (HEAD + "0 FORWARD 0", "line 2: '0 FORWARD 0' is not 'worker KIND stage"),
        (HEAD + "0 FORWARD x 0 compute", "line 2"),
        (HEAD + "1 FORWARD 0 0 compute", "line 2: worker is 1; expected 0 to 0"),
        (HEAD + "0 FORWARD 0 0 compute device/activations", "has no signed number of bytes"),
        (HEAD + "0 FORWARD 0 0 compute device/activations5", "has no signed number of bytes"),
        (HEAD + "0 FORWARD 0 0 compute workspace=much", "line 2"),
    ],
)
def test_what_is_not_the_form_is_refused_with_its_line(text, message):
    with pytest.raises(OutsizeError, match=message) as caught:
        Schedule.from_text(text)
    assert "\n" not in str(caught.value)


def test_stages_per_segment_compile_to_an_action_each():
    schedule = compile_plan(Plan(5, per_segment(5), rows=5, microbatch_rows=2, split_backward=True))
    counts = {kind: 0 for kind in Kind}
    for action in schedule.workers[0]:
        counts[action.kind] += 1
    assert counts[Kind.FORWARD] == counts[Kind.BACKWARD_INPUT] == counts[Kind.BACKWARD_WEIGHT] == 15
    assert counts[Kind.NORM] == 1 and counts[Kind.UPDATE] == 5 and counts[Kind.BACKWARD] == 0
