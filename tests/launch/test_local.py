"""Workers of one machine: how a run ends when one of them does not do well."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked import run_and_leave_nothing, until

from outsize.collectives import Mesh, everyone
from outsize.errors import OutsizeError
from outsize.launch import Mailbox, Speaker, enter, fingerprint, run_here, watchdog
from outsize.launch.board import read

WORKERS = 3


def waits(post: Mailbox, rank: int) -> bool:
    """Whether a worker is in the second sum."""
    spot = read(post.pulse.memory, rank).waits  # type: ignore[attr-defined]
    return spot is not None and spot.action == "FORWARD 1 0"


def working(fault: Callable[[Mailbox], None]) -> Callable[[Mailbox], int]:
    """Three sums over all workers; `fault` comes over rank 1 before the second, for which the
    others wait by then."""

    def work(post: Mailbox) -> int:
        crew = enter(post, Mesh(data=WORKERS), {})
        print(f"worker {post.rank} is here")
        crew.pulse.during("step 7")
        for i in range(3):
            crew.pulse.at(f"FORWARD {i} 0")
            if post.rank == 1 and i == 1:
                assert until(lambda: all(waits(post, rank) for rank in (0, 2)))
                fault(post)
            try:
                everyone(crew.world).all_reduce(torch.ones(1000))
            except OutsizeError as error:
                print(f"told: {error}")
                raise
        return 0

    return work


def test_workers_sum_and_agree_on_an_exit_code(tmp_path: Path) -> None:
    def work(post: Mailbox) -> int:
        crew = enter(post, Mesh(data=WORKERS), {})
        mine = torch.tensor([post.rank + 1.0])
        assert everyone(crew.world).all_reduce(mine).item() == 6.0
        assert crew.told("colour", lambda: f"blue, says {post.rank}") == "blue, says 0"
        return 143

    assert run_and_leave_nothing(WORKERS, work, tmp_path) == 143


def raising(post: Mailbox) -> None:
    raise RuntimeError("no bananas")


def refusing(post: Mailbox) -> None:
    raise OutsizeError("bananas: 0;\nexpected 1 or more")


def killed(post: Mailbox) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leaving(post: Mailbox) -> None:
    os._exit(0)


def stopped(post: Mailbox) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hanging(post: Mailbox) -> None:
    time.sleep(1000)


WHERE = "in step 7, FORWARD 1 0"
WAITING = "waiting: ranks 0, 2 in all_reduce with ranks 0, 1, 2 of FORWARD 1 0"
FAULTS = [
    (raising, 1, ["RuntimeError: no bananas\nerror: rank 1 failed", WHERE, WAITING]),
    (refusing, 2, ["error: rank 1: bananas: 0; expected 1 or more\n"]),
    (killed, 137, [f"error: rank 1 ({WHERE}) was killed by SIGKILL", WAITING]),
    (leaving, 1, [f"error: rank 1 ({WHERE}) ended without a word", WAITING]),
    (stopped, 1, [f"error: rank 1 ({WHERE}) is stopped (SIGSTOP)", WAITING]),
    (hanging, 1, [f"error: rank 1 ({WHERE}) hangs: nothing done for", WAITING]),
]


@pytest.mark.parametrize(("fault", "code", "words"), FAULTS, ids=lambda v: str(v)[:20])
def test_a_fault_ends_the_run_and_names_the_worker(fault, code, words, tmp_path, capfd) -> None:
    """One that speaks has its time to say so."""
    speaker = Speaker(0, 60.0) if fault in (raising, stopped) else Speaker()
    found = run_and_leave_nothing(WORKERS, working(fault), tmp_path, speaker)
    out, err = capfd.readouterr()
    assert found == code, err
    for word in words:
        assert word in err
    begin = "Traceback" if fault is raising else "error: rank 1"
    assert err.startswith(begin) and err.count("Traceback") == (fault is raising)
    first, *more = out.splitlines()
    assert first == "worker 0 is here" and len(more) == bool(speaker.farewell)
    assert all(one.startswith("told: rank 0: all_reduce") for one in more)
    assert ("worker 1 is here" in err) == (fault is not refusing)
    assert "worker 2" not in err


def test_a_worker_that_computes_for_long_is_no_culprit(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(watchdog, "PATIENCE", 1.0)

    def busy(post: Mailbox) -> None:
        over = time.process_time() + 1.5
        while time.process_time() < over:
            pass

    assert run_and_leave_nothing(WORKERS, working(busy), tmp_path) == 0


def test_the_sources_are_hashed_before_workers_are_forked(tmp_path) -> None:
    fingerprint.code.cache_clear()
    known = fingerprint.code.cache_info
    assert run_and_leave_nothing(1, lambda post: 0 if known().currsize else 7, tmp_path) == 0


def test_what_follows_from_a_fault_is_not_reported(tmp_path, capfd) -> None:
    """Rank 2 raises because of rank 1, and is quicker with it."""
    first = tmp_path / "first"

    def work(post: Mailbox) -> int:
        if post.rank == 2:
            post.pulse.wait("all_reduce")
            first.touch()
            raise OutsizeError("rank 1 does not answer")
        if post.rank == 1:
            assert until(first.exists)
            time.sleep(0.5)
            raise RuntimeError("the reason")
        time.sleep(1000)
        return 0

    assert run_and_leave_nothing(WORKERS, work, tmp_path) == 1
    err = capfd.readouterr().err
    assert "the reason" in err and "does not answer" not in err


def test_other_workers_print_into_the_directory_of_the_run(tmp_path, capfd) -> None:
    def work(post: Mailbox) -> int:
        print(f"before {post.rank}")
        post.output(tmp_path / "run")
        print(f"after {post.rank}", flush=True)
        os.system("echo from a process")
        return 0

    assert run_here(2, work) == 0
    assert capfd.readouterr().out.splitlines() == ["before 0", "after 0", "from a process"]
    log = (tmp_path / "run" / "workers" / "rank-1.log").read_text()
    assert log.splitlines() == ["before 1", "after 1", "from a process"]
    assert not (tmp_path / "run" / "workers" / "rank-0.log").exists()


def test_a_signal_reaches_all_workers(tmp_path) -> None:
    def work(post: Mailbox) -> int:
        got: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
        (tmp_path / f"ready-{post.rank}").touch()
        if post.rank == 0:
            while len(list(tmp_path.glob("ready-*"))) < WORKERS:
                time.sleep(0.01)
            os.kill(os.getppid(), signal.SIGTERM)
        while not got:
            time.sleep(0.01)
        return 128 + got[0]

    assert run_and_leave_nothing(WORKERS, work, tmp_path) == 143
