"""Lanes beside the computation: however long things take, numbers and memory are the same."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace

import pytest
import streamed
import torch
from streamed import ALL, PIECE, data_of, job_of, plan_of, resting, trained
from subjects import ROWS

from outsize.memory import Ledger
from outsize.memory.store import MemoryStore
from outsize.plan import Stream
from outsize.plan.plan import per_segment
from outsize.runtime import lanes as lanes_module
from outsize.runtime.lanes import Lanes
from outsize.schedule import Action, Kind, Lane, Schedule, State
from outsize.schedule.residency import Residency
from outsize.trace.trace import Event

DATA = data_of(3)
HOST = {"gradients": "host", "optimizer": "host"}
CASES = {
    "all, layers": ({"order": "layer"}, ALL, {}),
    "all, behind, again": (
        {"order": "layer", "update": "behind", "stages": per_segment(5, ("block",))}, ALL, {},
    ),
    "all, microbatches": ({"microbatch_rows": 2}, ALL, {"resident": 4, "returned": 2}),
    "host": ({"order": "layer"}, {**ALL, **HOST, "parameters": "host"}, {"host": 3}),
    "split, one resident": ({"split_backward": True}, ALL, {"resident": 1, "policy": "lru"}),
}  # fmt: skip


class Slow(MemoryStore):
    """A tier that takes its time, a random one, before and after it has done its work."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__(name, 1 << 26)
        self._random = random.Random(seed)

    def _wait(self) -> None:
        if self._random.random() < 0.15:
            time.sleep(self._random.random() * 2e-3)

    def write(self, place, data, at=0) -> None:
        self._wait()
        super().write(place, data, at)
        self._wait()

    def read(self, place, out, at=0) -> None:
        self._wait()
        super().read(place, out, at)
        self._wait()


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    streamed.small(monkeypatch, 4 * PIECE)


def run(name: str, seed: int | None):
    """A run with random delays (None: the resident twin), and its peaks action by action."""
    changes, rest, stream = CASES[name]
    plan = plan_of(**changes)
    stores = {}
    if seed is not None:
        plan = replace(resting(plan, **rest), stream=Stream(part=4 * PIECE, **stream))
        stores = {key: Slow(key, seed) for key in ("disk", "host")}
    ledger = Ledger()
    job = job_of(plan, stores, clip=None if plan.update == "behind" else 0.5, ledger=ledger)
    outcome = trained(job, DATA, ROWS)
    events = [e for e in job.report.trace.events if e.lane == "compute"]
    return outcome, [(e.kind, e.stage, e.microbatch, e.peak, dict(e.live)) for e in events]


@pytest.mark.parametrize("name", CASES)
def test_delays_change_neither_numbers_nor_memory(name):
    expected, _ = run(name, None)
    runs = [run(name, seed) for seed in range(3)]
    for outcome, peaks in runs:
        assert expected.differences(outcome) == []
        assert peaks == runs[0][1]
    assert streamed.no_lane_runs()


def test_without_waits_delays_would_show(monkeypatch):
    """The test above can fail: with nothing ordered but the lanes, the numbers are others."""
    expected, _ = run("all, layers", None)

    def careless(schedule, worker=0):
        return ((),) * len(schedule.workers[worker])

    monkeypatch.setattr(lanes_module, "waits", careless)
    try:
        different = any(expected.differences(run("all, layers", seed)[0]) for seed in range(3))
    except Exception:  # activations that have not come back, a norm that is no number
        different = True
    assert different


# -- the lanes by themselves -----------------------------------------------------------------------


class Recorder:
    """A player that notes what runs where."""

    def __init__(self, fail_at: int = -1, fault: BaseException | None = None) -> None:
        self.fail_at, self.fault = fail_at, fault
        self.threads: dict[int, str] = {}
        self.order: list[tuple[str, int]] = []

    def _run(self, index: int, action: Action) -> Event:
        self.order.append(("run", index))
        self.threads[index] = threading.current_thread().name
        if index == self.fail_at and self.fault is not None:
            raise self.fault
        return Event(0, action.lane.value, action.label, action.stage, 0, index, index, {}, 0)

    def act(self, index, action, begin):
        return self._run(index, action)

    def prepare(self, index, action):
        self.order.append(("prepare", index))

    def move(self, index, action, begin):
        time.sleep(1e-3)
        return self._run(index, action)

    def settle(self, index, action):
        self.order.append(("settle", index))


def toy() -> Schedule:
    """Two stages whose parameters share a room."""
    rooms = {"parameters 0": (0, 4096), "parameters 1": (0, 4096)}
    residency = Residency(((0,), (1,)), frozenset({0, 1}), spills=frozenset({0}), rooms=rooms)

    def fetch(s):
        return Action(Kind.FETCH, s, lane=Lane.FETCH, state=State.PARAMETERS)

    leaves = Action(Kind.EVICT, 0, 0, Lane.EVICT, state=State.ACTIVATIONS)
    actions = (
        fetch(0), Action(Kind.FORWARD, 0, 0), leaves, fetch(1), Action(Kind.FORWARD, 1, 0),
        Action(Kind.BACKWARD, 1, 0), Action(Kind.NORM),
    )  # fmt: skip
    return Schedule(2, 1, (actions,), residency=residency)


def test_computation_and_memory_stay_in_the_calling_thread():
    player = Recorder()
    events = Lanes(toy(), torch.device("cpu")).play(player, 0.0)
    main = threading.current_thread().name
    assert [player.threads[i] == main for i in range(7)] == [
        False, True, False, False, True, True, True,
    ]  # fmt: skip
    assert len({player.threads[i] for i in (0, 2)}) == 2, "a thread for each lane"
    assert [event.start for event in events] == list(range(7))
    ran = [index for what, index in player.order if what == "run"]
    assert ran.index(0) < ran.index(1) < ran.index(3) < ran.index(4)
    # The activations are let go once they have left, ahead of the second action after.
    assert player.order.index(("run", 2)) < player.order.index(("settle", 2))
    assert player.order.index(("settle", 2)) < player.order.index(("run", 5))
    assert player.order.index(("run", 4)) < player.order.index(("settle", 2))


@pytest.mark.parametrize("fault", [ValueError("one"), KeyboardInterrupt()])
@pytest.mark.parametrize("index", range(7))
def test_a_fault_on_any_lane_ends_all(index, fault):
    player = Recorder(index, fault)
    begin = time.perf_counter()
    with pytest.raises(type(fault)):
        Lanes(toy(), torch.device("cpu")).play(player, 0.0)
    assert streamed.no_lane_runs() and time.perf_counter() - begin < 5
    later = [i for what, i in player.order if what == "run" and i > index + 3]
    assert not later, "nothing that follows it runs"
