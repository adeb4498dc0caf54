"""Faults that tests plant in the product, one at a time: docs/accelerator.md has the table."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from cases import device

from outsize import accelerator
from outsize.memory import store, upload
from outsize.runtime.engine import Deed
from outsize.runtime.handlers import copies
from outsize.runtime.handlers.norm import Norm
from outsize.runtime.handlers.spill import Spilling
from outsize.runtime.microbatches import Microbatches
from outsize.runtime.spill import Spill, Spills
from outsize.runtime.storage.update import Updates
from outsize.runtime.storage.weight_pool import WeightPool
from outsize.schedule import Kind

MARK, MOVE = accelerator.mark, store.move
_LAST = threading.local()
Plant = Callable[[], Any]  # what is patched while a run lasts


def in_a_lane() -> bool:
    return threading.current_thread().name.startswith("lane")


def deaf(where: Callable[[], bool]) -> Any:
    """Marks are not followed by some threads."""
    follow = accelerator.follow
    return patch.object(
        accelerator, "follow", lambda mark, device: None if where() else follow(mark, device)
    )


def mark_elsewhere(device: torch.device) -> torch.Event:
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
        with patch.object(accelerator, "keep", lambda *_: None):
            self._make_room(m)
            upload.upload(self._going.pop(m))

    return Deed(run)


def _fetched_into_a_lanes_room() -> Any:
    plain = Spilling.bind

    def bind(self: Spilling, action: Any, *rest: Any) -> Deed:
        here = (action.stage, action.microbatch)
        if action.kind is not Kind.FETCH:
            return plain(self, action, *rest)

        def run() -> None:
            with patch.object(accelerator, "keep", lambda *_: None):
                self._allocate(here)
                self._read(here)

        return Deed(run)

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


def _plain_memory(nbytes: int, what: str) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def _number_from_the_host() -> Any:
    full = torch.full
    return patch.object(
        torch, "full", lambda size, n, dtype, device: full(size, n, dtype=dtype).to(device)
    )


def _mark_before(device: torch.device) -> torch.Event:
    """Of a thread: the mark that it made the last time."""
    before = getattr(_LAST, "mark", None)
    _LAST.mark = made = torch.Event(device)
    made.record(torch.accelerator.current_stream(device))
    return before or made


def _sent_through_one_buffer() -> Any:
    buffers: list[torch.Tensor] = []

    def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if not accelerator.queues(device) or tensor.device == device:
            return tensor.to(device)
        buffers[:] = buffers or [torch.empty(1 << 16, dtype=torch.uint8).pin_memory()]
        here = buffers[0][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return here.copy_(tensor).to(device, non_blocking=True)

    return patch.object(accelerator, "sent", sent)


def _pool_of_before() -> Any:
    """The pool is made anew, and parameters are views of the one before."""
    ensure = WeightPool.ensure

    def anew(self: WeightPool, start: Any) -> None:
        self.pool = torch.empty_like(self.pool)
        ensure(self, start)

    return patch.object(WeightPool, "ensure", anew)


def _pool_let_go() -> Any:
    """Its bytes go between two lists, and others come; what is in it is still believed to be."""
    ensure = WeightPool.ensure

    def let_go(self: WeightPool, start: Any) -> None:
        storage = self.pool.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        storage.resize_(size)
        ensure(self, start)

    return patch.object(WeightPool, "ensure", let_go)


def _one_room_of_the_pool() -> Any:
    """Two blocks are fetched into one room."""
    view = WeightPool.view

    def same(self: WeightPool, name: Any, span: Any) -> torch.Tensor:
        return view(self, name._replace(stage=1) if name.stage == 2 else name, span)

    return patch.object(WeightPool, "view", same)


def _one_place_on_a_tier() -> Any:
    places: dict[tuple[str, int], Any] = {}
    place = Spills.place

    def same(self: Spills, store: Any, nbytes: int) -> Any:
        here = (store.name, nbytes)
        places[here] = places.get(here) or place(self, store, nbytes)
        return places[here]

    return patch.object(Spills, "place", same)


FAULTS: dict[str, tuple[str, Plant]] = {  # the case that shows it, and what is patched
    "the computation waits for no lane": (
        "several microbatches", lambda: deaf(lambda: not in_a_lane()),
    ),
    "the computation waits for no tier": ("all on host", lambda: deaf(lambda: not in_a_lane())),
    "no lane waits for the computation": ("all on host, layers", lambda: deaf(in_a_lane)),
    "events of the wrong stream": (
        "states on host", lambda: patch.object(accelerator, "mark", mark_elsewhere),
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
    "lanes mark nothing": (
        "several microbatches",
        lambda: patch.object(accelerator, "mark", lambda x: None if in_a_lane() else MARK(x)),
    ),
    "the mark of before": (
        "all on host, layers", lambda: patch.object(accelerator, "mark", _mark_before),
    ),
    "one pinned buffer for what is sent": ("dropout", _sent_through_one_buffer),
    "views of the pool of before": ("all on host", _pool_of_before),
    "views of a pool that is let go": ("in parts", _pool_let_go),
    "one room of the pool for two blocks": ("all on host", _one_room_of_the_pool),
    "one place for the activations of two microbatches": (
        "activations on host", _one_place_on_a_tier,
    ),
}  # fmt: skip

WAITING: dict[str, tuple[str, Plant]] = {  # shown by waits of the host and unpinned copies
    "copies of memory that is not pinned": (
        "several microbatches", lambda: patch.object(copies, "upload", _not_pinned),
    ),
    "a loss is read in mid-step": ("several microbatches", _read_in_mid_step),
    "norms are read one by one": ("several microbatches", _norms_read_one_by_one),
    "a number comes from the host": ("several microbatches", _number_from_the_host),
    "a tier that is not pinned": (
        "all on host", lambda: patch.object(accelerator, "pinned", _plain_memory),
    ),
}  # fmt: skip
