"""Workers that are threads compute one at a time, and nobody waits for ever."""

from __future__ import annotations

import signal
import threading

import pytest
import torch
from threads import play

from outsize.collectives import Mesh, turns
from outsize.collectives.courier import Courier
from outsize.collectives.threads import Disagreement
from outsize.runtime.lanes import Board, Lanes
from outsize.schedule import Lane

CPU = torch.device("cpu")
EVERYBODY = (0, 1, 2)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, nobody goes on without his turn."""
    monkeypatch.setattr(turns, "PATIENCE", 600.0)


class Inside:
    """How many threads were in here at once."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def __call__(self) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        for _ in range(20):
            torch.ones(4).add(1)  # lets others go on, if they may
        self.now -= 1


@pytest.mark.usefixtures("patient")
def test_one_computes_while_the_others_wait() -> None:
    inside = Inside()

    def work(world) -> list[float]:
        group, sums = world.group(EVERYBODY), []
        courier, lanes, board = Courier(), Lanes(CPU), Board(1, CPU)
        for _ in range(20):
            inside()
            courier.send(inside, CPU).wait()
            sums.append(group.all_reduce(torch.tensor([float(world.rank)])).item())
        lanes.give(Lane.NETWORK, lambda: (group.barrier(), inside(), board.end(0)))
        board.wait((0,))
        lanes.finish((Lane.NETWORK,), False)
        lanes.close()
        courier.close()
        return sums

    assert play(Mesh(3), work) == [[3.0] * 20] * 3
    assert inside.most == 1


def test_who_waits_for_another_in_his_own_way_lets_him_go_on(monkeypatch) -> None:
    monkeypatch.setattr(turns, "PATIENCE", 0.001)
    come = [threading.Event() for _ in EVERYBODY]

    def work(world) -> bool:
        come[world.rank].set()
        return all(one.wait(600) for one in come)

    assert play(Mesh(3), work) == [True] * 3


def test_a_thread_that_is_in_no_turns_waits_for_none() -> None:
    with turns.aside(), turns.among(None):
        assert turns.here() is None


@pytest.mark.usefixtures("patient")
def test_a_backward_pass_that_pytorchs_thread_runs_keeps_nobody_waiting() -> None:
    def work(world) -> float:
        x = torch.ones(1)
        sums = threading.Thread(target=world.group(EVERYBODY).all_reduce, args=(x,))
        with turns.differentiating(torch.device("cuda")):
            sums.start()
            sums.join()
        return x.item()

    assert play(Mesh(3), work) == [3.0] * 3


@pytest.mark.usefixtures("patient")
def test_all_are_told_that_they_ask_for_different_things() -> None:
    def work(world) -> str:
        x = torch.ones(2 + (world.rank == 1))
        with pytest.raises(Disagreement, match="different things") as raised:
            world.group(EVERYBODY).all_reduce(x)
        return str(raised.value)

    assert len(set(play(Mesh(3), work))) == 1


@pytest.mark.usefixtures("patient")
def test_who_fails_ends_the_others_waiting() -> None:
    def work(world) -> None:
        if world.rank == 2:
            raise KeyError("the third")
        world.group(EVERYBODY).barrier()

    with pytest.raises(KeyError, match="the third"):
        play(Mesh(3), work)


@pytest.fixture
def interruptible():
    """A process that was started in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("workers", [1, 3])
def test_ctrl_c_is_raised_when_all_workers_have_ended(workers, interruptible) -> None:
    """Python aborts where it leaves while one is inside an operator."""
    main, ended = threading.main_thread().ident, []

    def work(world) -> None:
        group = world.group(tuple(range(workers)))
        try:
            for turn in range(10_000):
                group.barrier()
                if (world.rank, turn) == (0, 1):
                    signal.pthread_kill(main, signal.SIGINT)
        finally:
            ended.append(world.rank)

    with pytest.raises(KeyboardInterrupt):
        play(Mesh(workers), work)
    assert sorted(ended) == list(range(workers))
