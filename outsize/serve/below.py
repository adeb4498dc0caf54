"""What is pushed out of the pool of pages rests below it, in host memory or on a disk, and comes
back as it was (Sheng et al., "FlexGen", 2023; books and choice: outsize/serve/pages.py).

A page is one record of whole checksum blocks, its layers one behind another. Where what lies below
fails, nothing is lost but time: its pages are computed again, and it is said once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from outsize.errors import OutsizeError
from outsize.memory.store import Place, Store, pool, rounded
from outsize.serve.line import Line
from outsize.serve.pages import Move

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
