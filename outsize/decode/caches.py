"""How what the tokens of many requests leave lies in memory: what serving asks of it.

Pages that lie anywhere are serving's own (outsize/decode/paged.py, outsize/serve/pages.py). A
technique may register another way under a name; its books and its cache go by the same steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import torch

from outsize.decode.paged import PagedCache
from outsize.errors import OutsizeError, nearest
from outsize.kernels.pages import AS_STORED, FORMS
from outsize.registry import Registry


class Move(NamedTuple):
    """What a page holds goes below, out, or comes back. slot: its place there."""

    page: int
    slot: int
    out: bool


class Books(Protocol):
    """Which request has how much of a cache: no tensors. A page is what is counted: so many tokens,
    of one request or of several that begin alike. changed: by the place of a request, the pages
    that are to have memory there from the next step on, where it is another number than before; who
    has them so takes it."""

    changed: dict[int, int]

    @property
    def count(self) -> int:
        """Pages in all."""

    @property
    def size(self) -> int:
        """Tokens of a page."""

    @property
    def tokens(self) -> int:
        """That there is room for in all."""

    @property
    def used(self) -> int:
        """Pages that anybody has had by now."""

    @property
    def left(self) -> int:
        """Pages that nobody has."""

    @property
    def quiet(self) -> int:
        """Pages that may be taken without anything going below."""

    @property
    def below(self) -> int:
        """Pages that lie below."""

    @property
    def moving(self) -> tuple[int, int]:
        """Pages that are to go below, and to come back."""

    def moved(self) -> list[Move]:
        """What is to be moved before the next step, in this order: it is now."""

    def of(self, owner: int) -> Sequence[int]:
        """What a step is told: the pages of the cache in which a request's tokens lie."""

    def room(self, owner: int) -> int:
        """Tokens that a request has pages for."""

    def begin(self, owner: int, ids: Sequence[int], among: int = 0) -> int:
        """A request comes; gives how many of its tokens are there already, not all. among: with
        others of this number alone it may share them."""

    def restore(self, owner: int, ids: Sequence[int]) -> int:
        """The same once there is room for all of its tokens, with those that are brought back."""

    def missing(self, owner: int, tokens: int) -> int:
        """Pages that a request lacks for so many tokens in all."""

    def extend(self, owner: int, tokens: int) -> None:
        """Room for so many tokens in all, which is there."""

    def written(self, owner: int, ids: Sequence[int], tokens: int) -> None:
        """The first so many of these tokens are in the request's pages."""

    def end(self, owner: int, again: bool = False) -> None:
        """A request goes. again: it will come back."""

    def lost(self, pages: Collection[int]) -> None:
        """Nothing comes back from below any more, and did not into these pages."""


class Lying(Protocol):
    """A way for a cache to lie. tokens: that a request may have; requests: whose tokens are there
    at once."""

    def why_not(self, device: torch.device, workers: int) -> str:
        """What keeps it from being there; "" where nothing does."""

    def page(self, rows: Sequence[int]) -> int:
        """Tokens that are counted together, where one leaves so many bytes in each buffer."""

    def books(self, pages: int, page: int, requests: int, tokens: int) -> Books:
        """Of so many pages of so many tokens."""

    def cache(self, page: int, requests: int, tokens: int, form: str) -> PagedCache:
        """form: of what is held; states: of as many requests."""

    def notes(self, page: int, requests: int, tokens: int, size: int) -> tuple[str, ...]:
        """What the plan says of it. size: bytes of a page. OutsizeError where it cannot be had."""


CACHES: Registry[Lying] = Registry("cache")


def parse(cache: str) -> tuple[str, str]:
    """The form of what is held and the name of how it lies, "" for pages, of FORM, NAME or
    FORM+NAME. OutsizeError for what is none."""
    form, plus, name = cache.partition("+")
    if form in FORMS and (not plus or CACHES.find(name) is not None):
        return form, name
    if not plus and CACHES.find(cache) is not None:
        return AS_STORED, cache
    known = (*FORMS, *CACHES.names(), *(f"int8+{one}" for one in CACHES.names()))
    raise OutsizeError(f"cache is {cache!r}{nearest(cache, known)}")
