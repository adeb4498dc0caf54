"""Replay and composition against figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outsize.hardware import catalogue
from outsize.memory.chunk import ChunkTable, Slot
from outsize.optim.declared import StateSpec
from outsize.plan import Plan, Stage
from outsize.schedule import Kind, State, compile_plan, prove
from outsize.simulate.costs import ActionCost, Costs, Facts
from outsize.simulate.counter import Work
from outsize.simulate.forecast import compose, duration
from outsize.simulate.replay import annotate, kinds_at_peak, play

# Two stages, two microbatches. A forward leaves 100 and 40, a backward takes them away again.
PLAN = Plan(2, (Stage(0, 1), Stage(1, 2)), rows=2)
STATIC = {"parameters": 1000, "optimizer": 2000}


def cost(left: int, workspace: int, flops: float = 0.0) -> ActionCost:
    return ActionCost({"activations": left} if left else {}, workspace, Work(moved=flops))


FACTS = Facts(
    (
        ChunkTable(0, True, (Slot("a", (150,), 0, 0),)),
        ChunkTable(1, True, (Slot("b", (100,), 0, 0),)),
    ),
    ((0,), (1,)),
    (StateSpec("exp_avg"), StateSpec("exp_avg_sq")),
)
COSTS = Costs(
    0,
    {
        (Kind.FORWARD, State.NONE, 0): cost(100, 130),
        (Kind.LOSS, State.NONE, 1): cost(40, 60),
        (Kind.BACKWARD, State.NONE, 1): cost(-40, 25),
        (Kind.BACKWARD, State.NONE, 0): cost(-100, 10),
        (Kind.UPDATE, State.NONE, 0): cost(0, 7),
        (Kind.UPDATE, State.NONE, 1): cost(0, 900),
    },
    ("prologue", "epilogue"),
    FACTS,
)


def test_bytes_and_times_add_up_action_by_action():
    schedule = annotate(compile_plan(PLAN), COSTS)
    trace = play(schedule, STATIC, lambda _, a: 2.0 if a.kind.way == "forward" else 1.0)
    one = [3130, 3160, 3165, 3110]  # 3000 + 130; + 100 + 60; + 140 + 25; + 100 + 10
    assert [e.peak for e in trace.events] == [*one, *one, 3000, 3007, 3900]
    assert [e.live.get("device/activations", 0) for e in trace.events] == [
        100, 140, 100, 0, 100, 140, 100, 0, 0, 0, 0,
    ]  # fmt: skip
    assert [e.end for e in trace.events] == [2, 4, 5, 6, 8, 10, 11, 12, 13, 14, 15]
    assert trace.span() == 15 and trace.source == "predicted"
    assert trace.peak() == prove(schedule, static=3000).peaks[0] == 3900


def test_the_peak_by_kind_adds_up_to_the_peak():
    made = compose(PLAN, COSTS, catalogue("H200"))
    assert made.peak == 4900  # gradients are held too, as large as the parameters
    kinds = {kind: count for kind, count in made.peak_by_kind.items() if count}
    assert kinds == {"parameters": 1000, "gradients": 1000, "optimizer": 2000, "workspace": 900}
    assert dict(made.segments)["prologue"] == {
        "parameters": 600, "gradients": 600, "optimizer": 1200, "activations": 100,
        "workspace": 130,
    }  # fmt: skip


def test_a_peak_in_the_first_action_stands_on_what_is_always_there():
    high = {**COSTS.actions, (Kind.FORWARD, State.NONE, 0): cost(100, 5000)}
    schedule = annotate(compile_plan(PLAN), replace(COSTS, actions=high))
    trace = play(schedule, STATIC, lambda _, a: 1.0)
    assert kinds_at_peak(trace, STATIC) == {**STATIC, "workspace": 5000}


def test_times_follow_from_the_devices_rates():
    (device,) = catalogue("H200").devices
    work = Work(products={(64, 32, 16, "bfloat16"): 3}, moved=1e6, calls=9)
    expected = 3 * 2 * 64 * 32 * 16 / device.peak["bf16"].value + 1e6 / device.bandwidth.value
    assert duration(work, device) == pytest.approx(expected, rel=1e-12)
    assert work.flops() == 3 * 2 * 64 * 32 * 16
