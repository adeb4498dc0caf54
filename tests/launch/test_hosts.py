"""Workers that something else has started, as torchrun does: forked here, as if on two machines."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forked import until
from torch.distributed import HashStore
from torchrun import free_port

from outsize.collectives import Mesh, everyone
from outsize.errors import OutsizeError
from outsize.launch import Mailbox, enter, hosts, run_there, watchdog
from outsize.launch.activity import STOPPED, activity
from outsize.launch.board import Board, memory, read
from outsize.launch.capture import Capture
from outsize.launch.hosts import Message, word

WORKERS = 3


def environment(rank: int, port: int, count: int = WORKERS) -> dict[str, str]:
    """Ranks 0 and 1 on machine 0, rank 2 on machine 1."""
    here = {
        "RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank % 2, "GROUP_RANK": rank // 2,
        "LOCAL_WORLD_SIZE": 2 - rank // 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    return {name: str(value) for name, value in here.items()}


def run_all(work: Callable[[Mailbox], int], home: Path) -> list[tuple[int, str]]:
    """(exit code, standard error) of each worker, which all end by themselves."""
    port, pids = free_port(), []
    for rank in range(WORKERS):
        pid = os.fork()
        if pid == 0:
            _life(rank, port, work, home)
        pids.append(pid)
    codes: dict[int, int] = {}

    def ended() -> bool:
        for rank, pid in enumerate(pids):
            gone, status = (0, 0) if rank in codes else os.waitpid(pid, os.WNOHANG)
            if gone:
                codes[rank] = os.waitstatus_to_exitcode(status)
        if len(codes) == WORKERS - 1:  # stopped, alone on its machine: torchrun's agent ends it
            (last,) = {*range(WORKERS)} - {*codes}
            if activity(pids[last]).state == STOPPED:
                os.kill(pids[last], signal.SIGKILL)
        return len(codes) == WORKERS

    until(ended)
    for rank in {*range(WORKERS)} - {*codes}:
        os.kill(pids[rank], signal.SIGKILL)
    return [(codes[rank], (home / f"err-{rank}").read_text()) for rank in range(WORKERS)]


def _life(rank: int, port: int, work: Callable[[Mailbox], int], home: Path) -> None:
    code = 99
    try:
        for number, name in ((1, "out"), (2, "err")):
            file = os.open(home / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT)
            os.dup2(file, number)
        run_there(work, environment(rank, port))
    except OutsizeError as error:
        os.write(2, f"error: {error}\n".encode())
        code = 2
    finally:
        os._exit(code)


def said(post: Mailbox, rank: int) -> bool:
    """Whether a worker's word that it is in the third sum is in the store."""
    key = f"word/{rank}"
    if not post.store.check([key]):
        return False
    word = Message.from_json(post.store.get(key).decode())
    return bool(word.place.spots) and word.place.spots[0].action == "FORWARD 2 0"


def working(fault: Callable[[Mailbox], None], who: int) -> Callable[[Mailbox], int]:
    def work(post: Mailbox) -> int:
        crew = enter(post, Mesh(data=WORKERS), {})
        for i in range(4):
            crew.pulse.at(f"FORWARD {i} 0")
            if i == 2 and post.rank == who:
                assert until(lambda: all(said(post, rank) for rank in range(WORKERS)))
                fault(post)
            everyone(crew.world).all_reduce(torch.ones(1000))
        return 0

    return work


def raising(post: Mailbox) -> None:
    raise RuntimeError("no bananas")


def killed(post: Mailbox) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stopped(post: Mailbox) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hanging(post: Mailbox) -> None:
    time.sleep(1000)


def test_workers_meet_sum_and_leave(tmp_path: Path) -> None:
    def work(post: Mailbox) -> int:
        crew = enter(post, Mesh(data=WORKERS), {})
        total = everyone(crew.world).all_reduce(torch.tensor([post.rank + 1.0])).item()
        assert (total, post.here, post.machine) == (6.0, post.rank % 2, post.rank // 2)
        return 143

    assert run_all(work, tmp_path) == [(143, ""), (143, ""), (143, "")]


LEAVING = """
import json, os, sys
from outsize.launch import hosts
hosts.BEAT = 0.0005
for places in json.loads(sys.argv[1]):
    children = []
    for place in places:
        children.append(os.fork())
        if not children[-1]:
            hosts.run_there(lambda post: 3, {**os.environ, **place})
            sys.exit()
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [3] * len(children), codes
"""


def test_a_worker_ends_however_its_watch_is_just_then() -> None:
    """Python's own way out ends a thread that comes back from the store, and with it the process
    (SIGABRT), in most of such runs."""
    places = []
    for _ in range(2):
        port = free_port()
        places.append([environment(rank, port) for rank in range(WORKERS)])
    command = [sys.executable, "-c", LEAVING, json.dumps(places)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert (run.stderr, run.returncode) == ("", 0)


@pytest.mark.parametrize(
    ("fault", "who", "words"),
    [
        (killed, 1, "has died (last heard of in FORWARD 2 0)"),
        (stopped, 1, "(in FORWARD 2 0) is stopped (SIGSTOP)"),
        (stopped, 2, "(in FORWARD 2 0) has not been heard of for "),
        (hanging, 1, "(in FORWARD 2 0) hangs: nothing"),
    ],
)
def test_a_worker_that_is_lost_ends_the_run_on_every_machine(
    fault, who, words, tmp_path, monkeypatch
) -> None:
    for name, seconds in (("PATIENCE", 2.5), ("STOP_PATIENCE", 1.0), ("SILENCE", 3.0)):
        monkeypatch.setattr(watchdog, name, seconds)  # half of what they are
    found = run_all(working(fault, who), tmp_path)
    for rank in {0, 2} - {who}:  # the first of each machine speaks
        code, err = found[rank]
        assert code == 1 and err.startswith(f"error: rank {who} {words}")
        assert err.count("\n") == 1 and f"rank {who} runs on" in err
    assert found[who][0] in (1, -signal.SIGKILL) and "error" not in found[who][1]


def test_workers_that_leave_together_are_not_missed() -> None:
    """One that is gone, whose last word was that it works: dead, unless all were leaving."""
    store, board = HashStore(), Board(memory(1), 0)
    post = Mailbox(0, 2, 0, 2, 0, store, board, lambda path: None)
    watch = hosts._Watch(post, store, board, Capture(0, None), sys.stderr)
    gone = subprocess.Popen(["true"])
    gone.wait()
    said = replace(word(3, 0, False, read(board.memory, 0)), pid=gone.pid)
    store.set("word/1", said.to_json())
    watch._tell(0)
    verdict = watch._look()
    assert verdict is not None and verdict.what.startswith("rank 1 has died")
    store.add("left", 1)
    watch.leave()
    assert watch._look() is None


def test_an_exception_is_printed_once(tmp_path) -> None:
    found = run_all(working(raising, 2), tmp_path)
    assert [code for code, _ in found] == [1, 1, 1]
    assert found[2][1].startswith("Traceback") and "no bananas\nerror: rank 2 on" in found[2][1]
    assert found[0][1] == found[1][1] == ""


def test_a_worker_that_differs_is_refused(tmp_path) -> None:
    def work(post: Mailbox) -> int:
        steps = "6" if post.rank == 1 else "5"
        enter(post, Mesh(data=WORKERS), {"train.steps": steps, "data": "text"})
        time.sleep(1000)
        return 0

    found = run_all(work, tmp_path)
    assert [code for code, _ in found] == [1, 2, 1]
    assert "train.steps is 6, there 5; start every worker with the same" in found[1][1]
    assert found[1][1].startswith("error: rank 1: worker on") and found[1][1].count("\n") == 1
    assert found[0][1] == found[2][1] == ""


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
        with pytest.raises(OutsizeError, match=rf"127\.0\.0\.1:{port} .*another program"):
            run_there(lambda post: 0, environment(0, port))


def test_an_address_where_nobody_listens_is_named(monkeypatch) -> None:
    monkeypatch.setattr(hosts, "CONNECT", 0.5)
    port = free_port()
    with pytest.raises(OutsizeError, match=rf"rank 1 cannot reach .*127\.0\.0\.1:{port}"):
        run_there(lambda post: 0, environment(1, port))


def test_workers_that_do_not_come_are_named(monkeypatch) -> None:
    monkeypatch.setattr(hosts, "CONNECT", 3.0)
    with pytest.raises(OutsizeError, match=r"of 3 workers, rank 1, 2 did not come to 127"):
        run_there(lambda post: 0, environment(0, free_port()))


@pytest.mark.parametrize("wrong", [{"RANK": "one"}, {"WORLD_SIZE": ""}, {"RANK": "3"}])
def test_numbers_that_are_none_are_named(wrong) -> None:
    (name,) = wrong
    with pytest.raises(OutsizeError, match=name):
        run_there(lambda post: 0, {**environment(0, 1), **wrong})
