"""Serving foretold: the requests of a traffic, played through the real policy and the real books of
pages, with a clock that the price of each step moves. No tensors.

The steps are those that the engine would make of the same arrivals. Where nothing can come between
(everybody who is here draws, but for one prompt that is fed in slices, and nobody ends, lacks a
page or comes), many steps are taken at once.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np

from outsize.serve.asks import Ask, End, Full, Room, Token
from outsize.serve.awaited import full
from outsize.serve.line import Line
from outsize.serve.policies import PATIENT, SLICING, Policy
from outsize.serve.request import Feed, Request, foretold
from outsize.serve.slo import Slo

if TYPE_CHECKING:
    from torch import Tensor

    from outsize.serve.price import Price

_TOKEN = Token(0)
_MOST = 256  # steps at once
_ROUNDED = 1e-9  # of a number of steps


@dataclass(frozen=True)
class Arrival:
    """A request. at: seconds; prompt, new: tokens, all of which are drawn; key: who asks."""

    at: float
    prompt: int
    new: int
    key: str = ""


@dataclass
class Fate:
    """What became of a request. first, last: when its tokens came; refused: it was not let in."""

    arrival: Arrival
    first: float = math.nan
    last: float = math.nan
    refused: bool = False

    @property
    def ttft(self) -> float:
        return self.first - self.arrival.at

    @property
    def tpot(self) -> float:
        """Mean seconds from token to token; 0 where there is one."""
        return (self.last - self.first) / max(self.arrival.new - 1, 1)

    def within(self, slo: Slo) -> bool:
        return not self.refused and self.ttft <= slo.ttft and self.tpot <= slo.tpot


@dataclass
class Played:
    """fates: in the order of coming; gaps: (seconds, so many tokens that came so long after the one
    before); busy: seconds in steps; end: when the last token came."""

    fates: list[Fate]
    gaps: list[tuple[float, int]] = field(default_factory=list)
    busy: float = 0.0
    steps: int = 0
    interrupted: int = 0
    end: float = 0.0


Watch = Callable[[Sequence[Feed]], None]


def play(
    room: Room,
    policy: Policy,
    arrivals: Sequence[Arrival],
    sharing: bool = True,
    watch: Watch | None = None,
) -> Played:
    """arrivals: by their seconds; no two prompts begin alike. watch: sees each step, one by one."""
    with _uncollected():
        return _Play(room, policy, arrivals, sharing, watch).run()


@contextmanager
def _uncollected() -> Iterator[None]:
    """While entered, nobody looks for circles of references: steps make none, and looking took an
    eighth of the time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _drawn(logits_V: Tensor, index: int) -> int:
    raise AssertionError("nothing is drawn")


class _Play:
    def __init__(
        self,
        room: Room,
        policy: Policy,
        arrivals: Sequence[Arrival],
        sharing: bool,
        watch: Watch | None,
    ) -> None:
        self._now, self._next = 0.0, 0
        self._line = Line(room, policy, sharing, clock=lambda: self._now)
        self._price, self._watch = room.price, watch
        self._patient, self._slicing = policy in PATIENT, SLICING.get(policy)
        self._fates = dict[int, Fate]()
        self._played = Played([Fate(one) for one in arrivals])

    def run(self) -> Played:
        line, played = self._line, self._played
        while True:
            self._admit()
            if not line.requests:
                if self._next == len(played.fates):
                    break
                self._now = played.fates[self._next].arrival.at
                continue
            begins = line.begins
            alike = None if self._watch is not None else list[Request]()
            feeds = line.feeds(alike)
            line.moved(line.pages.moved())
            assert line.order, "somebody can always go on"
            if self._watch is not None:
                self._watch(feeds)
            self._step(feeds, alike or ())
            if alike is not None and line.begins == begins:
                self._stretch(feeds)
                self._slide()
        played.interrupted, played.end = line.counts.interrupted, self._now
        played.steps, played.busy = line.counts.steps, line.counts.busy
        return played

    def _admit(self) -> None:
        """Who has come until now."""
        fates, now = self._played.fates, self._now
        while self._next < len(fates) and fates[self._next].arrival.at <= now:
            fate = fates[self._next]
            self._next += 1
            if full(self._line, fate.arrival.prompt, fate.arrival.key):  # nobody asks how long
                fate.refused = True
                continue
            ids = (-self._next,) * fate.arrival.prompt
            ask = Ask(ids, fate.arrival.new, _drawn, owner=fate.arrival.key, came=fate.arrival.at)
            try:
                self._fates[self._line.add(ask, self._told(fate))] = fate
            except Full:
                fate.refused = True

    def _told(self, fate: Fate) -> Callable[[Token | End], None]:
        gaps = self._played.gaps

        def deliver(one: Token | End) -> None:
            if one is _TOKEN:
                if fate.first != fate.first:
                    fate.first = self._now
                else:
                    gaps.append((self._now - fate.last, 1))
                fate.last = self._now

        return deliver

    def _step(self, feeds: Sequence[Feed], alike: Sequence[Request]) -> None:
        seconds = self._line.said
        for feed in feeds:
            if not feed.part.ahead:
                feed.request.told = [_TOKEN]
        self._now += seconds
        if alike:
            lasts = dict[float, int]()
            for request in alike:
                lasts[request.last] = lasts.get(request.last, 0) + 1
            self._played.gaps += [(self._now - last, count) for last, count in lasts.items()]
            self._again(alike, 1, seconds)
        self._line.take(feeds)
        self._line.ran(feeds, seconds)

    def _stretch(self, feeds: Sequence[Feed]) -> None:
        """The steps that are like this one, until somebody comes or ends, lacks a page, or
        one goes below."""
        line = self._line
        if any(feed.part.tokens > 1 or feed.part.ahead for feed in feeds):
            return
        going = line.order
        if len(going) != len(line.going) or not all(request.begun for request in going):
            return
        if line.queue and (not self._patient or len(going) < line.slots):
            return  # others may begin, or be fed
        steps = min(_MOST, min(r.ask.max_new_tokens - r.drawn for r in going) - 1)
        if len(going) * (1 + steps // line.pages.size) > line.pages.quiet:
            while steps > 0 and self._lacking(going, steps) > line.pages.quiet:
                steps //= 2
        if steps <= 0:
            return
        times = self._times(going, min(steps, self._until_next(going)))
        if self._next < len(self._played.fates):
            comes = self._played.fates[self._next].arrival.at
            steps = min(steps, int(np.searchsorted(times, comes)))
        self._took(going, np.diff(times[: steps + 1]).tolist(), float(times[steps]))

    def _took(self, drawing: Sequence[Request], gaps: Sequence[float], end: float) -> None:
        """Steps of so many seconds, in which each of these drew."""
        line, before, self._now = self._line, self._now, end
        self._again(drawing, len(gaps), end - before)
        line.counts.steps += len(gaps)
        line.counts.busy += end - before
        if drawing:
            self._played.gaps += zip(gaps, repeat(len(drawing)), strict=False)

    def _slide(self) -> None:
        """The steps that feed slices of the one prompt that is not through, beside everybody's next
        token, but for its last one."""
        line, policy = self._line, self._slicing
        prompts = [one for key, one in line.going.items() if key not in line.drawing]
        if policy is None or len(prompts) != 1 or len(line.order) != len(line.going):
            return
        one, drawing = prompts[0], list(line.drawing.values())
        if line.queue and (policy.overtaken or next(iter(line.queue)).key < one.key):
            return
        least = min((r.ask.max_new_tokens - r.drawn for r in drawing), default=_MOST)
        steps, lacking = min(_MOST, least - 1), line.pages.missing(one.key, len(one.ids))
        if steps <= 0 or lacking + self._lacking(drawing, steps) > line.pages.quiet:
            return
        start, gaps, end = one.fed, list[float](), self._now
        for count, seconds in self._sliced(policy.tokens, one, drawing, steps):
            start, end = start + count, end + seconds
            gaps.append(seconds)
        if not gaps:
            return
        line.pages.extend(one.key, start)
        line.pages.written(one.key, one.ids, start)
        line.shares.take(one.ask.owner, start - one.fed)
        one.spent += end - self._now
        one.fed = start
        self._took(drawing, gaps, end)
        if one.tokens == 1:
            line.drawing[one.key] = one

    def _sliced(
        self,
        tokens: Callable[[Price, int], int],
        one: Request,
        drawing: Sequence[Request],
        steps: int,
    ) -> Iterator[tuple[int, float]]:
        """Of each step, until somebody comes: tokens of the prompt, and seconds."""
        line, price, some, start, now = self._line, self._price, len(drawing), one.fed, self._now
        fates, reach, waiting = self._played.fates, self._price.reach, one.tokens
        comes = fates[self._next].arrival.at if self._next < len(fates) else math.inf
        most, tpot = tokens(price, line.room.budget), line.room.slo.tpot / line.drift.slowest
        for seen in self._seen(drawing, steps).tolist():
            limit = most
            if drawing and tpot < math.inf:
                limit = price.most(tpot, some, most, price.reads(seen, seen), start)
            count = limit - some
            if now >= comes or not 0 < count < waiting:
                return
            visited = seen + count * min(start + count // 2, reach)
            seconds = price.step(limit, some, price.reads(visited, seen + min(start, reach)))
            yield count, seconds
            start, waiting, now = start + count, waiting - count, now + seconds

    def _until_next(self, going: Sequence[Request]) -> int:
        """Steps that are surely enough until somebody comes: later ones take no less."""
        if self._next == len(self._played.fates):
            return _MOST
        step = foretold(self._price, [(request.fed, 1, True) for request in going])
        left = self._played.fates[self._next].arrival.at - self._now
        return _MOST if left >= _MOST * step else 2 + int(left / step * (1 + _ROUNDED))

    def _again(self, going: Sequence[Request], steps: int, seconds: float) -> None:
        """What so many steps leave in the books."""
        pages, now, fates, new = self._line.pages, self._now, self._fates, [_TOKEN.id] * steps
        size, owners = pages.size, dict[str, int]()
        for request in going:
            before, after, owner = request.fed, request.fed + steps, request.ask.owner
            owners[owner] = owners.get(owner, 0) + 2 * steps
            request.ids += new
            request.fed = after
            request.drawn += steps
            request.last = fates[request.key].last = now
            request.spent += seconds
            if not before % size or before // size < after // size:
                pages.extend(request.key, after)
                pages.written(request.key, request.ids, after)
        for owner, tokens in owners.items():
            self._line.shares.take(owner, tokens)

    def _lacking(self, going: Sequence[Request], steps: int) -> int:
        return sum(self._line.pages.missing(r.key, r.fed + steps) for r in going)

    def _times(self, going: Sequence[Request], steps: int) -> np.ndarray:
        """(1 + steps,) seconds of the clock, now and behind each step."""
        price, count = self._price, len(going)
        seen = self._seen(going, steps)
        past = price.reads(seen, seen)
        computed = price.host + price.blocks(count) + price.head(count) + past
        return np.cumsum(np.concatenate(([self._now], np.maximum(price.reading, computed))))

    def _seen(self, drawing: Sequence[Request], steps: int) -> np.ndarray:
        """(steps,) cached tokens that theirs see in each step."""
        starts = np.array([r.fed for r in drawing], int)[:, None] + np.arange(steps)
        seen: np.ndarray = np.minimum(starts, self._price.reach).sum(axis=0)
        return seen
