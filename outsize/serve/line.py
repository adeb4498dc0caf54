"""Who is served: requests in the order of their coming, with pages and slots. No tensors but those
that logits are drawn from, and no threads."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from outsize.decode.paged import Part
from outsize.errors import OutsizeError, counted
from outsize.serve.asks import Ask, Counts, Deliver, End, Full, Room, Token, told
from outsize.serve.drafts import Drafter
from outsize.serve.pages import Move, Pages
from outsize.serve.policies import Policy, Step, View, Waiting, first_come
from outsize.serve.price import Price
from outsize.serve.slo import Drift, Load, limits, shown, wait

_KEEP = 0.9  # of what was thought of earlier requests


@dataclass
class Request:
    """ids: the prompt and what was drawn; fed: how many of them are in pages; slot: None while it
    has none; draft: tokens that this step feeds behind them; told, fault: what its draws said;
    first, came, last, spent: as of Waiting."""

    key: int
    ask: Ask
    deliver: Deliver
    ids: list[int]
    drafter: Drafter | None = None
    first: float = 0.0
    came: float = 0.0
    last: float = -1.0
    spent: float = 0.0
    fed: int = 0
    slot: int | None = None
    drawn: int = 0
    cancelled: bool = False
    draft: Sequence[int] = ()
    told: list[Token] = field(default_factory=list)
    fault: OutsizeError | None = None

    @property
    def begun(self) -> bool:
        return self.slot is not None

    @property
    def waiting(self) -> int:
        return len(self.ids) - self.fed

    def seen(self) -> Waiting:
        waiting, begun = len(self.ids) - self.fed, self.slot is not None
        return Waiting(
            self.key, waiting, begun, not begun or waiting > 1, self.fed, self.first,
            self.came, self.last, self.spent, self.ask.owner,
        )  # fmt: skip

    def draw(self, logits_V: Tensor, index: int) -> int:
        """A Sampler that keeps what is told, and ends nothing but its own request. Behind a draft
        nothing is drawn where something else came before."""
        place = index - self.drawn
        if place and not self._goes_on(place):
            return 0
        try:
            token = self.ask.sampler(logits_V, index)
        except OutsizeError as error:
            self.fault = error
            return 0
        self.told.append(told(logits_V, token, self.ask.tops))
        return token

    def _goes_on(self, place: int) -> bool:
        if len(self.told) < place:
            return False
        last = self.told[place - 1].id
        return last == self.draft[place - 1] and last not in self.ask.stop


class Feed(NamedTuple):
    """What a step feeds of a request. place: of its draw among the request's in this step."""

    request: Request
    part: Part
    ids: Sequence[int]
    place: int = 0


def _behind(among: Mapping[int, Request], request: Request, order: Step) -> Iterator[Request]:
    """Who has begun and is less urgent than a request, the last one first."""
    for key in itertools.takewhile(lambda key: key != request.key, reversed(order)):
        if among[key].begun:
            yield among[key]


@dataclass
class Shares:
    """Tokens that each owner has had since last nobody was there, a drawn one as two."""

    had: dict[str, float] = field(default_factory=dict)

    def come(self, owner: str, others: Collection[str]) -> None:
        """A request of an owner comes to those of others: for the time that he was away he gets
        nothing."""
        if not others:
            self.had = {}
        if owner not in others:
            least = min((self.had.get(one, 0.0) for one in others), default=0.0)
            self.had[owner] = max(self.had.get(owner, 0.0), least)

    def take(self, owner: str, tokens: int) -> None:
        self.had[owner] = self.had.get(owner, 0.0) + tokens


def foretold(price: Price, feeds: Sequence[Feed]) -> float:
    """Seconds of a step."""
    tokens, drawn, past = 0, 0, 0.0
    for _, part, _, _ in feeds:
        tokens += part.tokens
        drawn += not part.ahead
        past += price.past(part.start, part.tokens)
    return price.step(tokens, drawn, past)


def _load(request: Request, part: float) -> Load:
    """part: that requests have drawn of the tokens that they might."""
    new, waiting = part * (request.ask.max_new_tokens - request.drawn), request.waiting
    prompt = waiting if waiting > 1 or not request.begun else 0
    return Load(prompt, max(new, 1.0), request.fed, request.begun)


def _refused(counts: Counts, why: str, seconds: float) -> Full:
    counts.refused += 1
    return Full(f"{why}; ask again later", seconds)


class Line:
    """sharing: pages of prompts that begin alike are shared. drafter: makes one for each request,
    None: nothing is drafted. beside: tokens of texts that are looked at and nothing else. clock:
    gives seconds. drift: how steps differ from what is foretold. said, slots: of the step that was
    last composed, foretold seconds and how many might go."""

    def __init__(
        self,
        room: Room,
        policy: Policy,
        sharing: bool,
        drafter: Callable[[], Drafter] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.room, self.counts = room, Counts()
        self.pages = Pages(room.pages, room.page, sharing, room.below, room.price)
        self._policy, self._drafter = policy, drafter
        self.clock, self.drift, self.shares = clock, Drift(), Shares()
        self.said, self.slots = 0.0, room.slots
        self._part_drawn = 1.0  # of the tokens that requests may draw, those that they drew
        self._slots = list(range(room.slots))[::-1]
        self._keys = itertools.count()
        self.requests: dict[int, Request] = {}
        self.beside = 0

    @property
    def limit(self) -> int:
        """Tokens that a request may have."""
        return min(self.room.context, self.pages.tokens)

    def add(self, ask: Ask, deliver: Deliver) -> int:
        """A request comes; gives its key. Full where too many tokens wait, or it would wait longer
        than is promised."""
        self.refuse_if_full(len(ask.ids))
        ttft = self.room.slo.ttft
        if self.requests and ttft < math.inf and (first := self.wait(len(ask.ids))) > ttft:
            raise _refused(
                self.counts,
                f"the first token would come in about {shown(first)}, and {shown(ttft)} is"
                " promised",
                first - ttft,
            )
        key, now = next(self._keys), self.clock()
        drafter = None if self._drafter is None else self._drafter()
        self.shares.come(ask.owner, {r.ask.owner for r in self.requests.values()})
        first = self.room.price.prompt(len(ask.ids))
        self.requests[key] = Request(key, ask, deliver, list(ask.ids), drafter, first, now)
        return key

    def refuse_if_full(self, tokens: int) -> None:
        """Full where so many more than wait are too many."""
        waiting = self.beside + sum(r.waiting for r in self.requests.values() if not r.begun)
        if waiting and waiting + tokens > self.room.queue:
            raise _refused(
                self.counts,
                f"{counted(waiting, 'token', ',')} wait in the queue, which holds"
                f" {self.room.queue:,}",
                self.wait(0),
            )

    def wait(self, tokens: int) -> float:
        """Seconds until the first token of a prompt that comes now, as foretold."""
        loads = [_load(r, self._part_drawn) for r in self.requests.values()]
        loads.append(Load(tokens + self.beside, 0.0))
        seen = [r.seen() for r in self.requests.values() if r.begun]
        return self.drift.slowest * wait(self.room.price, loads, *self._limits(seen))

    def feeds(self) -> list[Feed]:
        """What the next step feeds, with pages for it."""
        for request in [r for r in self.requests.values() if r.cancelled]:
            self.leave(request, End("cancelled"))
        seen = [r.seen() for r in self.requests.values()]
        budget, self.slots = self._limits(seen)
        room, now = self.room, self.clock()
        view = View(seen, budget, self.slots, now, room.price, room.slo, self.shares.had)
        found = self._composed(self._policy(view), budget)
        if not found and any(one.begun for one in seen):  # who is wanted lacks what others have
            begun = replace(view, requests=[r.seen() for r in self.requests.values() if r.begun])
            found = self._composed(first_come(begun), budget)
        self.said = foretold(room.price, found) + room.price.moving(*self.pages.moving)
        return found

    def moved(self, moves: Sequence[Move]) -> None:
        """These have been made."""
        self.counts.evicted += sum(move.out for move in moves)
        self.counts.fetched += sum(not move.out for move in moves)

    def lost(self, pages: Collection[int]) -> None:
        """What lies below cannot be had any more, and did not come into these pages: who has them
        computes all again."""
        self.counts.lost += len(pages)
        for request in [r for r in self.requests.values() if r.begun]:
            if not set(pages).isdisjoint(self.pages.of(request.key)):
                self._interrupt(request)
        self.pages.lost(pages)

    def _composed(self, wanted: Step, budget: int) -> list[Feed]:
        """What is wanted, as far as there are slots and pages for it."""
        found, left, barred = list[Feed](), budget - sum(wanted.values()), False
        for key, count in wanted.items():
            request = self.requests[key]
            if not count:
                continue
            if request.slot is None and (barred or not self._begin(request, wanted)):
                barred = True  # those behind it do not overtake
                continue
            start, waiting, pages = request.fed, request.waiting, self.pages.of(key)
            count = min(count, waiting)
            if start + count > len(pages) * self.pages.size:
                if not self._freed(request, start + count, wanted):
                    continue  # its turn comes when somebody before it has ended
                self.pages.extend(key, start + count)
            assert request.slot is not None
            ahead = waiting - count
            part = Part(pages, start, count, ahead, request.slot)
            request.told, request.fault, request.draft = [], None, ()
            found.append(Feed(request, part, request.ids[start : part.stop]))
            if request.drafter is not None and count == 1 and not ahead and left > 0:
                found += self._drafted(request, part, left)
                left -= len(request.draft)
        return found

    def ran(self, feeds: Sequence[Feed], seconds: float) -> None:
        """A step took so long."""
        said = self.said
        self.counts.steps += 1
        self.counts.busy += seconds
        self.counts.foretold += said
        for feed in feeds:
            feed.request.spent += 0.0 if feed.place else said
        if said > 0:
            self.drift.take(seconds / said)

    def take(self, feeds: Sequence[Feed]) -> None:
        """A step has fed these, and those with nothing ahead have drawn."""
        for request, part, _, place in feeds:
            if place:
                continue  # with the first of the request's
            drew = not part.ahead
            self.counts.prompt += part.tokens - (drew and request.drawn > 0)
            self.shares.take(request.ask.owner, part.tokens)
            request.fed = part.stop
            if drew and not request.cancelled:
                self._drew(request)
            else:
                self.pages.written(request.key, request.ids, request.fed)

    def leave(self, request: Request, end: End) -> None:
        """A request is over."""
        if end.reason in ("stop", "length"):
            part = request.drawn / request.ask.max_new_tokens
            self._part_drawn = _KEEP * self._part_drawn + (1 - _KEEP) * part
        self._release(request)
        del self.requests[request.key]
        request.deliver(end)

    def lent(self, tokens: int) -> int:
        """An owner of pages for so many tokens, be they taken from requests that go."""
        owner = next(self._keys)
        self.pages.begin(owner, ())
        while self.pages.missing(owner, tokens) > self.pages.left:
            self._interrupt([r for r in self.requests.values() if r.begun][-1])
        self.pages.extend(owner, tokens)
        return owner

    def _begin(self, request: Request, order: Step) -> bool:
        """Give a request a slot and the pages that are kept of its prompt, where there is room for
        the rest of it, if need be that of those behind it."""
        if not self._slots and next(_behind(self.requests, request, order), None) is None:
            return False
        request.fed = self.pages.begin(request.key, request.ids)
        if not self._freed(request, len(request.ids), order):
            self.pages.end(request.key)
            request.fed = 0
            return False
        if not self._slots:
            self._interrupt(next(_behind(self.requests, request, order)))
        request.fed = self.pages.restore(request.key, request.ids)
        request.slot = self._slots.pop()
        self.counts.kept += request.fed
        return True

    def _freed(self, request: Request, tokens: int, order: Step) -> bool:
        """Whether pages for so many tokens are free, those of the last ones behind a request taken
        from them; nobody is interrupted in vain, but for pages that several share."""
        lacking = self.pages.missing(request.key, tokens) - self.pages.left
        if lacking <= 0:
            return True
        behind = list(_behind(self.requests, request, order))
        if lacking > sum(len(self.pages.of(one.key)) for one in behind):
            return False
        for one in behind:
            self._interrupt(one)
            if self.pages.missing(request.key, tokens) <= self.pages.left:
                return True
        return False

    def _interrupt(self, request: Request) -> None:
        """Take a request's pages; all its tokens will be fed again, but for those that are kept."""
        self._release(request, again=True)
        request.fed = 0
        self.counts.interrupted += 1

    def _release(self, request: Request, again: bool = False) -> None:
        if request.slot is not None:
            self.pages.end(request.key, again)
            self._slots.append(request.slot)
            request.slot = None

    def _drafted(self, request: Request, part: Part, left: int) -> list[Feed]:
        """A draft behind the token that waits, in pages that nobody has. Each of its tokens is fed
        as if it were the last one that is known."""
        assert request.drafter is not None
        room = len(part.pages) + self.pages.left
        most = min(
            left,
            request.ask.max_new_tokens - request.drawn - 1,
            room * self.pages.size - part.stop,
            self.limit - part.stop,
        )
        request.draft = request.drafter.propose(request.ids, most) if most > 0 else ()
        self.pages.extend(request.key, part.stop + len(request.draft))
        return [
            Feed(request, part._replace(start=part.start + place), (token,), place)
            for place, token in enumerate(request.draft, 1)
        ]

    def _drew(self, request: Request) -> None:
        found, ask = request.told, request.ask
        request.ids += [one.id for one in found]
        request.drawn += len(found)
        request.fed += max(0, len(found) - 1)  # of a draft what came true
        self.counts.drawn += len(found)
        self.pages.written(request.key, request.ids, request.fed)
        if request.draft and request.drafter is not None and found:
            accepted = len(found) - 1
            self.counts.drafted += len(request.draft)
            self.counts.accepted += accepted
            request.drafter.judged(len(request.draft), accepted)
        request.last = self.clock()
        self.shares.take(request.ask.owner, len(found))  # and again when they are fed
        for one in found:
            request.deliver(one)
        if request.fault is not None:
            self.leave(request, End("error", str(request.fault)))
        elif found[-1].id in ask.stop:
            self.leave(request, End("stop"))
        elif request.drawn == ask.max_new_tokens:
            self.leave(request, End("length"))

    def _limits(self, seen: Sequence[Waiting]) -> tuple[int, int]:
        """Tokens of the next step, and requests at once, that keep what is promised."""
        room = self.room
        if room.slo.tpot == math.inf:
            return room.budget, room.slots
        return limits(room.price, room.slo.tpot / self.drift.slowest, seen, room.budget, room.slots)
