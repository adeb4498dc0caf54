"""Lanes beside the computation: however long things take, numbers and memory are the same."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from functools import partial

import pytest
import streamed
import torch
from engines import no_lane_runs
from streamed import ALL, PIECE, data_of, job_of, plan_of, resting, trained
from subjects import ROWS

from outsize.memory import Ledger
from outsize.memory.store import MemoryStore
from outsize.plan import Stream
from outsize.plan.plan import per_segment
from outsize.runtime import engine as engine_module
from outsize.runtime.engine import Deed, Engine, Loaded
from outsize.runtime.points import Points
from outsize.runtime.watch import Watch
from outsize.schedule import Action, Kind, Lane, Schedule, State
from outsize.schedule.item import Item
from outsize.schedule.residency import Residency

DATA = data_of(2)
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
    runs = [run(name, seed) for seed in range(2)]
    for outcome, peaks in runs:
        assert expected.differences(outcome) == []
        assert peaks == runs[0][1]
    assert no_lane_runs()


def test_without_waits_delays_would_show(monkeypatch):
    """The test above can fail: with nothing ordered but the lanes, the numbers are others."""
    expected, _ = run("all, layers", None)

    def careless(schedule, worker=0):
        return ((),) * len(schedule.workers[worker])

    monkeypatch.setattr(engine_module, "waits", careless)
    try:
        different = any(expected.differences(run("all, layers", seed)[0]) for seed in range(3))
    except Exception:  # activations that have not come back, a norm that is no number
        different = True
    assert different


# -- the lanes by themselves -----------------------------------------------------------------------


class Recorder:
    """Carries out every kind of action of the toy: it notes what runs where."""

    kinds = (Kind.FETCH, Kind.EVICT, Kind.FORWARD, Kind.LOSS, Kind.BACKWARD, Kind.NORM)

    def __init__(self, fail_at: int = -1, fault: BaseException | None = None) -> None:
        self.fail_at, self.fault, self.resets = fail_at, fault, 0
        self.threads: dict[int, str] = {}
        self.order: list[tuple[str, int]] = []

    def _run(self, index: int, lane: Lane) -> None:
        if lane is not Lane.COMPUTE:
            time.sleep(1e-3)
        self.order.append(("run", index))
        self.threads[index] = threading.current_thread().name
        if index == self.fail_at and self.fault is not None:
            raise self.fault

    def bind(self, action, index, points) -> Deed:
        def note(what):
            return lambda: self.order.append((what, index))

        run = partial(self._run, index, action.lane)
        return Deed(run, note("prepare"), note("settle"))

    def begin(self, points) -> None:
        pass

    def reset(self) -> None:
        self.resets += 1


def engine_of(recorder: Recorder) -> tuple[Engine, Loaded]:
    engine, schedule = Engine([recorder], torch.device("cpu"), Watch()), toy()
    return engine, engine.load(schedule, Points(schedule, ((0,), (1,))))


def toy() -> Schedule:
    """Two stages whose parameters share a room."""
    rooms = {Item(State.PARAMETERS, s): (0, 4096) for s in range(2)}
    residency = Residency(((0,), (1,)), frozenset({0, 1}), spills=frozenset({0}), rooms=rooms)

    def fetch(s):
        return Action(Kind.FETCH, s, lane=Lane.FETCH, state=State.PARAMETERS)

    leaves = Action(Kind.EVICT, 0, 0, Lane.EVICT, state=State.ACTIVATIONS)
    actions = (
        fetch(0), Action(Kind.FORWARD, 0, 0), leaves, fetch(1), Action(Kind.LOSS, 1, 0),
        Action(Kind.BACKWARD, 1, 0), Action(Kind.NORM),
    )  # fmt: skip
    return Schedule(2, 1, (actions,), residency=residency)


def test_computation_and_memory_stay_in_the_calling_thread():
    player = Recorder()
    engine, loaded = engine_of(player)
    ran = engine.play(loaded, time.perf_counter())
    main = threading.current_thread().name
    assert [player.threads[i] == main for i in range(7)] == [
        False, True, False, False, True, True, True,
    ]  # fmt: skip
    assert len({player.threads[i] for i in (0, 2)}) == 2, "a thread for each lane"
    assert sorted(ran, key=lambda one: one.start) == ran and len(ran) == 7
    order = [index for what, index in player.order if what == "run"]
    assert order.index(0) < order.index(1) < order.index(3) < order.index(4)
    # The activations are let go once they have left, ahead of the second action after.
    assert player.order.index(("run", 2)) < player.order.index(("settle", 2))
    assert player.order.index(("settle", 2)) < player.order.index(("run", 5))
    assert player.order.index(("run", 4)) < player.order.index(("settle", 2))


@pytest.mark.parametrize("fault", [ValueError("one"), KeyboardInterrupt()])
@pytest.mark.parametrize("index", range(7))
def test_a_fault_on_any_lane_ends_all(index, fault):
    player = Recorder(index, fault)
    engine, loaded = engine_of(player)
    with pytest.raises(type(fault)):
        engine.play(loaded, 0.0)
    assert player.resets == 1
    assert no_lane_runs()
    later = [i for what, i in player.order if what == "run" and i > index + 3]
    assert not later, "nothing that follows it runs"


def lanes() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("lane ")}


def test_lanes_live_as_long_as_the_engine():
    """Three plays, one of which fails, use the same threads; closing ends them."""
    player, others = Recorder(), lanes()
    engine, loaded = engine_of(player)
    engine.play(loaded, 0.0)
    mine = lanes() - others
    player.fail_at, player.fault = 1, ValueError("once")
    with pytest.raises(ValueError, match="once"):
        engine.play(loaded, 0.0)
    player.fail_at = -1
    engine.play(loaded, 0.0)
    assert lanes() - others == mine and len(mine) == 2
    engine.close()
    for thread in mine:
        thread.join(600)
    assert lanes() <= others
