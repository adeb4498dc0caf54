"""Who computes beside the computing thread comes behind it on the device too."""

from __future__ import annotations

import strict
import torch

from outsize.parallel.courier import Courier
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
