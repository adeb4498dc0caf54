"""Drafts: tokens that may follow, found without the model and looked at in one step.

A step feeds them behind the token that waits and draws at each, in order, as long as what is drawn
is what was drafted. Since a draw depends on logits, seed and place alone, and logits on the
request's own tokens, what comes is what would have come without drafts, at any temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from outsize.registry import Registry

_GRAMS = (3, 2)  # tokens that are looked for, the longer ones first
MOST = 6  # tokens of a draft
_KEEP = 0.75  # of what was thought of drafts before
_LEAST = 0.25  # accepted of those that were drafted, below which it rests
_REST = 24  # tokens


class Drafter(Protocol):
    """Of one request."""

    def propose(self, ids: Sequence[int], most: int) -> Sequence[int]:
        """At most so many tokens that may follow."""

    def judged(self, proposed: int, accepted: int) -> None:
        """How a draft went."""


DRAFTERS: Registry[Callable[[], Drafter]] = Registry("drafter")


class Lookup:
    """What followed the same last tokens earlier in the request (Saxena, "Prompt lookup decoding",
    2023; Yang et al., "Inference with reference", 2023). Where little of it comes true it rests."""

    def __init__(self) -> None:
        self._behind: dict[tuple[int, ...], int] = {}  # where what followed these begins
        self._seen, self._worth, self._rest = 0, 1.0, 0

    def propose(self, ids: Sequence[int], most: int) -> Sequence[int]:
        for end in range(self._seen, len(ids) - 1):
            for size in _GRAMS:
                if end + 1 >= size:
                    self._behind[tuple(ids[end + 1 - size : end + 1])] = end + 1
        self._seen = max(self._seen, len(ids) - 1)
        if self._rest:
            self._rest -= 1
            return ()
        count = min(most, 1 + round((MOST - 1) * self._worth))
        for size in _GRAMS:
            found = self._behind.get(tuple(ids[len(ids) - size :])) if len(ids) >= size else None
            if found is not None:
                return ids[found : found + count]
        return ()

    def judged(self, proposed: int, accepted: int) -> None:
        self._worth = _KEEP * self._worth + (1 - _KEEP) * accepted / proposed
        if self._worth < _LEAST:
            self._rest, self._worth = _REST, 2 * _LEAST


DRAFTERS.add("lookup", Lookup)
