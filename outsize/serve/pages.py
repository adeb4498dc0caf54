"""Which request has which pages of the cache: books alone, no tensors.

A page has room for some tokens of one request, or of several whose prompts begin alike. A page that
is full is known by the tokens in it and before it; when nobody has it any more it stays until its
room is wanted, the longest unused first, so that the next request that begins so finds it.

What is then pushed out goes below, to host memory or a disk, where it is wanted again (of a request
that was interrupted, or found by a second one) and would come back sooner than it is computed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outsize.decode.caches import CACHES, Books, Move
from outsize.serve.asks import Room
from outsize.serve.price import FREE, Price

_BEGINNING = 0  # stands, like what is below it, for what is before a sequence's first page

_Key = tuple[int, tuple[int, ...]]  # of the page before, and the tokens in this one


@dataclass
class _Held:
    """pages: of one request, in order; named: how many of them are known by their tokens; last: the
    name of the last of these."""

    pages: list[int] = field(default_factory=list)
    named: int = 0
    last: int = _BEGINNING


class _Known(NamedTuple):
    """A page that is full. name: never given to other tokens; start: tokens before it."""

    key: _Key
    name: int
    start: int


class _Below:
    """The books of so many slots: the longest unused is given to another where none is free."""

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots))[::-1]
        self._held = OrderedDict[_Key, tuple[int, int]]()  # slot, and the name of the tokens

    @property
    def used(self) -> int:
        return len(self._held)

    def named(self, key: _Key) -> int | None:
        return self._held[key][1] if key in self._held else None

    def found(self, key: _Key) -> int | None:
        """The slot of what is wanted again now."""
        if key not in self._held:
            return None
        self._held.move_to_end(key)
        return self._held[key][0]

    def keep(self, key: _Key, name: int) -> int | None:
        """A slot for it; None where there are none at all."""
        if not self._free and not self._held:
            return None
        slot = self._free.pop() if self._free else self._held.popitem(last=False)[1][0]
        self._held[key] = slot, name
        return slot


class Pages:
    """So many pages of so many tokens, `tokens` in all. sharing: pages that are full are kept and
    shared; below: slots for those that are pushed out; price: of what comes back, and what is
    computed again; moves: to be made before the next step; changed: always empty, for all pages
    have memory; used: pages that anybody has had by now, the first ones."""

    def __init__(
        self, count: int, size: int, sharing: bool = True, below: int = 0, price: Price = FREE
    ) -> None:
        assert count > 0 and size > 0
        self.count, self.size, self.sharing = count, size, sharing
        self.tokens, self.used = count * size, 0
        self._free = list(range(count))[::-1]
        self._users = [0] * count
        self._known: dict[_Key, int] = {}
        self._full: dict[int, _Known] = {}  # by page
        self._given = _BEGINNING
        self._kept = OrderedDict[int, None]()
        self._held: dict[int, _Held] = {}
        self._below, self._slots, self._price = _Below(below), below, price
        self._wanted = set[int]()  # pages whose tokens are likely to be asked for again
        self.moves, self.changed = list[Move](), dict[int, int]()

    @property
    def left(self) -> int:
        """Pages that nobody has."""
        return len(self._free) + len(self._kept)

    @property
    def quiet(self) -> int:
        """Pages that may be taken without anything going below."""
        return len(self._free) if self._slots else self.left

    @property
    def below(self) -> int:
        """Pages that lie below."""
        return self._below.used

    @property
    def moving(self) -> tuple[int, int]:
        """Pages that are to go below, and to come back."""
        out = sum(move.out for move in self.moves)
        return out, len(self.moves) - out

    def moved(self) -> list[Move]:
        """What is to be moved before the next step, in this order: it is now."""
        moves, self.moves = self.moves, []
        return moves

    def of(self, owner: int) -> list[int]:
        return self._held[owner].pages

    def room(self, owner: int) -> int:
        return len(self._held[owner].pages) * self.size

    def begin(self, owner: int, ids: Sequence[int], among: int = 0) -> int:
        """A request comes; gives how many of its tokens have been kept, one fewer than all at
        most. among: with others of this number alone it shares pages."""
        held = self._held[owner] = _Held(last=_BEGINNING - among)
        for index in range((len(ids) - 1) // self.size if self.sharing else 0):
            if not self._found(held, (held.last, _some(ids, index, self.size))):
                break
        return held.named * self.size

    def restore(self, owner: int, ids: Sequence[int]) -> int:
        """The same of those that lie below, where they come back sooner than they are computed. For
        all of the request's tokens there is room."""
        held = self._held[owner]
        start, keys, last = held.named * self.size, list[_Key](), held.last
        for index in range(held.named, (len(ids) - 1) // self.size):
            key = last, _some(ids, index, self.size)
            page = self._known.get(key)
            name = self._below.named(key) if page is None else self._full[page].name
            if name is None:
                break
            keys.append(key)
            last = name
        count = sum(key not in self._known for key in keys)
        if count and self._price.fetches(start, len(keys) * self.size, count):
            for key in reversed(keys):  # in use: to be given up last, those of the beginning behind
                self._below.found(key)
            for key in keys:
                if not self._found(held, key) and not self._fetched(held, key):
                    break
        return held.named * self.size

    def missing(self, owner: int, tokens: int) -> int:
        """Pages that a request lacks for so many tokens in all."""
        return max(0, -(-tokens // self.size) - len(self._held[owner].pages))

    def extend(self, owner: int, tokens: int) -> None:
        """Room for so many tokens in all, which is there."""
        pages = self._held[owner].pages
        for _ in range(-(-tokens // self.size) - len(pages)):
            page = self._taken()
            self._users[page] = 1
            pages.append(page)

    def written(self, owner: int, ids: Sequence[int], tokens: int) -> None:
        """The pages hold the first so many of these tokens: what is full is known."""
        held, size = self._held[owner], self.size
        for index in range(held.named, tokens // size if self.sharing else 0):
            page, key = held.pages[index], (held.last, _some(ids, index, size))
            known = self._known.setdefault(key, page)
            if known == page:
                # As below, if it is there, so that those behind it are found there too.
                name = self._below.named(key) if self._slots else None
                if name is None:
                    self._given = name = self._given + 1
                self._full[page] = _Known(key, name, index * size)
            held.named, held.last = index + 1, self._full[known].name

    def end(self, owner: int, again: bool = False) -> None:
        """A request goes; its last pages are the first to be taken. again: it will come back."""
        users, full = self._users, self._full
        for page in reversed(self._held.pop(owner).pages):
            users[page] -= 1
            if again and page in full:
                self._wanted.add(page)
            if not users[page]:
                if page in full:
                    self._kept[page] = None
                else:
                    self._free.append(page)

    def lost(self, pages: Collection[int]) -> None:
        """Nothing comes back from below any more, and did not into these pages, which are
        somebody's or kept: they are known no more."""
        self._below, self._slots, self.moves = _Below(0), 0, []
        for page in pages:
            if page in self._full:
                self._forget(page)
            if page in self._kept:
                del self._kept[page]
                self._free.append(page)

    def _found(self, held: _Held, key: _Key) -> bool:
        """Give a request the page that holds its next tokens, if there is one."""
        page = self._known.get(key)
        if page is None:
            return False
        self._kept.pop(page, None)
        self._users[page] += 1
        self._next(held, page)
        return True

    def _fetched(self, held: _Held, key: _Key) -> bool:
        """Have them brought back into a page, if they lie below still."""
        page = self._taken()  # which may push out another, and that one what lies below
        self._users[page] = 1
        slot, name = self._below.found(key), self._below.named(key)
        if slot is None or name is None:
            held.pages.append(page)
            return False
        self.moves.append(Move(page, slot, False))
        self._known[key] = page
        self._full[page] = _Known(key, name, held.named * self.size)
        self._next(held, page)
        return True

    def _next(self, held: _Held, page: int) -> None:
        held.pages.append(page)
        held.named, held.last = held.named + 1, self._full[page].name
        self._wanted.add(page)

    def _taken(self) -> int:
        if self._free:
            page = self._free.pop()
            self.used = max(self.used, page + 1)
            return page
        page, _ = self._kept.popitem(last=False)
        wanted = self._slots > 0 and page in self._wanted
        key, name, start = self._forget(page)
        if wanted and self._price.keeps(start, self.size) and self._below.found(key) is None:
            slot = self._below.keep(key, name)
            if slot is not None:
                self.moves.append(Move(page, slot, True))
        return page

    def _forget(self, page: int) -> _Known:
        found = self._full.pop(page)
        del self._known[found.key]
        self._wanted.discard(page)
        return found


def _some(ids: Sequence[int], index: int, size: int) -> tuple[int, ...]:
    return tuple(ids[index * size : (index + 1) * size])


def books_of(room: Room, sharing: bool) -> Books:
    """Of a room, as its cache lies. sharing: as of Pages, where they can be."""
    if room.lies:
        return CACHES.get(room.lies).books(room.pages, room.page, room.slots + 1, room.context)
    return Pages(room.pages, room.page, sharing, room.below, room.price)
