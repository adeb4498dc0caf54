"""Who computes beside the computing thread comes behind it on the device too."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import strict
import torch
from plants import Plant, deaf, mark_elsewhere

from outsize import accelerator
from outsize.collectives.courier import Courier
from outsize.runtime import lanes
from outsize.runtime.lanes import Board, Lanes
from outsize.schedule import Lane


def test_a_lane_begins_behind_what_the_device_had_before_the_list(device: str) -> None:
    for order in strict.begins(device):
        assert _by_a_lane(torch.device(device, 0)) == list(range(3, 51, 6)), order


def test_a_courier_comes_behind_its_sender_and_before_who_waits(device: str) -> None:
    for order in strict.begins(device):
        assert _by_a_courier(torch.device(device, 0)) == [15.0] * 8, order


def _by_a_lane(device: torch.device) -> list[float]:
    lanes, made = Lanes(device), list[torch.Tensor]()
    x = torch.arange(8.0).to(device) * 2
    board = Board(1, device)

    def work() -> None:
        board.wait(())
        made.append(x + 1)
        board.end(0)

    lanes.give(Lane.COPY, work)
    board.wait((0,))
    lanes.close()
    return (made[0] * 3).tolist()


def _by_a_courier(device: torch.device) -> list[float]:
    courier, x = Courier(), torch.ones(8, device=device)
    for _ in range(3):
        x.mul_(2)
        courier.send(lambda: x.add_(1), device).wait()
    return x.tolist()


def test_a_lane_comes_behind_what_its_room_was_made_of():
    """What goes between the list's begin and the lane's work is filled with NaN behind both."""
    for order in strict.ORDERS:
        strict.start(*order)
        assert _into_a_room_of_what_goes(torch.device("strict", 0)) == [1.0] * 1000, order


def _into_a_room_of_what_goes(device: torch.device) -> list[float]:
    lanes, board, old = Lanes(device), Board(1, device), torch.ones(1000, device=device)
    del old
    room = torch.empty(1000, device=device)

    def work() -> None:
        board.wait(())
        room.fill_(1)
        board.end(0)

    lanes.give(Lane.COPY, work)
    board.wait((0,))
    lanes.close()
    return (room * 1).tolist()


def test_what_a_lane_makes_is_kept_for_the_computation(device: str) -> None:
    """It goes while the computation still reads it, and the lane makes another at once."""
    for order in strict.begins(device):
        assert _made_by_a_lane(torch.device(device, 0)) == [0.0, 3.0, 6.0, 9.0], order


def _made_by_a_lane(device: torch.device) -> list[float]:
    lanes, board, made = Lanes(device), Board(4, device), list[torch.Tensor]()
    found = []

    def work(place: int) -> None:
        made.append(torch.full((1000,), float(place), device=device))
        board.end(place)

    for place in range(4):
        lanes.give(Lane.COPY, partial(work, place))
    for place in range(4):
        board.wait((place,))
        found.append(made[place] * 3)
        made[place] = torch.empty(0)
        lanes.give(Lane.COPY, lambda: made.append(torch.full((1000,), -1.0, device=device)))
    lanes.finish([Lane.COPY], faulty=False)
    lanes.close()
    return [float(x.max()) for x in found]


def _in_the_courier() -> bool:
    return threading.current_thread().name == "courier"


def _its_mark_elsewhere() -> Any:
    mark = accelerator.mark
    return patch.object(
        accelerator, "mark", lambda at: (mark_elsewhere if _in_the_courier() else mark)(at)
    )


FAULTS: dict[str, tuple[Callable[[torch.device], list[float]], Plant]] = {
    "a courier does not wait for its sender": (_by_a_courier, lambda: deaf(_in_the_courier)),
    "nobody waits for a courier": (_by_a_courier, lambda: deaf(lambda: not _in_the_courier())),
    "a courier's mark is of another stream": (_by_a_courier, _its_mark_elsewhere),
    "a lane does not wait for what its room was made of": (
        _into_a_room_of_what_goes,
        lambda: patch.object(lanes, "_behind", lambda mark, device, work: work()),
    ),
    "what a lane makes is not kept": (
        _made_by_a_lane,
        lambda: patch.object(accelerator, "keep", lambda *_: None),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_shown(fault: str) -> None:
    play, plant = FAULTS[fault]
    strict.start("eager")
    right, found = play(torch.device("strict", 0)), []
    with plant():
        for order in strict.ORDERS:
            strict.start(*order)
            found.append(play(torch.device("strict", 0)))
    assert any(each != right for each in found)
