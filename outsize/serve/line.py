"""Who is served: requests in the order of their coming, with pages and slots. No tensors but those
that logits are drawn from, and no threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from outsize.decode.paged import Part
from outsize.errors import OutsizeError, counted
from outsize.serve.asks import Ask, Counts, Deliver, End, Full, Room, Token, told
from outsize.serve.drafts import Drafter
from outsize.serve.pages import Pages
from outsize.serve.policies import Policy, View, Waiting


@dataclass
class Request:
    """ids: the prompt and what was drawn; fed: how many of them are in pages; slot: None while it
    has none; draft: tokens that this step feeds behind them; told, fault: what its draws said."""

    key: int
    ask: Ask
    deliver: Deliver
    ids: list[int]
    drafter: Drafter | None = None
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
        return Waiting(self.key, waiting, begun, not begun or waiting > 1)

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


class Line:
    """sharing: pages of prompts that begin alike are shared. drafter: makes one for each request,
    None: nothing is drafted. beside: tokens of texts that are looked at and nothing else."""

    def __init__(
        self,
        room: Room,
        policy: Policy,
        sharing: bool,
        drafter: Callable[[], Drafter] | None = None,
    ) -> None:
        self.room, self.counts = room, Counts()
        self.pages = Pages(room.pages, room.page, sharing)
        self._policy, self._drafter = policy, drafter
        self._slots = list(range(room.slots))[::-1]
        self._keys = itertools.count()
        self.requests: dict[int, Request] = {}
        self.beside = 0

    @property
    def limit(self) -> int:
        """Tokens that a request may have."""
        return min(self.room.context, self.pages.tokens)

    def add(self, ask: Ask, deliver: Deliver) -> int:
        """A request comes; gives its key. Full where too many tokens wait."""
        self.refuse_if_full(len(ask.ids))
        key = next(self._keys)
        drafter = None if self._drafter is None else self._drafter()
        self.requests[key] = Request(key, ask, deliver, list(ask.ids), drafter)
        return key

    def refuse_if_full(self, tokens: int) -> None:
        """Full where so many more than wait are too many."""
        waiting = self.beside + sum(r.waiting for r in self.requests.values() if not r.begun)
        if waiting and waiting + tokens > self.room.queue:
            self.counts.refused += 1
            raise Full(
                f"{counted(waiting, 'token', ',')} wait in the queue, which holds"
                f" {self.room.queue:,}; ask again later",
                self._wait(waiting),
            )

    def feeds(self) -> list[Feed]:
        """What the next step feeds, with pages for it."""
        for request in [r for r in self.requests.values() if r.cancelled]:
            self.leave(request, End("cancelled"))
        seen = [r.seen() for r in self.requests.values()]
        wanted = self._policy(View(seen, self.room.budget, self.room.slots))
        found, left = list[Feed](), self.room.budget - sum(wanted.values())
        for key, count in sorted(wanted.items()):
            request = self.requests[key]
            if not request.begun and not self._begin(request):
                break  # those behind it do not overtake
            count = min(count, request.waiting)
            if not self._given(request, request.fed + count):
                continue
            assert request.slot is not None
            start, ahead = request.fed, request.waiting - count
            pages = self.pages.of(key)
            part = Part(pages, start, count, ahead, request.slot)
            request.told, request.fault, request.draft = [], None, ()
            found.append(Feed(request, part, request.ids[start : part.stop]))
            if request.drafter is not None and count == 1 and not ahead and left > 0:
                found += self._drafted(request, part, left)
                left -= len(request.draft)
        return found

    def take(self, feeds: Sequence[Feed]) -> None:
        """A step has fed these, and those with nothing ahead have drawn."""
        for request, part, _, place in feeds:
            if place:
                continue  # with the first of the request's
            drew = not part.ahead
            self.counts.prompt += part.tokens - (drew and request.drawn > 0)
            request.fed = part.stop
            if drew and not request.cancelled:
                self._drew(request)
            else:
                self.pages.written(request.key, request.ids, request.fed)

    def leave(self, request: Request, end: End) -> None:
        """A request is over."""
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

    def _begin(self, request: Request) -> bool:
        """Give a request a slot and the pages that are kept of its prompt, where there is room for
        the rest of it; nobody who goes is interrupted for one that has not begun."""
        if not self._slots:
            return False
        request.fed = self.pages.begin(request.key, request.ids)
        if self.pages.missing(request.key, len(request.ids)) > self.pages.left:
            self.pages.end(request.key)
            request.fed = 0
            return False
        request.slot = self._slots.pop()
        self.counts.kept += request.fed
        return True

    def _given(self, request: Request, tokens: int) -> bool:
        """Pages for so many tokens, where need be from those who came later."""
        while self.pages.missing(request.key, tokens) > self.pages.left:
            later = [r for r in self.requests.values() if r.begun and r.key > request.key]
            if not later:
                return False  # its turn comes when somebody older has ended
            self._interrupt(later[-1])
        self.pages.extend(request.key, tokens)
        return True

    def _interrupt(self, request: Request) -> None:
        """Take a request's pages; all its tokens will be fed again."""
        self._release(request)
        request.fed = 0
        self.counts.interrupted += 1

    def _release(self, request: Request) -> None:
        if request.slot is not None:
            self.pages.end(request.key)
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
        for one in found:
            request.deliver(one)
        if request.fault is not None:
            self.leave(request, End("error", str(request.fault)))
        elif found[-1].id in ask.stop:
            self.leave(request, End("stop"))
        elif request.drawn == ask.max_new_tokens:
            self.leave(request, End("length"))

    def _wait(self, tokens: int) -> float:
        """Seconds that so many tokens of prompts take at the pace so far."""
        done = self.counts.prompt + self.counts.drawn
        return tokens * self.counts.busy / done if done else 1.0
