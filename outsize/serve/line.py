"""Who is served: requests in the order of their coming, with pages and slots. No tensors but those
that logits are drawn from, and no threads."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from outsize.decode.caches import Move
from outsize.decode.paged import Part
from outsize.errors import counted
from outsize.serve.asks import Ask, Counts, Deliver, End, Full, Room
from outsize.serve.awaited import full, until_first, until_room
from outsize.serve.drafts import Drafter
from outsize.serve.pages import books_of
from outsize.serve.policies import Policy, Step, View, first_come, in_time
from outsize.serve.price import Piece
from outsize.serve.request import Draws, Feed, Regime, Request, Shares, foretold
from outsize.serve.slo import Drift, limits, shown
from outsize.serve.waiting import Queue

_KEEP = 0.9  # of what was thought of earlier requests


def _behind(among: Mapping[int, Request], request: Request, order: Step) -> Iterator[Request]:
    """Who has begun and is less urgent than a request, the last one first."""
    for key in itertools.takewhile(lambda key: key != request.key, reversed(order)):
        if among[key].begun:
            yield among[key]


def _refused(counts: Counts, why: str, seconds: float) -> Full:
    counts.refused += 1
    return Full(f"{why}; ask again later", seconds)


class Line:
    """sharing: pages of prompts that begin alike are shared. drafter: makes one for each request,
    None: nothing is drafted. beside: tokens of texts that are looked at and nothing else. clock:
    gives seconds. drift, draws: how steps and draws differ from what is foretold. queue, going,
    drawing: who has no slot, who has one, and those of them whose prompt is through; begins: slots
    that were given; cancelled: keys of who is not gone on with. part_drawn: of the tokens that
    requests may draw, those that they drew.
    regime: that tells texts apart whose tokens are turned otherwise.
    age: of models that weights have been since the start.
    said, slots, order: of the step that was last composed, foretold seconds, how many might go, and
    who does."""

    def __init__(
        self,
        room: Room,
        policy: Policy,
        sharing: bool,
        drafter: Callable[[], Drafter] | None = None,
        clock: Callable[[], float] = time.monotonic,
        regime: Regime | None = None,
    ) -> None:
        self.room, self.counts = room, Counts()
        self.pages = books_of(room, sharing)
        self.policy, self._drafter, self._regime = policy, drafter, regime
        self.clock, self.drift, self.shares = clock, Drift(), Shares()
        self.draws = Draws(room.price.draw)
        self.said, self.slots = 0.0, room.slots
        self.part_drawn = 1.0
        self._slots = list(range(room.slots))[::-1]
        self._keys = itertools.count()
        self.requests: dict[int, Request] = {}
        self.queue, self.going = Queue(), dict[int, Request]()
        self.drawing = dict[int, Request]()
        self._owners, self.cancelled = Counter[str](), list[int]()
        self.order, self._pieces = list[Request](), list[Piece]()
        self.beside = self.begins = self.age = 0

    @property
    def limit(self) -> int:
        """Tokens that a request may have."""
        return min(self.room.context, self.pages.tokens)

    def add(self, ask: Ask, deliver: Deliver) -> int:
        """A request comes; gives its key. Full where too many tokens wait, or it would wait longer
        than is promised."""
        self.refuse_if_full(len(ask.ids), ask.owner)
        ttft, now = self.room.slo.ttft, self.clock()
        came = now if ask.came is None else ask.came
        promised = bool(self.requests) and ttft < math.inf
        if promised and (first := self.wait(len(ask.ids), came, ask.owner)) > ttft:
            raise _refused(
                self.counts,
                f"the first token would come in about {shown(first)}, and {shown(ttft)} is"
                " promised",
                first - ttft,
            )
        key = next(self._keys)
        drafter = None if self._drafter is None else self._drafter()
        self.shares.come(ask.owner, self._owners)
        self._owners[ask.owner] += 1
        first = self.room.price.prompt(len(ask.ids))
        request = Request(key, ask, deliver, list(ask.ids), drafter, first, came)
        self.requests[key] = request
        self.queue.add(request.waits())
        return key

    def refuse_if_full(self, tokens: int, owner: str = "") -> None:
        """Full where so many more of an owner than wait are too many."""
        if full(self, tokens, owner):
            waiting = self.beside + self.queue.tokens
            raise _refused(
                self.counts,
                f"{counted(waiting, 'token', ',')} wait in the queue, which holds"
                f" {self.room.queue:,}",
                until_room(self, tokens),
            )

    def wait(self, tokens: int, came: float | None = None, owner: str = "") -> float:
        """Seconds until the first token of an owner's prompt that comes now, as foretold, from
        `came` on."""
        first = until_first(self, tokens, owner)
        return first if came is None else first + self.clock() - came

    def feeds(self, alike: list[Request] | None = None) -> list[Feed]:
        """What the next step feeds, with pages for it. alike: takes those who draw one token by
        which nothing changes in the books but its number; who gives it feeds them himself."""
        for key in sorted(self.cancelled):
            if key in self.requests:
                self.leave(self.requests[key], End("cancelled"))
        self.cancelled.clear()
        budget, self.slots = _of_step(self, self._drafter is not None)
        view, going = _view(self, self.queue, budget), bool(self.going)
        found = self._composed(in_time(self.policy, view), budget, alike)
        if not self.order and going:  # who is wanted lacks what others have
            found = self._composed(first_come(_view(self, Queue(), budget)), budget, alike)
        price, more = self.room.price, self.draws.more(one.request for one in found if one.draws)
        self.said = foretold(price, self._pieces, more) + price.moving(*self.pages.moving)
        return found

    def moved(self, moves: Sequence[Move]) -> None:
        """These have been made."""
        self.counts.evicted += sum(move.out for move in moves)
        self.counts.fetched += sum(not move.out for move in moves)

    def lost(self, pages: Collection[int]) -> None:
        """What lies below cannot be had any more, and did not come into these pages: who has them
        computes all again."""
        self.counts.lost += len(pages)
        for request in list(self.going.values()):
            if not set(pages).isdisjoint(self.pages.of(request.key)):
                self.interrupt(request)
        self.pages.lost(pages)

    def _composed(
        self, wanted: Step, budget: int, alike: list[Request] | None = None
    ) -> list[Feed]:
        """What is wanted, as far as there are slots and pages for it, and drafts in what is left
        then. alike: as of feeds."""
        found, left, barred = list[Feed](), budget - sum(wanted.values()), False
        order, pieces = self.order, self._pieces = list[Request](), list[Piece]()
        apart, last = alike if alike is not None else [], self.pages.size - 1
        drawing, drafting = self.drawing if alike is not None else {}, list[Feed]()
        requests = self.requests
        for key, count in wanted.items():
            if not count:
                continue
            request = requests[key]
            # One more token, neither the first nor the last, within a page: only numbers change.
            if key in drawing and request.drawn:
                fed = request.fed
                if 0 < fed % (last + 1) < last and request.drawn < request.ask.max_new_tokens - 1:
                    order.append(request)
                    pieces.append((fed, 1, True))
                    apart.append(request)
                    continue
            if request.slot is None and (barred or not self._begin(request, wanted)):
                barred = True  # those behind it do not overtake
                continue
            start, (count, ahead) = request.fed, request.slice(count, self._regime)
            draws = start + count == len(request.ids)
            if self.pages.missing(key, start + count):
                if not self._freed(request, start + count, wanted):
                    continue  # its turn comes when somebody before it has ended
                self.pages.extend(key, start + count)
            assert request.slot is not None
            part = Part(self.pages.of(key), start, count, ahead, request.slot)
            request.told, request.fault, request.draft, request.took = [], "", (), 0.0
            order.append(request)
            pieces.append((start, count, draws))
            found.append(Feed(request, part, request.ids[start : part.stop], 0, draws))
            if request.drafter is not None and count == 1 and draws:
                drafting.append(found[-1])
        if not drafting:
            return found
        drafts = self._drafted(drafting, left)
        self._pieces = [
            each
            for request, piece in zip(order, pieces, strict=True)
            for each in (piece, *((one.part.start, 1, True) for one in drafts.get(request.key, ())))
        ]
        return [each for one in found for each in (one, *drafts.get(one.request.key, ()))]

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
        """A step has fed these, and those that draw have drawn."""
        for request, part, _, place, drew in feeds:
            if place:
                continue  # with the first of the request's
            self.counts.prompt += part.tokens - (drew and request.drawn > 0)
            self.shares.take(request.ask.owner, part.tokens)
            request.fed = part.stop
            if drew and not request.cancelled:
                self._drew(request)
            else:
                self.pages.written(request.key, request.ids, request.fed)
            if request.slot is not None and request.tokens == 1:
                self.drawing[request.key] = request

    def leave(self, request: Request, end: End) -> None:
        """A request is over."""
        if end.reason in ("stop", "length"):
            part = request.drawn / request.ask.max_new_tokens
            self.part_drawn = _KEEP * self.part_drawn + (1 - _KEEP) * part
        if request.slot is None:
            self.queue.remove(request.key)
        self._release(request)
        del self.requests[request.key]
        self._owners[request.owner] -= 1
        if not self._owners[request.owner]:
            del self._owners[request.owner]
        request.deliver(end)

    def lent(self, tokens: int) -> int:
        """An owner of pages for so many tokens, be they taken from requests that go."""
        owner = next(self._keys)
        self.pages.begin(owner, ())
        while self.pages.missing(owner, tokens) > self.pages.left:
            self.interrupt(list(self.going.values())[-1])
        self.pages.extend(owner, tokens)
        return owner

    def _begin(self, request: Request, order: Step) -> bool:
        """Give a request a slot and the pages that are kept of its prompt, where there is room for
        the rest of it, if need be that of those behind it."""
        if not self._slots and next(_behind(self.requests, request, order), None) is None:
            return False
        turned = 0 if self._regime is None else self._regime(len(request.ask.ids))
        among = self.age * (self.room.context + 1) + turned
        request.fed = self.pages.begin(request.key, request.ids, among)
        if not self._freed(request, len(request.ids), order):
            self.pages.end(request.key)
            request.fed = 0
            return False
        if not self._slots:
            self.interrupt(next(_behind(self.requests, request, order)))
        request.fed = self.pages.restore(request.key, request.ids)
        request.slot = self._slots.pop()
        self.begins += 1
        self.queue.remove(request.key)
        late = bool(self.going) and request.key < next(reversed(self.going))
        self.going[request.key] = request
        if late:
            self.going = dict(sorted(self.going.items()))
        if request.tokens == 1:
            self.drawing[request.key] = request
        self.counts.kept += request.fed
        return True

    def _freed(self, request: Request, tokens: int, order: Step) -> bool:
        """Whether pages for so many tokens are free, those of the last ones behind a request taken
        from them; nobody is interrupted in vain, but for pages that several share."""
        lacking = self.pages.missing(request.key, tokens) - self.pages.left
        if lacking <= 0:
            return True
        behind = list(_behind(self.requests, request, order))
        if lacking * self.pages.size > sum(self.pages.room(one.key) for one in behind):
            return False
        for one in behind:
            self.interrupt(one)
            if self.pages.missing(request.key, tokens) <= self.pages.left:
                return True
        return False

    def interrupt(self, request: Request) -> None:
        """Take a request's pages; all its tokens will be fed again, but for those that are kept."""
        self._release(request, again=True)
        request.fed = 0
        self.queue.add(request.waits())
        self.counts.interrupted += 1

    def _release(self, request: Request, again: bool = False) -> None:
        if request.slot is not None:
            self.pages.end(request.key, again)
            self._slots.append(request.slot)
            request.slot = None
            del self.going[request.key]
            self.drawing.pop(request.key, None)

    def _drafted(self, drafting: Sequence[Feed], left: int) -> dict[int, list[Feed]]:
        """By request its draft, behind the token that waits, in pages that nobody has. Each of its
        tokens is fed as if it were the last one that is known."""
        found = dict[int, list[Feed]]()
        for request, part, *_ in drafting:
            assert request.drafter is not None
            room = self.pages.room(request.key) + self.pages.left * self.pages.size
            most = min(
                left,
                request.ask.max_new_tokens - request.drawn - 1,
                room - part.stop,
            )
            request.draft = request.drafter.propose(request.ids, most) if most > 0 else ()
            self.pages.extend(request.key, part.stop + len(request.draft))
            left -= len(request.draft)
            found[request.key] = [
                Feed(request, part._replace(start=part.start + place), (token,), place)
                for place, token in enumerate(request.draft, 1)
            ]
        return found

    def _drew(self, request: Request) -> None:
        found, ask = request.told, request.ask
        request.ids += [one.id for one in found]
        request.drawn += len(found)
        request.fed += max(0, len(found) - 1)  # of a draft what came true
        self.counts.drawn += len(found)
        self.draws.take(request, len(found))
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
        if request.fault:
            self.leave(request, End("error", request.fault))
        elif found[-1].id in ask.stop:
            self.leave(request, End("stop"))
        elif request.drawn == ask.max_new_tokens:
            self.leave(request, End("length"))

    def limits(self) -> tuple[int, int]:
        """Tokens of the next step, and requests at once, that keep what is promised."""
        room = self.room
        if room.slo.tpot == math.inf:
            return room.budget, room.slots
        tpot = room.slo.tpot / self.drift.slowest
        drawing = [one.fed for one in self.drawing.values()]
        more = self.draws.more(self.drawing.values())
        slicing = (one.fed for key, one in self.going.items() if key not in self.drawing)
        depth = max(slicing, default=0)
        return limits(room.price, tpot, drawing, depth, room.budget, room.slots, more)


def _of_step(line: Line, drafts: bool) -> tuple[int, int]:
    """As limits; where all draw, and nobody waits or drafts, no number of tokens is sought."""
    room, some = line.room, len(line.drawing)
    if drafts or line.queue or not 0 < some == len(line.going) or room.slo.tpot == math.inf:
        return line.limits()
    deepest = max(one.fed for one in line.drawing.values())
    more = line.draws.more(line.drawing.values()) / some
    most = room.price.beside(room.slo.tpot / line.drift.slowest, room.slots, deepest, more)
    return min(some, room.budget), most


def _view(line: Line, queue: Queue, budget: int) -> View:
    room, now = line.room, line.clock()
    return View(
        line.going, line.drawing, queue, budget, line.slots, now, room.price, room.slo,
        line.shares.had, line.drift.slowest,
    )  # fmt: skip
