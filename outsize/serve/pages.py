"""Which request has which pages of the cache: books alone, no tensors.

A page has room for some tokens of one request, or of several whose prompts begin alike. A page that
is full is known by the tokens in it and before it; when nobody has it any more it stays until its
room is wanted, the longest unused first, so that the next request that begins so finds it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

_BEGINNING = 0  # stands for what is before a sequence's first page

_Key = tuple[int, tuple[int, ...]]  # of the page before, and the tokens in this one


@dataclass
class _Held:
    """pages: of one request, in order; named: how many of them are known by their tokens; last: the
    name of the last of these."""

    pages: list[int] = field(default_factory=list)
    named: int = 0
    last: int = _BEGINNING


class Pages:
    """So many pages of so many tokens. sharing: pages that are full are kept and shared."""

    def __init__(self, count: int, size: int, sharing: bool = True) -> None:
        assert count > 0 and size > 0
        self.count, self.size, self.sharing = count, size, sharing
        self._free = list(range(count))[::-1]
        self._users = [0] * count
        self._known: dict[_Key, int] = {}
        self._keys: dict[int, _Key] = {}
        self._names: dict[int, int] = {}  # of known pages: never given twice
        self._given = _BEGINNING
        self._kept = OrderedDict[int, None]()
        self._held: dict[int, _Held] = {}

    @property
    def left(self) -> int:
        """Pages that nobody has."""
        return len(self._free) + len(self._kept)

    @property
    def tokens(self) -> int:
        """That there is room for in all."""
        return self.count * self.size

    def of(self, owner: int) -> list[int]:
        return self._held[owner].pages

    def begin(self, owner: int, ids: Sequence[int]) -> int:
        """A request comes; gives how many of its tokens have been kept, one fewer than all at
        most."""
        held = self._held[owner] = _Held()
        whole = (len(ids) - 1) // self.size if self.sharing else 0
        for index in range(whole):
            some = tuple(ids[index * self.size : (index + 1) * self.size])
            page = self._known.get((held.last, some))
            if page is None:
                break
            self._kept.pop(page, None)
            self._users[page] += 1
            held.pages.append(page)
            held.named, held.last = index + 1, self._names[page]
        return held.named * self.size

    def missing(self, owner: int, tokens: int) -> int:
        """Pages that a request lacks for so many tokens in all."""
        return max(0, -(-tokens // self.size) - len(self._held[owner].pages))

    def extend(self, owner: int, tokens: int) -> None:
        """Room for so many tokens in all, which is there."""
        pages = self._held[owner].pages
        for _ in range(self.missing(owner, tokens)):
            page = self._taken()
            self._users[page] = 1
            pages.append(page)

    def written(self, owner: int, ids: Sequence[int], tokens: int) -> None:
        """The pages hold the first so many of these tokens: what is full is known."""
        held = self._held[owner]
        while self.sharing and (held.named + 1) * self.size <= tokens:
            page = held.pages[held.named]
            some = tuple(ids[held.named * self.size : (held.named + 1) * self.size])
            known = self._known.setdefault((held.last, some), page)
            if known == page:
                self._given += 1
                self._keys[page], self._names[page] = (held.last, some), self._given
            held.named, held.last = held.named + 1, self._names[known]

    def end(self, owner: int) -> None:
        """A request goes; its last pages are the first to be taken."""
        for page in reversed(self._held.pop(owner).pages):
            self._users[page] -= 1
            if not self._users[page]:
                if page in self._keys:
                    self._kept[page] = None
                else:
                    self._free.append(page)

    def _taken(self) -> int:
        if self._free:
            return self._free.pop()
        page, _ = self._kept.popitem(last=False)
        del self._known[self._keys.pop(page)], self._names[page]
        return page
