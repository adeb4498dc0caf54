"""A worker that waits for one that is dead, stopped, late or has aborted."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import collective_tasks as tasks
import pytest
from crew import WorkerGroup

from outsize.collectives import Mesh

KILLED, STOPPED = 2, 1
FOREVER = 3600.0  # seconds; longer than anybody's patience
HOSTS = {"Shared": (), "C10d": ("a", "b", "c")}


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[WorkerGroup]:
    crew = WorkerGroup.of(Mesh(3), str(tmp_path / "store"))
    yield crew
    crew.end()


@pytest.mark.parametrize("kind", HOSTS)
def test_a_killed_worker_is_named(crew: WorkerGroup, kind: str) -> None:
    crew.run(tasks.kind, hosts=HOSTS[kind])
    crew.start(tasks.wait_for, KILLED, FOREVER, hosts=HOSTS[kind])
    crew.processes[KILLED].kill()
    answers = [crew.answer(rank) for rank in range(3) if rank != KILLED]
    for good, text in answers:
        assert not good and text.startswith("OutsizeError: rank ")
        assert "all_reduce" in text and "with ranks [0, 1, 2] waited for" in text
    if kind == "Shared":  # gloo says that a connection is gone, not whose
        assert all(f"waited for rank {KILLED}, whose process has ended" in t for _, t in answers)


def test_a_stopped_worker_is_named(crew: WorkerGroup) -> None:
    crew.run(tasks.kind)
    crew.start(tasks.wait_for, STOPPED, FOREVER)
    os.kill(crew.processes[STOPPED].pid, signal.SIGSTOP)
    pid = crew.processes[STOPPED].pid
    for rank in (0, 2):
        good, text = crew.answer(rank)
        assert not good and f"waited for rank {STOPPED}, whose process {pid} is stopped" in text


@pytest.mark.parametrize("kind", HOSTS)
def test_an_abort_ends_the_waiting(crew: WorkerGroup, kind: str) -> None:
    crew.run(tasks.kind, hosts=HOSTS[kind])
    crew.start(tasks.abort, 1, hosts=HOSTS[kind])
    assert crew.answer(1)[0]
    for rank in (0, 2):
        good, text = crew.answer(rank)
        assert not good and "barrier" in text and "waited for rank" in text
        assert kind == "C10d" or "another worker aborted the run" in text


def test_signals_are_handled_while_a_worker_waits(crew: WorkerGroup, tmp_path: Path) -> None:
    assert crew.run(tasks.interrupted, str(tmp_path / "handled"))[1]


def test_who_comes_late_is_waited_for(crew: WorkerGroup) -> None:
    crew.run(tasks.wait_for, 0, 1.5)


def test_what_everybody_does_can_be_read(crew: WorkerGroup) -> None:
    crew.run(tasks.kind)
    states = crew.run(tasks.states_of_a_wait)[0]
    waits = {(s.rank, s.operation, s.calls, s.waits_for) for s in states}
    assert waits == {(0, "barrier", 1, None), (1, "broadcast", 2, 0), (2, "broadcast", 2, 0)}
