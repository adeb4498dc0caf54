"""Lists that plans compile to, as their actions print themselves."""

from __future__ import annotations

from collections import Counter

from outsize.plan import Plan, Stage
from outsize.plan.plan import per_segment
from outsize.schedule import Action, Kind, compile_plan


def test_a_step_goes_forward_and_back_and_then_updates():
    plan = Plan(4, (Stage(0, 1), Stage(1, 3, ("block",)), Stage(3, 4)), rows=2)
    (actions,) = compile_plan(plan).workers
    lines = list(map(str, actions))
    assert lines[:7] == [
        "FORWARD 0 0 compute",
        "FORWARD 1 0 compute",
        "LOSS 2 0 compute",
        "BACKWARD 2 0 compute",
        "RECOMPUTE 1 0 compute",
        "BACKWARD 1 0 compute",
        "BACKWARD 0 0 compute",
    ]
    assert lines[14:] == ["NORM * * compute", *(f"UPDATE {s} * compute" for s in range(3))]
    written = Action(Kind.FORWARD, 1, 0, allocates=(("device/activations", 1024),), workspace=2048)
    assert str(written) == "FORWARD 1 0 compute device/activations+1024 workspace=2048"


def test_stages_per_segment_compile_to_an_action_each():
    schedule = compile_plan(Plan(5, per_segment(5), rows=5, microbatch_rows=2, split_backward=True))
    counts = Counter(action.kind for action in schedule.workers[0])
    assert counts[Kind.BACKWARD_INPUT] == counts[Kind.BACKWARD_WEIGHT] == 15
    assert counts[Kind.FORWARD] == 12 and counts[Kind.LOSS] == 3
    assert counts[Kind.NORM] == 1 and counts[Kind.UPDATE] == 5 and counts[Kind.BACKWARD] == 0
