"""A worker that waits for one that is dead, stopped, late or has aborted."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import collective_tasks as tasks
import pytest
from crew import WorkerGroup

KILLED, STOPPED = 2, 1
HOSTS = {"Shared": (), "C10d": ("a", "b", "c")}


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[WorkerGroup]:
    crew = WorkerGroup.of(3, str(tmp_path / "store"))
    yield crew
    crew.end()


@pytest.mark.parametrize("kind", HOSTS)
def test_a_killed_worker_is_named_within_two_seconds(crew: WorkerGroup, kind: str) -> None:
    crew.run(tasks.kind, hosts=HOSTS[kind])
    crew.start(tasks.wait_for, KILLED, 60.0, hosts=HOSTS[kind])
    time.sleep(0.3)  # the others wait by now
    crew.processes[KILLED].kill()
    killed = time.monotonic()
    answers = [crew.answer(rank, 5.0) for rank in range(3) if rank != KILLED]
    assert time.monotonic() - killed < 2.0
    for good, text in answers:
        assert not good and text.startswith("OutsizeError: rank ")
        assert "all_reduce" in text and "with ranks [0, 1, 2] waited for" in text
    if kind == "Shared":  # gloo says that a connection is gone, not whose
        assert all(f"waited for rank {KILLED}, whose process has ended" in t for _, t in answers)


def test_a_stopped_worker_is_named_in_seconds(crew: WorkerGroup) -> None:
    crew.run(tasks.kind)
    crew.start(tasks.wait_for, STOPPED, 60.0)
    time.sleep(0.3)
    os.kill(crew.processes[STOPPED].pid, signal.SIGSTOP)
    pid = crew.processes[STOPPED].pid
    for rank in (0, 2):
        good, text = crew.answer(rank, 9.0)
        assert not good and f"waited for rank {STOPPED}, whose process {pid} is stopped" in text


@pytest.mark.parametrize("kind", HOSTS)
def test_an_abort_ends_the_waiting_at_once(crew: WorkerGroup, kind: str) -> None:
    crew.run(tasks.kind, hosts=HOSTS[kind])
    crew.start(tasks.abort, 1, hosts=HOSTS[kind])
    assert crew.answer(1, 5.0)[0]
    came = time.monotonic()
    for rank in (0, 2):
        good, text = crew.answer(rank, 5.0)
        assert not good and "barrier" in text and "waited for rank" in text
        assert kind == "C10d" or "another worker aborted the run" in text
    assert time.monotonic() - came < 1.0


def test_signals_are_handled_while_a_worker_waits(crew: WorkerGroup) -> None:
    assert crew.run(tasks.interrupted)[0] == "handled while waiting"


def test_who_comes_late_is_waited_for(crew: WorkerGroup) -> None:
    crew.run(tasks.wait_for, 0, 1.5)


def test_what_everybody_does_can_be_read(crew: WorkerGroup) -> None:
    crew.run(tasks.kind)
    states = crew.run(tasks.states_of_a_wait)[0]
    waits = {(s.rank, s.operation, s.calls, s.waits_for) for s in states}
    assert waits == {(0, "barrier", 1, None), (1, "broadcast", 2, 0), (2, "broadcast", 2, 0)}
