"""Streams run late: a fault that a GPU lets pass most of the time gives NaN, every time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import strict
import torch
from torch import Tensor

SIZE = 1000
Play = Callable[[bool], Tensor]  # with the fault or without; what must be ones


def _device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found


def _side() -> torch.Stream:
    return torch.Stream(device=_device())


def _read_before_it_is_written(faulty: bool) -> Tensor:
    """The main stream reads what a side stream writes."""
    side, x = _side(), torch.zeros(SIZE, device=_device())
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x.fill_(1)
    if not faulty:
        torch.accelerator.current_stream().wait_stream(side)
    return x * 1


def _written_before_it_is_there(faulty: bool) -> Tensor:
    """A side stream reads what the main one writes."""
    side, x = _side(), torch.ones(SIZE, device=_device())
    ready = torch.Event(device=_device())
    ready.record()
    with side:
        if not faulty:
            side.wait_event(ready)
        y = x * 1
    torch.accelerator.current_stream().wait_stream(side)
    x.record_stream(side)
    y.record_stream(torch.accelerator.current_stream())
    return y * 1


def _event_of_the_wrong_stream(faulty: bool) -> Tensor:
    """The event is recorded on the stream that waits for it."""
    side, x = _side(), torch.zeros(SIZE, device=_device())
    side.wait_stream(torch.accelerator.current_stream())
    written = torch.Event(device=_device())
    with side:
        x.fill_(1)
    written.record(torch.accelerator.current_stream() if faulty else side)
    torch.accelerator.current_stream().wait_event(written)
    return x * 1


def _freed_too_early(faulty: bool) -> Tensor:
    """A tensor of the main stream's is let go while a side stream has still to read it."""
    side, x = _side(), torch.ones(SIZE, device=_device())
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = x * 1
    if not faulty:
        x.record_stream(side)
    del x
    again = torch.zeros(SIZE, device=_device())  # the block of x, if nothing holds it
    torch.accelerator.current_stream().wait_stream(side)
    y.record_stream(torch.accelerator.current_stream())
    return y * 1 + again * 0


def _a_room_is_used_again_too_early(faulty: bool) -> Tensor:
    """The next item is put into a room while a side stream has still to read the last one."""
    side, room = _side(), torch.ones(SIZE, device=_device())
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = room * 1
    if not faulty:
        torch.accelerator.current_stream().wait_stream(side)
    room.fill_(float("nan"))
    torch.accelerator.current_stream().wait_stream(side)
    y.record_stream(torch.accelerator.current_stream())
    return y * 1


def _host_writes_pinned_memory_too_early(faulty: bool) -> Tensor:
    """The host fills a pinned buffer again while the copy from it has still to run."""
    buffer = torch.ones(SIZE).pin_memory()
    x = buffer.to(_device(), non_blocking=True)
    if not faulty:
        torch.accelerator.current_stream().synchronize()
    buffer.fill_(float("nan"))
    return x


def _host_reads_pinned_memory_too_early(faulty: bool) -> Tensor:
    """The host reads what an asynchronous copy has still to bring."""
    x = torch.ones(SIZE, device=_device())
    buffer = torch.empty(SIZE, pin_memory=True)
    buffer.copy_(x, non_blocking=True)
    if not faulty:
        torch.accelerator.current_stream().synchronize()
    return buffer.clone()


FAULTS: dict[str, tuple[Play, tuple[str, int]]] = {  # and an order that shows the fault each time
    "a missing wait of the main stream": (_read_before_it_is_written, ("demand", 0)),
    "a missing wait of a side stream": (_written_before_it_is_there, ("last", 0)),
    "an event on the wrong stream": (_event_of_the_wrong_stream, ("demand", 0)),
    "record_stream left out": (_freed_too_early, ("last", 1)),
    "a room used again too early": (_a_room_is_used_again_too_early, ("last", 1)),
    "a pinned buffer written too early": (_host_writes_pinned_memory_too_early, ("demand", 0)),
    "a pinned buffer read too early": (_host_reads_pinned_memory_too_early, ("demand", 0)),
}


def _plays(play: Play, faulty: bool, order: str, last: int, seed: int) -> Tensor:
    strict.start(order, last, seed)
    return play(faulty).cpu()


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_shows_each_time(name: str) -> None:
    play, (order, last) = FAULTS[name]
    for _ in range(3):
        assert not _plays(play, True, order, last, 0).eq(1).all()


@pytest.mark.parametrize("name", FAULTS)
def test_no_order_shows_a_fault_where_there_is_none(name: str, device: str) -> None:
    for order in strict.begins(device):
        assert FAULTS[name][0](False).cpu().eq(1).all(), order


@pytest.mark.parametrize("name", FAULTS)
def test_a_seed_gives_one_result(name: str) -> None:
    play = FAULTS[name][0]
    for seed in range(10):
        once, again = (_plays(play, True, "random", 0, seed) for _ in range(2))
        assert torch.equal(once.view(torch.int32), again.view(torch.int32))


def test_seeds_give_several_orders() -> None:
    """A fault shows under some seeds and not under others."""
    shown = {
        bool(_plays(_read_before_it_is_written, True, "random", 0, seed).eq(1).all())
        for seed in range(20)
    }
    assert shown == {True, False}


def test_an_eager_device_shows_no_fault() -> None:
    for play, _ in FAULTS.values():
        assert _plays(play, True, "eager", 0, 0).eq(1).all()


def test_the_host_runs_ahead_and_events_tell_how_far_the_device_is() -> None:
    strict.start("demand")
    x = torch.ones(SIZE, device="strict") * 2
    event = torch.Event(device="strict")
    event.record()
    assert strict.pieces_waiting() == 4  # ones, their product, NaN over the ones, the event
    asked = 0
    while not event.query():
        asked += 1
    assert asked == 3 and strict.pieces_waiting() == 0
    assert x.sum().item() == 2 * SIZE


def test_autograd_goes_back_on_the_streams_of_the_forward_pass(device: str) -> None:
    for order in strict.begins(device):
        side = _side()
        x = torch.ones(SIZE, device=device, requires_grad=True)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            y = (x * 3).sum()
        torch.accelerator.current_stream().wait_stream(side)
        y.record_stream(torch.accelerator.current_stream())
        y.backward()
        assert x.grad is not None and x.grad.cpu().eq(3).all(), order
