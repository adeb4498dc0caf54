"""What a step of serving takes, foretold from a few that were timed: data alone.

The engine's policies, its refusals and metrics, and the simulator ask the same object. A step feeds
tokens through the blocks, each of which visits what lies in the cache before it, and draws tokens
through the head; weights that stay in files are read meanwhile.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

Piece = tuple[int, int, bool]  # tokens before, tokens that are fed, whether it draws

Numbers = Any  # one, or an array of them

_ENDLESS = 1 << 40  # more than any number of tokens
_ROUNDED = 1e-9  # of seconds: what sums in another order may differ by
_NEAR = 0.9  # of the most tokens a second, from which on more a step gain little


@dataclass(frozen=True)
class Curve:
    """Seconds by a number: between what was timed in proportion, and beyond it as at its end; those
    of fewer than the first are the first's. points: (number, seconds), numbers rising."""

    points: tuple[tuple[int, float], ...] = ((1, 0.0),)

    @cached_property
    def _table(self) -> tuple[float, ...]:
        found, most = [0.0] * (self.points[0][0] + 1), self.points[0][1]
        found[1:] = [most] * (len(found) - 1)
        for (low, _), (high, seconds) in pairwise(self.points):
            before, most = most, max(most, seconds)  # more never take less
            found += [before + (most - before) * i / (high - low) for i in range(1, high - low + 1)]
        return tuple(found)

    @cached_property
    def more(self) -> float:
        """Seconds of one more, at the end."""
        table, last = self._table, self.points[-1][0]
        before = self.points[-2][0] if len(self.points) > 1 else 0
        return (table[last] - table[before]) / (last - before)

    def within(self, seconds: float) -> int:
        """The largest number that takes no longer; 0 where none does."""
        table = self._table
        if seconds < table[-1]:
            return bisect_right(table, seconds) - 1
        beyond = (seconds - table[-1]) / self.more if self.more > 0 else math.inf
        return len(table) - 1 + int(min(beyond, _ENDLESS))

    def __call__(self, count: int) -> float:
        table = self._table
        if count < len(table):
            return table[count]
        return table[-1] + (count - len(table) + 1) * self.more


@dataclass(frozen=True)
class Price:
    """blocks: by tokens that are fed, with an empty cache; head: by tokens that are drawn, and what
    the host does for each. Of the cached tokens before those that are fed of a request, the last
    `reach` at most (mean over layers): visit, for each of them and each fed one; load, for each of
    them, once. reading: of the weights that stay in files, in every step and beside what is
    computed. fetch, evict: of a page of the cache, from below and there. launched: what the blocks
    of a step that feeds prompts take at least, where their kernels are launched one by one. host:
    of what the host does for a step, whatever that feeds. draw: of drawing a likeliest token, which
    is in `head`."""

    blocks: Curve = Curve()
    head: Curve = Curve()
    visit: float = 0.0
    load: float = 0.0
    reach: int = _ENDLESS
    reading: float = 0.0
    fetch: float = math.inf
    evict: float = 0.0
    launched: float = 0.0
    host: float = 0.0
    draw: float = 0.0

    def past(self, start: int, count: int) -> float:
        """Seconds of what `count` tokens of a request see behind `start` ones."""
        return self.seen(((start, count, False),))[2]

    def seen(self, pieces: Iterable[Piece]) -> tuple[int, int, float]:
        """Tokens that are fed, those that are drawn, and seconds of what they see."""
        reach = self.reach
        tokens, drawn, visited, loaded = 0, 0, 0, 0
        for start, count, draws in pieces:
            tokens += count
            drawn += draws
            middle = start + count // 2
            visited += count * (middle if middle < reach else reach)
            loaded += start if start < reach else reach
        return tokens, drawn, self.reads(visited, loaded)

    def reads(self, visited: Numbers, loaded: Numbers) -> Numbers:
        """Seconds of so many visits of cached tokens, and of so many that are loaded; of many
        steps, arrays."""
        return self.visit * visited + self.load * loaded

    def step(self, tokens: int, drawn: int, past: float) -> float:
        """Seconds of a step. past: of what its tokens see, and of draws that take longer."""
        blocks = self.blocks(tokens)
        if tokens > drawn and blocks < self.launched:
            blocks = self.launched
        return max(self.reading, self.host + blocks + self.head(drawn) + past)

    def next(self, start: int) -> float:
        """Seconds of a token behind `start` ones, alone."""
        return self.step(1, 1, self.past(start, 1))

    def prompt(self, tokens: int, start: int = 0) -> float:
        """Seconds of so many tokens of a prompt and its first draw, alone in one step."""
        return self.step(tokens, 1, self.past(start, tokens))

    def alone(self, tokens: int, budget: int) -> float:
        """Seconds of a prompt to its first token where nobody else asks, in slices."""
        starts = range(0, tokens, budget)
        return sum(self.prompt(min(budget, tokens - start), start) for start in starts)

    def moving(self, out: int, back: int) -> float:
        """Seconds of so many pages that go below, and that come back."""
        return out * self.evict + (self.fetch * back if back else 0.0)

    def again(self, start: int, tokens: int) -> float:
        """Seconds of computing what so many tokens leave once more, beside others in a step."""
        return self.blocks.more * tokens + self.past(start, tokens)

    def keeps(self, start: int, tokens: int) -> bool:
        """Whether a page of so many tokens is better moved below and back than computed again."""
        return self.evict + self.fetch < self.again(start, tokens)

    def fetches(self, start: int, tokens: int, pages: int) -> bool:
        """Whether so many tokens are back sooner than computed again, of which so many pages lie
        below."""
        return self.fetch * pages < self.again(start, tokens)

    @property
    def token(self) -> float:
        """Of a token where nobody else asks and nothing is cached."""
        return self.next(0)

    def most(self, seconds: float, least: int, most: int, past: float, depth: int) -> int:
        """The most tokens, of `least` to `most`, in a step that takes so long at most: `least` are
        drawn, with `past` of what they see, and further ones have `depth` before them."""

        blocks, head = self.blocks, self.host + self.head(least + 1)
        if max(self.reading, self.launched + head + past) > seconds:
            return least

        def over(tokens: int) -> bool:
            seen = past + (self.past(depth, tokens - least) if tokens > least else 0.0)
            return blocks(tokens) + head + seen > seconds

        # Surely over beyond what the blocks alone allow, and surely not where they leave time for
        # what that many would see.
        left = seconds - head - past
        high = max(least, min(most, blocks.within(left + _ROUNDED * seconds)))
        left -= self.past(depth, high - least)
        low = max(least, min(high, blocks.within(left - _ROUNDED * seconds)))
        return _last(low, high, over)

    def beside(self, seconds: float, most: int, depth: int, more: float = 0.0) -> int:
        """How many requests of `depth` tokens, 1 to `most`, may draw in a step of so long. more:
        seconds that each draw takes beyond the likeliest token's."""
        past = self.past(depth, 1) + more
        return _last(1, most, lambda count: self.step(count, count, count * past) > seconds)

    @cached_property
    def enough(self) -> int:
        """Tokens of a step from which on more bring few more a second: within a tenth of the most
        that was timed."""
        last = self.blocks.points[-1][0]
        best = last / (self.step(last, 1, 0) or 1.0)
        for count in range(1, last):
            if count >= _NEAR * best * self.step(count, 1, 0):
                return count
        return last


FREE = Price()


def _last(low: int, high: int, over: Callable[[int], bool]) -> int:
    """The last number, of low to high, that is not over; low where all are."""
    if low < high and not over(high):
        return high
    high = max(low, high - 1)
    while low < high:
        middle = (low + high + 1) // 2
        if over(middle):
            high = middle - 1
        else:
            low = middle
    return low
