"""Faults planted in the product, each of which the device of the tests shows: by wrong numbers, an
error, or waits of the host that a step does not need."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import strict
import torch
from cases import CASES, CPU, device, outcome
from test_waits import USUAL, waits_in

from outsize import accelerator
from outsize.memory import store, upload
from outsize.runtime.engine import Deed
from outsize.runtime.handlers import copies
from outsize.runtime.handlers.norm import Norm
from outsize.runtime.handlers.spill import Spilling
from outsize.runtime.microbatches import Microbatches
from outsize.runtime.spill import Spill
from outsize.runtime.storage.update import Updates
from outsize.schedule import Kind

MOVE = store.move
Plant = Callable[[], Any]  # what is patched while a run lasts


def _in_a_lane() -> bool:
    return threading.current_thread().name.startswith("lane")


def _deaf(where: Callable[[], bool]) -> Any:
    """Marks are not followed by some threads."""
    follow = accelerator.follow
    return patch.object(
        accelerator, "follow", lambda mark, device: None if where() else follow(mark, device)
    )


def _mark_elsewhere(device: torch.device) -> torch.Event:
    made = torch.Event(device)
    made.record(torch.Stream(device=device))
    return made


def _aside(owner: type, name: str) -> Any:
    """A method's work goes to a stream that nobody waits for."""
    plain = getattr(owner, name)

    def run(*given: Any) -> None:
        with torch.Stream(device=device()):
            plain(*given)

    return patch.object(owner, name, run)


def _move_aside(buffer: torch.Tensor, offset: int, other: torch.Tensor, inward: bool) -> None:
    if other.device.type == "cpu":
        MOVE(buffer, offset, other, inward)
    else:
        with torch.Stream(device=other.device):
            mine = buffer[offset : offset + other.nbytes]
            theirs = other.detach().reshape(-1).view(torch.uint8)
            to, source = (mine, theirs) if inward else (theirs, mine)
            to.copy_(source, non_blocking=True)


def _through_one_buffer(pairs: upload.Pairs) -> None:
    buffer = torch.empty(1 << 16, dtype=torch.uint8).pin_memory()
    for room, tensor in pairs:
        here = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        room.copy_(here.copy_(tensor), non_blocking=True)


def _one_room() -> Any:
    rooms: dict[Any, torch.Tensor] = {}
    plain = upload._room

    def room(device: torch.device, pairs: upload.Pairs, item: Any) -> Any:
        made = plain(device, pairs, item)
        if isinstance(item, torch.Tensor) and made is not item:
            made = rooms.setdefault((tuple(item.shape), item.dtype, len(pairs)), made)
            pairs[-1] = (made, item)
        return made

    return patch.object(upload, "_room", room)


def _copied_into_a_lanes_room(self: copies.Copies, action: Any, *_: Any) -> Deed:
    m = action.microbatch

    def run() -> None:
        self._make_room(m)
        upload.upload(self._going.pop(m))

    return Deed(run)


def _fetched_into_a_lanes_room() -> Any:
    plain = Spilling.bind

    def bind(self: Spilling, action: Any, *rest: Any) -> Deed:
        here = (action.stage, action.microbatch)
        if action.kind is not Kind.FETCH:
            return plain(self, action, *rest)
        return Deed(lambda: (self._allocate(here), self._read(here)))

    return patch.object(Spilling, "bind", bind)


@contextmanager
def _let_go_by_the_lane() -> Iterator[None]:
    """Activations go when their copies have been handed out, not when these have run."""
    write = Spill.write

    def written(self: Spill) -> None:
        write(self)
        self.release()

    with patch.object(Spill, "write", written), patch.object(accelerator, "settle", lambda _: None):
        yield


def _not_pinned(pairs: upload.Pairs) -> None:
    for room, tensor in pairs:
        room.copy_(tensor, non_blocking=True)


def _read_in_mid_step() -> Any:
    lose = Microbatches.lose

    def read(self: Microbatches, m: int, loss: torch.Tensor) -> None:
        float(loss)
        lose(self, m, loss)

    return patch.object(Microbatches, "lose", read)


def _norms_read_one_by_one() -> Any:
    square = Norm.square

    def read(self: Norm, stages: Any) -> None:
        square(self, stages)
        for norm in self._norms.values():
            norm.item()

    return patch.object(Norm, "square", read)


def _number_from_the_host() -> Any:
    full = torch.full
    return patch.object(
        torch, "full", lambda size, n, dtype, device: full(size, n, dtype=dtype).to(device)
    )


FAULTS: dict[str, tuple[str, Plant]] = {  # the case that shows it, and what is patched
    "the computation waits for no lane": (
        "several microbatches", lambda: _deaf(lambda: not _in_a_lane()),
    ),
    "the computation waits for no tier": ("all on host", lambda: _deaf(lambda: not _in_a_lane())),
    "no lane waits for the computation": ("all on host, layers", lambda: _deaf(_in_a_lane)),
    "events of the wrong stream": (
        "states on host", lambda: patch.object(accelerator, "mark", _mark_elsewhere),
    ),
    "copies that nobody waits for": (
        "updated on host", lambda: patch.object(accelerator, "settle", lambda _: None),
    ),
    "tiers copy on streams of their own": (
        "states on host", lambda: patch.object(store, "move", _move_aside),
    ),
    "one pinned buffer for all copies": (
        "several microbatches", lambda: patch.object(copies, "upload", _through_one_buffer),
    ),
    "one room for two microbatches": ("several microbatches", _one_room),
    "a lane makes the room of a microbatch": (
        "several microbatches",
        lambda: patch.object(copies.Copies, "bind", _copied_into_a_lanes_room),
    ),
    "a lane makes the room of activations": ("activations on host", _fetched_into_a_lanes_room),
    "activations go before they are copied": ("activations on host", _let_go_by_the_lane),
    "updates on a stream of their own": (
        "several microbatches", lambda: _aside(Updates, "run"),
    ),
    "norms on a stream of their own": ("several microbatches", lambda: _aside(Norm, "square")),
    "the batch stays on the host": (
        "several microbatches", lambda: patch.object(upload, "comes", lambda *_: False),
    ),
    "copies of memory that is not pinned": (
        "several microbatches", lambda: patch.object(copies, "upload", _not_pinned),
    ),
    "a loss is read in mid-step": ("several microbatches", _read_in_mid_step),
    "norms are read one by one": ("several microbatches", _norms_read_one_by_one),
    "a number comes from the host": ("several microbatches", _number_from_the_host),
}  # fmt: skip


def shown(name: str, plant: Plant, folder: Path) -> str:
    """How a fault shows first; "" where it does not."""
    case = CASES[name]
    expected = outcome(case, CPU, folder)
    with ExitStack() as stack:
        stack.enter_context(plant())
        for order in strict.ORDERS:
            strict.start(*order, device_bytes=1 << 28)
            try:
                if outcome(case, device(), folder).differences(expected):
                    return f"wrong numbers in order {order}"
            except Exception as error:
                return f"{type(error).__name__} in order {order}"
        with strict.waits() as counted:
            stepping, _, _ = waits_in(case, folder)
        unpinned = sum(n for (kind, _), n in counted.items() if kind == "copy of unpinned memory")
        return f"{stepping} waits" if stepping > USUAL else f"{unpinned} unpinned" * bool(unpinned)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_shown(fault: str, tmp_path: Path) -> None:
    found = shown(*FAULTS[fault], tmp_path)
    print(f"{fault}: {found}")
    assert found, fault


@pytest.mark.parametrize("name", sorted({name for name, _ in FAULTS.values()}))
def test_no_fault_shows_where_there_is_none(name: str, tmp_path: Path) -> None:
    if name == "several microbatches":
        assert shown(name, ExitStack, tmp_path) == ""
    else:  # other tests go through its orders
        strict.start(*strict.ORDERS[-1], device_bytes=1 << 28)
        found = outcome(CASES[name], device(), tmp_path)
        assert found.differences(outcome(CASES[name], CPU, tmp_path)) == []
