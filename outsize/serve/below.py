"""What is pushed out of the pool of pages rests below it, in host memory or on a disk, and comes
back as it was (Sheng et al., "FlexGen", 2023; books and choice: outsize/serve/pages.py).

A page is one record of whole checksum blocks, its layers one behind another. Where what lies below
fails, nothing is lost but time: its pages are computed again, and it is said once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from outsize.decode.caches import Move
from outsize.errors import OutsizeError
from outsize.memory.disk import DiskStore
from outsize.memory.sizes import format_bytes
from outsize.memory.store import MemoryStore, Place, Store, pool, rounded
from outsize.memory.tiers import TierSpec
from outsize.models.seams import StateSpec
from outsize.serve.asks import Room
from outsize.serve.line import Line

ROUNDS = 3  # of a page there and back, by which moves are priced
Page = Callable[[int], list[Tensor]]  # what a page holds, each tensor contiguous


class Below:
    """Slots for pages of so many bytes. stores: with bytes that each may hold, the first one is
    filled first; they are closed with it. tell: is told in a line when they fail. fault: why they
    have.

    fetch, evict: seconds of a page, the best of ROUNDS. OutsizeError where that fails.
    """

    def __init__(
        self,
        stores: Sequence[tuple[Store, int]],
        page: int,
        tell: Callable[[str], object],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._stores, self._tell, self.fault = [store for store, _ in stores], tell, ""
        self._counts = [size // rounded(page) for _, size in stores]
        self.pages = sum(self._counts)
        self._places = dict[int, Place]()
        self._buffer = pool(rounded(page))[:page]
        self.fetch = self.evict = 0.0
        first = 0
        for count in self._counts:
            if count:
                began, there, back = clock(), list[float](), list[float]()
                for _ in range(ROUNDS):
                    self._write(first)
                    there.append(-began + (began := clock()))
                    self._read(first)
                    back.append(-began + (began := clock()))
                self.evict = max(self.evict, min(there))
                self.fetch = max(self.fetch, min(back))
            first += count

    def settle(self, line: Line, page: Page, lock: AbstractContextManager[object]) -> bool:
        """Make the moves of a line's books; whether all is there that its next step needs. lock:
        of the line."""
        moves = line.pages.moved()
        lost = self.move(moves, page)
        with lock:
            if not self.fault:
                line.moved(moves)
            elif moves:
                line.lost(lost)
        return not lost

    def move(self, moves: Sequence[Move], page: Page) -> list[int]:
        """In this order; gives the pages into which nothing came back, which is left as it was."""
        lost = list[int]()
        for move in moves:
            try:
                if self.fault:
                    raise OutsizeError(self.fault)
                self._moved(move, page(move.page))
            except OutsizeError as error:
                if not self.fault:
                    self.fault = str(error)
                    self._tell(f"{error}; pages that lay there are computed again from now on")
                if not move.out:
                    lost.append(move.page)
        return lost

    def close(self) -> None:
        for store in self._stores:
            store.close()

    def _moved(self, move: Move, held: Sequence[Tensor]) -> None:
        if not move.out:
            self._read(move.slot)
        at = 0
        for x in held:
            here = self._buffer[at : at + x.nbytes]
            there = x.reshape(-1).view(torch.uint8)
            here.copy_(there) if move.out else there.copy_(here)
            at += x.nbytes
        assert at == len(self._buffer), "a page has the bytes that were foretold"
        if move.out:
            self._write(move.slot)

    def _write(self, slot: int) -> None:
        store = self._store(slot)
        if slot not in self._places:
            self._places[slot] = store.reserve(len(self._buffer))
        store.write(self._places[slot], self._buffer)

    def _read(self, slot: int) -> None:
        self._store(slot).read(self._places[slot], self._buffer)

    def _store(self, slot: int) -> Store:
        for store, count in zip(self._stores, self._counts, strict=True):
            if slot < count:
                return store
            slot -= count
        raise AssertionError("there are so many slots")


def settled(
    room: Room,
    tiers: Sequence[TierSpec],
    page: int,
    workers: int,
    left: Sequence[StateSpec],
    device: torch.device,
    tell: Callable[[str], object],
) -> tuple[Room, Below | None, tuple[str, ...]]:
    """A room with slots in tiers for pages of so many bytes, priced by moving one; what holds them;
    why there is none where one is asked for. left: what layers keep of tokens; tell: as of Below.
    OutsizeError where a tier cannot be had, or has no room for a page."""
    why = _refused(workers, left, room.lies)
    if tiers and why:
        return room, None, (f"pages that are pushed out are computed again: {why}",)
    stores = [_store(tier, device) for tier in tiers]
    if not stores:
        return room, None, ()
    below = Below(stores, page, tell)
    if not below.pages:
        raise OutsizeError(
            f"--disk, --host-memory: a page of the cache takes {format_bytes(page)}; give more"
        )
    price = replace(room.price, fetch=below.fetch, evict=below.evict)
    return replace(room, price=price, below=below.pages), below, ()


def _refused(workers: int, left: Sequence[StateSpec], lies: str) -> str:
    """Why nothing lies below; "" where it may."""
    if lies:
        return f"a cache that lies {lies} has none that go below"
    if workers > 1:
        return "those of several workers do not go below"
    recurrent = any(one.per == "sequence" for one in left)
    return "a recurrent state is not there for the first tokens alone" if recurrent else ""


def _store(tier: TierSpec, device: torch.device) -> tuple[Store, int]:
    if tier.medium == "disk":
        return DiskStore(tier.name, tier.paths, tier.bytes, 1), tier.bytes
    if device.type == "cpu":
        raise OutsizeError(
            f"--host-memory {format_bytes(tier.bytes)}: the cache is in the host's memory"
            " already; give more --memory, or a --disk"
        )
    return MemoryStore(tier.name, tier.bytes), tier.bytes
