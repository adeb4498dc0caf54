"""A cache in which each request's keys and values lie one behind another, in address space that is
reserved for the longest request; memory is committed as they grow (Prabhu et al., "vAttention:
Dynamic Memory Management for Serving LLMs without PagedAttention", 2024).

Each buffer of a layer is one mapping, with a stretch of `tokens` tokens for each of the requests
that go at once, and becomes memory a page at a time: a page here is the fewest tokens that fill
whole pages of the system in every buffer, so that what is counted is what is committed. Attention
is told of one page as long as the stretch, and reads it as a tensor: slices of prompts go through
the kernel of training, which knows no pages. Memory is kept where a request has ended, for the next
one there, and is given back when another stretch wants it, the longest unused first (the paper's
deferred reclamation). The system gives memory that has been read nowhere else: pages that two
requests share there are none.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.decode.caches import CACHES, Books, Move
from outsize.decode.paged import PAGE, PagedCache
from outsize.errors import counted
from outsize.kernels.pages import Pool
from outsize.memory.reserved import Reserved
from outsize.memory.sizes import format_bytes

NAME = "contiguous"


@dataclass
class _Held:
    """place: the stretch of a request, None before it has pages; pages: that it has."""

    place: int | None = None
    pages: int = 0


class Stretches:
    """The books: which request has which stretch, and how much memory each stretch has. Of `count`
    pages none is committed twice: those of a stretch beyond what its request has, or that nobody
    has, go elsewhere where none is left that lies nowhere. each: pages of a stretch."""

    below, moving = 0, (0, 0)

    def __init__(self, count: int, size: int, stretches: int, tokens: int) -> None:
        assert count > 0 and size > 0 and stretches > 0
        self.count, self.size, self.tokens = count, size, count * size
        self._each = -(-tokens // size)
        self._committed = [0] * stretches
        self._nowhere = self.left = count
        self._idle = dict.fromkeys(range(stretches))  # the longest unused first
        self._held = dict[int, _Held]()
        self.changed = dict[int, int]()

    @property
    def used(self) -> int:
        """All of which the cache counts the bytes, which are those that are committed now."""
        return self.count

    @property
    def quiet(self) -> int:
        return self.left

    @property
    def committed(self) -> int:
        return self.count - self._nowhere

    def moved(self) -> list[Move]:
        return []

    def of(self, owner: int) -> Sequence[int]:
        place = self._held[owner].place
        return range(0) if place is None else range(place, place + 1)

    def room(self, owner: int) -> int:
        return self._held[owner].pages * self.size

    def begin(self, owner: int, ids: Sequence[int], among: int = 0) -> int:
        self._held[owner] = _Held()
        return 0

    def restore(self, owner: int, ids: Sequence[int]) -> int:
        return 0

    def missing(self, owner: int, tokens: int) -> int:
        return max(0, -(-tokens // self.size) - self._held[owner].pages)

    def extend(self, owner: int, tokens: int) -> None:
        more, held = self.missing(owner, tokens), self._held[owner]
        if not more:
            return
        assert more <= self.left and held.pages + more <= self._each, "there is room"
        self.left -= more
        held.pages += more
        if held.place is None:
            held.place = self._chosen(held.pages)
            del self._idle[held.place]
        lacking = held.pages - self._committed[held.place]
        if lacking > 0:
            self._reclaim(lacking)
            self._nowhere -= lacking
            self._commit(held.place, held.pages)

    def written(self, owner: int, ids: Sequence[int], tokens: int) -> None:
        """Nothing of it is found again."""

    def end(self, owner: int, again: bool = False) -> None:
        held = self._held.pop(owner)
        self.left += held.pages
        if held.place is not None:
            self._idle[held.place] = None

    def lost(self, pages: Collection[int]) -> None:
        raise AssertionError("nothing goes below")

    def _chosen(self, pages: int) -> int:
        """The idle stretch that has nearly as much memory: the least of those that have enough,
        else the most."""

        def unfit(place: int) -> tuple[bool, int]:
            over = self._committed[place] - pages
            return over < 0, abs(over)

        return min(self._idle, key=unfit)

    def _reclaim(self, pages: int) -> None:
        """So many that lie nowhere."""
        for place, kept in self._spare():
            if self._nowhere >= pages:
                return
            some = max(0, min(self._committed[place] - kept, pages - self._nowhere))
            self._nowhere += some
            self._commit(place, self._committed[place] - some)

    def _spare(self) -> Iterator[tuple[int, int]]:
        """Stretches and the pages of them that somebody has, who has none first."""
        yield from ((place, 0) for place in list(self._idle))
        yield from ((x.place, x.pages) for x in self._held.values() if x.place is not None)

    def _commit(self, place: int, pages: int) -> None:
        self._committed[place] = self.changed[place] = pages


class StretchedCache(PagedCache):
    """Its pages are as long as the stretches, which have memory as far as `hold` says. page: tokens
    that are counted together."""

    def __init__(self, page: int, stretches: int, tokens: int, form: str) -> None:
        super().__init__(stretches, -(-tokens // page) * page, stretches, form)
        self._page = page
        self._reserved = list[Reserved]()  # of each buffer
        self._pages = [0] * stretches

    @property
    def bytes(self) -> int:
        """That are committed."""
        states = sum(x.nbytes for some in self._states.values() for x in some)
        return states + sum(map(self._each, self._reserved)) * sum(self._pages)

    def hold(self, pages: Mapping[int, int]) -> None:
        """What goes does so before the rest comes: never more than the books say."""
        for place in sorted(pages, key=lambda one: pages[one] - self._pages[one]):
            for one in self._reserved:
                self._have(one, place, self._pages[place], pages[place])
            self._pages[place] = pages[place]

    def _pool(self, like: Tensor) -> Pool:
        return Pool(self._form, self.pages, self.size, like, self._empty)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made = Reserved(math.prod(shape) * dtype.itemsize)
        self._reserved.append(made)
        for place, pages in enumerate(self._pages):
            self._have(made, place, 0, pages)
        return made.tensor.view(dtype).view(shape)

    def _each(self, one: Reserved) -> int:
        """Bytes of a page in a buffer."""
        return one.bytes // self.pages // self.size * self._page

    def _have(self, one: Reserved, place: int, before: int, after: int) -> None:
        page, start = self._each(one), one.bytes // self.pages * place
        if after > before:
            one.commit(start + before * page, start + after * page)
        else:
            one.release(start + after * page, start + before * page)


class Contiguous:
    """As serving asks for it."""

    def why_not(self, device: torch.device, workers: int) -> str:
        if workers > 1:
            return "is for one worker"
        if device.type != "cpu":
            return "is for the processor's memory"
        return "" if sys.platform == "linux" else "takes what Linux does with memory"

    def page(self, rows: Sequence[int]) -> int:
        whole = (mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, row) for row in rows)
        return math.lcm(PAGE, *whole)

    def books(self, pages: int, page: int, requests: int, tokens: int) -> Books:
        return Stretches(pages, page, requests, tokens)

    def cache(self, page: int, requests: int, tokens: int, form: str) -> PagedCache:
        return StretchedCache(page, requests, tokens, form)

    def notes(self, page: int, requests: int, tokens: int, size: int) -> tuple[str, ...]:
        addresses = requests * -(-tokens // page) * size
        if addresses:  # so that a server is told now, not in its first step
            Reserved(addresses)
        return (
            f"keys and values of a request lie one behind another, in"
            f" {format_bytes(addresses)} of reserved addresses, and take memory by"
            f" {counted(page, 'token', ',')} as they grow ({format_bytes(size)}); prompts that"
            " begin alike share nothing, and who is interrupted is computed again",
        )


CACHES.add(NAME, Contiguous())
