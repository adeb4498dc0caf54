"""How many requests at once are worth their cache.

Beyond some number a step reads, or multiplies, as much more as it draws more tokens: little is
gained, and each token comes later (Recasens et al., "Mind the Memory Gap: Unveiling GPU Bottlenecks
in Large-Batch LLM Inference", 2025, whose advisor sweeps batches; here the price of a step says
it). The cache that the others would have is free for another copy of the model, or its work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outsize.memory.sizes import format_bytes
from outsize.serve.asks import Room
from outsize.serve.played import Arrival
from outsize.serve.price import Price
from outsize.serve.slo import Slo

NEAR = 0.95  # of the most tokens a second
_MOST = 1024  # requests


@dataclass(frozen=True)
class Advice:
    """tokens: of a request on average; few: the fewest requests at once that draw NEAR of the most
    tokens a second, part: what they draw of it; best: those that draw it. cache, free: bytes of
    theirs, and those of the pool beside it; copies: of the model, with as many requests each, that
    these would hold."""

    tokens: int
    few: int
    part: float
    best: int
    cache: int
    free: int
    copies: int

    def __str__(self) -> str:
        if self.few == self.best:
            said = f"of {self.tokens:,} tokens each, {self.best} at once draw the most a second"
        else:
            said = (
                f"of {self.tokens:,} tokens each, {self.few} at once draw {self.part:.0%} of the"
                f" most tokens a second, which {self.best} do"
            )
        rest = f"; the rest has room for {self.copies} more of the model" if self.copies else ""
        return f"{said}: they have {format_bytes(self.cache)} of the cache{rest}"


def enough(price: Price, tokens: int, most: int, slo: Slo) -> tuple[int, int, float]:
    """Of requests with so many tokens in pages, `most` of them at once at most and no more than
    keep what is promised: the fewest that draw NEAR of the most tokens a second, how many draw
    these, and the part that the former draw of it."""

    def rate(count: int) -> float:
        return count / max(price.step(count, count, count * price.past(tokens, 1)), 1e-12)

    kept = most if slo.tpot == float("inf") else price.beside(slo.tpot, most, tokens)
    best = max(range(1, kept + 1), key=rate)
    few = next(count for count in range(1, best + 1) if rate(count) >= NEAR * rate(best))
    return few, best, rate(few) / rate(best)


def advice(room: Room, weights: int, cache: int, arrivals: Sequence[Arrival]) -> Advice:
    """Of a traffic, among numbers that the room's pages hold to their ends, whatever its slots.
    weights, cache: bytes of one worker, the cache's for all pages of the room."""
    whole = sum(one.prompt + one.new for one in arrivals) / len(arrivals)
    deep = sum(one.prompt + one.new // 2 for one in arrivals) // len(arrivals)
    pages = -(-round(whole) // room.page)
    most = max(1, min(_MOST, room.pages // pages))
    few, best, part = enough(room.price, deep, most, room.slo)
    own = min(cache, few * pages * (cache // room.pages))
    free = cache - own
    return Advice(round(whole), few, part, best, own, free, free // max(1, weights + own))
