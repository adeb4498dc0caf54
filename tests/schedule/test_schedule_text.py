"""The stable text form of schedules."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from schedule_text import read_schedule
from streamed import ALL, job_of, memory, plan_of, resting

from outsize.plan import Plan, Stage
from outsize.plan.plan import per_segment
from outsize.schedule import Action, Kind, Schedule, compile_plan, prove
from outsize.schedule.action import KINDS, WHOLE, State
from outsize.schedule.ends import named
from outsize.schedule.item import Item
from outsize.schedule.residency import Residency
from outsize.schedule.role import Role

INDEX = st.one_of(st.just(WHOLE), st.integers(0, 9))
BYTES = st.tuples(
    st.sampled_from(["device/activations", "host/optimizer", "disk/a-b+c"]),
    st.integers(-(2**50), 2**50),
)
ACTIONS = st.builds(
    Action,
    st.sampled_from([*map(Kind, KINDS.names())]),
    INDEX,
    INDEX,
    allocates=st.lists(BYTES, max_size=3).map(tuple),
    workspace=st.integers(0, 2**50),
    state=st.sampled_from(list(State)),
    part=INDEX,
)
STAGES = st.integers(0, 4)
SETS = st.frozensets(STAGES)
ITEMS = st.builds(
    Item,
    st.sampled_from([State.PARAMETERS, State.GRADIENTS, State.OPTIMIZER]),
    STAGES,
    st.sampled_from([WHOLE, 0, 3]),
)


@st.composite
def residencies(draw):
    rooms = draw(st.dictionaries(ITEMS, st.tuples(st.integers(0, 2**50), st.integers(0, 2**50))))
    return Residency(
        tuple(draw(st.lists(st.lists(STAGES).map(tuple), min_size=5, max_size=5))),
        draw(SETS), draw(SETS), draw(st.dictionaries(STAGES, st.integers(1, 99))),
        draw(st.booleans()), draw(SETS), draw(SETS), rooms,
        frozenset(name for name in rooms if draw(st.booleans())), draw(SETS), draw(SETS),
        *(draw(SETS) for _ in range(4)),
    )  # fmt: skip


SCHEDULES = st.builds(
    Schedule,
    st.just(5),
    st.integers(1, 9),
    st.lists(st.lists(ACTIONS, max_size=5).map(tuple), max_size=4).map(tuple),
    st.frozensets(st.integers(0, 8)),
    st.integers(0, 8),
    st.none() | residencies(),
    st.booleans(),
    st.sampled_from([None, named("vocabulary", 1), named("vocabulary", 2)]),
    st.none() | st.builds(Role, st.frozensets(st.tuples(STAGES, STAGES)), SETS),
)


@given(SCHEDULES)
def test_what_is_written_is_read_back(schedule):
    text = schedule.to_text()
    assert read_schedule(text) == schedule
    assert read_schedule(text).to_text() == text


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
    assert prove(read_schedule(text), static=1000).peaks[0] == 1000 + 120 + 15


def test_a_streamed_schedule_is_read_back_and_proved():
    plan = resting(plan_of(order="layer", update="behind"), **ALL)
    with memory() as stores:
        schedule = job_of(plan, stores, clip=None).schedule
    text = schedule.to_text()
    assert read_schedule(text) == schedule
    assert prove(read_schedule(text)).peaks[0] == prove(schedule).peaks[0]
    lines = text.splitlines()
    assert lines[0].endswith(" workers=1 update=behind")
    assert lines[1] == (
        "residency parameters=0,1,2,3,4 gradients=0,1,2,3,4 own=0,1,2,3,4 spills=0,1,2,3,4"
        " fixed=- hosts=- gathered=- summed=- collected=- merged=- direct=1"
    )
    assert lines[2:7] == [f"uses {s} {s}" for s in range(5)]
    assert lines[7:12] == [f"parts {s} 1" for s in range(5)]
    offset, size = schedule.residency.rooms[Item(State.OPTIMIZER, 3, 0)]
    assert f"room optimizer 3#0 {offset} {size}" in lines
    assert [line for line in lines if line.startswith("start ")] == [
        f"start {name}" for name in sorted(schedule.residency.start)
    ]


def test_stages_per_segment_compile_to_an_action_each():
    schedule = compile_plan(Plan(5, per_segment(5), rows=5, microbatch_rows=2, split_backward=True))
    counts = {kind: 0 for kind in map(Kind, KINDS.names())}
    for action in schedule.workers[0]:
        counts[action.kind] += 1
    assert counts[Kind.FORWARD] == counts[Kind.BACKWARD_INPUT] == counts[Kind.BACKWARD_WEIGHT] == 15
    assert counts[Kind.NORM] == 1 and counts[Kind.UPDATE] == 5 and counts[Kind.BACKWARD] == 0
