"""`outsize train --workers`: the ends of a run. Numbers: tests/cli/test_vocabulary_pipeline.py."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from forked import until
from run_files import wait_for_step

from outsize.data import Batch, TrainStream
from outsize.data.batch import Span
from outsize.launch.activity import GONE, activity
from outsize.train import run as runs
from outsize.train.metrics import read_metrics


def started(invoke, *words: object) -> int:
    """The process of a run that has begun."""
    pid = os.fork()
    if pid == 0:
        os._exit(invoke("train", "run.yaml", "--set", "train.steps=100000", *words).exit_code)
    return pid


def workers_of(launcher: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


def gone(pids: list[int]) -> bool:
    return all(activity(pid).state == GONE for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_all(number, home, invoke) -> None:
    launcher = started(invoke, "--workers", 2)
    wait_for_step(home / "run", 2)
    workers = workers_of(launcher)
    os.kill(launcher, number)
    _, status = os.waitpid(launcher, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + number
    assert len(workers) == 2 and gone(workers)
    last = [r["step"] for r in read_metrics(home / "run") if "loss" in r][-1]
    assert (home / "run" / "latest").read_text() == f"step-{last:08d}\n"


def test_workers_end_with_their_launcher(home, invoke) -> None:
    launcher = started(invoke, "--workers", 2)
    wait_for_step(home / "run", 1)
    workers = workers_of(launcher)
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    assert len(workers) == 2 and until(lambda: gone(workers))


def test_a_worker_that_hangs_while_it_reads_data_is_named(home, invoke, monkeypatch) -> None:
    """It takes the real patience of the watcher."""
    follow, batch, others = runs.follow, TrainStream.batch, []

    def noted(*words: object) -> int:
        others.append(os.getpid())
        return follow(*words)

    def hanging(stream: TrainStream, step: int, own: Span | None = None) -> Batch:
        if others and step == 2:
            time.sleep(1000)
        return batch(stream, step, own)

    monkeypatch.setattr(runs, "follow", noted)
    monkeypatch.setattr(TrainStream, "batch", hanging)
    result = invoke("train", "run.yaml", "--set", "train.steps=100", "--workers", 2)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: rank 1 (in step 3, reading a batch) hangs: nothing")
    assert "waiting: rank 0 in" in result.stderr


def test_an_error_of_the_run_is_one_line(home, invoke, capfd) -> None:
    result = invoke("train", "run.yaml", "--workers", 2, "--set", "data=nowhere")
    assert result.exit_code == 2 and not (home / "run").exists()
    assert result.stderr.count("\n") == 1 and "nowhere" in result.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("--workers", 4, "--mesh", "data=2,tensor=3"),
            "mesh data=2,tensor=3 has 6 workers, and there are 4; expected for instance"
            " data=2,tensor=2, or 6 workers",
        ),
        (("--workers", 6, "--mesh", "tensor=4"), "expected for instance tensor=6"),
        (("--mesh", "date=2"), "mesh: axis 'date'; did you mean 'data'?"),
        (("--mesh", "data=two"), "mesh: 'data=two' in 'data=two'; expected each axis once"),
        (("--workers", 0), "workers: 0; expected at least 1"),
        (("--workers", 10**9), "workers is 1000000000; expected at most 4096 on one machine"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(words, expected, home, invoke) -> None:
    result = invoke("train", "run.yaml", *words)
    assert result.exit_code == 2 and not (home / "run").exists()
    assert result.stderr.startswith("error: ") and expected in result.stderr
