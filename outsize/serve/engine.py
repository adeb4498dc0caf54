"""The engine: requests of any age in one step after another, on one thread.

A step feeds tokens of as many requests as a policy says, prompts and single tokens alike, and draws
one for each that has none left waiting (Yu et al., "Orca", 2022). What a token is depends on its
request alone: on its tokens, seed and place, not on the batch, the slices of its prompt, kept pages
or interruptions. Pages: Kwon et al., "PagedAttention", 2023.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

import torch
from torch import Tensor

from outsize.decode.generate import Draw, check_request
from outsize.decode.paged import Part
from outsize.errors import OutsizeError, TooLong, counted
from outsize.hardware.host import gather_huge
from outsize.kernels import native, rows
from outsize.kernels.pages import AS_STORED
from outsize.launch.heartbeat import Heartbeat
from outsize.models.decoder import typed
from outsize.models.layout import prompted
from outsize.models.rope import regimes
from outsize.runtime.session import Session
from outsize.serve.asks import Ask, Deliver, End, Room, Token, told
from outsize.serve.below import Below
from outsize.serve.changed import Watched, begin_anew
from outsize.serve.drafts import Drafter
from outsize.serve.line import Line
from outsize.serve.model import Model
from outsize.serve.policies import Policy
from outsize.serve.probed import scattered
from outsize.serve.request import Feed
from outsize.serve.steps import Steps


@dataclass
class _Whole:
    """A text that is looked at as a whole. ids: behind virtual ones; hidden: what the head would
    multiply is asked for, else logits; take: called with those of each slice; owner: of pages,
    None before it begins; seen: tokens of it."""

    ids: tuple[int, ...]
    hidden: bool
    take: Callable[[Tensor], None]
    owner: int | None = None
    seen: int = 0
    error: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def see(self, steps: Steps, pages: Sequence[int], slot: int, count: int, virtual: int) -> None:
        """So many more of its tokens, in pages that it has until it is over."""
        first, some = self.seen, self.ids[self.seen : self.seen + count]
        self.seen += len(some)
        part = Part(pages, first, len(some), len(self.ids) - self.seen, slot)
        self.take(steps.look(part, some, self.hidden)[max(0, virtual - first) :])


class Engine:
    """Serves a model. Use it in a `with`, or `start` and `close` it.

    Any thread may ask; the engine's own takes the steps, and sleeps while nobody asks. session:
    what plays steps over weights that are not in memory as a whole. drafter: makes one for each
    request, where what layers keep is of single tokens. below: where pages go that are pushed out,
    closed with it. wholes: texts that are looked at. watched: sees weights that somebody changes.
    fault: what has ended it, if something has; failed: called then, once all are told.

    On a mesh every worker has one, of like room. One of them leads, and is asked; the others follow
    it, and are closed when it is. pulse: told what it does.
    """

    def __init__(
        self,
        model: Model,
        room: Room,
        policy: Policy,
        session: Session | None = None,
        drafter: Callable[[], Drafter] | None = None,
        pulse: Heartbeat | None = None,
        below: Below | None = None,
        watched: Watched | None = None,
    ) -> None:
        assert (below is None) == (not room.below), "the room says how many pages may lie below"
        weight = model.prologue.tokens.weight
        native.ready(weight, not model.config.rounded, room.cache != AS_STORED)
        self.model, self.room, self.below = model, room, below
        self.steps = Steps(model, room, session, pulse)
        left = [one for block in typed(model.blocks) for one in block.mixer.states(weight.dtype)]
        # What a whole sequence leaves is not there for its first tokens alone.
        sharing = all(one.per == "token" for one in left)
        turned = regimes(model.config.ropes.values())
        self.line = Line(room, policy, sharing, drafter if sharing else None, regime=turned)
        self.wholes: list[_Whole] = []
        self._scattered = scattered(model) if model.home is None else []
        self._watched, self._came = watched, False
        self._turn = False  # of a whole text, where requests go on too
        self._wake = threading.Condition()
        self._closing = False
        self.fault: BaseException | None = None
        self.failed: Callable[[], None] = lambda: None
        self._last = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="outsize-engine", daemon=True)

    def start(self) -> None:
        """OutsizeError for one that has been closed."""
        _refuse_if(self._closing)
        self._thread.start()

    def close(self) -> None:
        """What has begun is cancelled. One that follows waits for the one that leads to be closed,
        and raises what went wrong in its own steps."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join()
        self.steps.close()
        if self.below is not None:
            self.below.close()
        if self.fault is not None and not self.steps.leads:
            raise self.fault

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    @property
    def limit(self) -> int:
        """Tokens that a request may have."""
        return self.line.limit - self.model.config.virtual

    def check(self, ids: Sequence[int], max_new_tokens: int) -> None:
        """OutsizeError for what can never be served."""
        if len(ids) <= self.limit or not isinstance(max_new_tokens, int):
            check_request(self.model, ids, max_new_tokens)  # of what is too long no token
        needed = len(ids) + max(max_new_tokens - 1, 0)
        if needed > self.limit:
            raise TooLong(
                f"{counted(len(ids), 'token')} and {max_new_tokens} new ones need room for"
                f" {needed}; a request has room for {self.limit}: ask for fewer, or serve with more"
                " --context"
            )

    def submit(self, ask: Ask, deliver: Deliver) -> int:
        """Ask; gives the key of the request. deliver: called with each token and the end.

        OutsizeError for what can never be served, Full where too many wait.
        """
        self.check(ask.ids, ask.max_new_tokens)
        if ask.max_new_tokens == 0:
            deliver(End("length"))
            return -1
        with self._wake:
            self._refuse_if_over()
            ids = prompted(ask.ids, self.model.config.virtual)
            key = self.line.add(replace(ask, ids=ids), deliver)
            self._came = True
            self._wake.notify()
        return key

    def cancel(self, key: int) -> None:
        """A request that may be over already is not gone on with."""
        with self._wake:
            if key in self.line.requests:
                self.line.requests[key].cancelled = True
                self.line.cancelled.append(key)
                self._wake.notify()

    def tokens(self, ask: Ask) -> Generator[Token, None, None]:
        """The tokens that follow a prompt, as they come; who reads no more cancels. OutsizeError as
        of submit, and where the engine ends it."""
        came = SimpleQueue[Token | End]()
        key = self.submit(ask, came.put)
        try:
            while isinstance(one := came.get(), Token):
                yield one
        finally:
            self.cancel(key)
        if one.reason in ("error", "cancelled"):
            raise OutsizeError(one.error or "the engine is closed; expected an open one")

    def logprobs(self, ids: Sequence[int], tops: int = 0) -> list[Token]:
        """Of each token but the first, the log of the probability that the model gave it behind
        those before, with those of the likeliest ones."""
        found = list[Token]()

        def take(logits_TV: Tensor) -> None:
            behind = ids[len(found) + 1 :]
            rows_TV = zip(logits_TV.cpu(), behind, strict=False)
            found.extend(told(logits_V, token, tops) for logits_V, token in rows_TV)

        self.look(ids, False, take)
        if any(math.isnan(one.logprob) for one in found):
            raise OutsizeError(
                "the model gave logits for this text that are not finite; expected numbers: check"
                " its weights, or use a wider dtype"
            )
        return found

    def look(self, ids: Sequence[int], hidden: bool, take: Callable[[Tensor], None]) -> None:
        """All of a text: logits_TV, or h_TE, what the head would multiply. take: called with those
        of one slice after another, on the engine's thread. Errors as of submit."""
        self.check(ids, 1)
        one = _Whole(prompted(ids, self.model.config.virtual), hidden, take)
        with self._wake:
            self._refuse_if_over()
            self.line.refuse_if_full(len(ids))
            self.wholes.append(one)
            self._came = True
            self.line.beside += len(one.ids)
            self._wake.notify()
        one.done.wait()
        if one.error is not None:
            raise one.error

    @property
    def busy(self) -> tuple[int, int]:
        """Requests that have begun, and those that wait."""
        with self._wake:
            return len(self.line.going), len(self.line.queue)

    def stuck(self, seconds: float) -> bool:
        """Whether somebody waits and no step has ended for so long, or none ever will."""
        waits = bool(self.line.requests or self.wholes)
        return self.fault is not None or (waits and time.monotonic() - self._last > seconds)

    def _refuse_if_over(self) -> None:
        if not self.steps.leads:
            raise OutsizeError(f"this worker follows rank {self.steps.leader}; ask there")
        if self.fault is not None:
            raise OutsizeError(f"the engine has failed: {self.fault}")
        _refuse_if(self._closing)

    def _run(self) -> None:
        try:
            with torch.no_grad(), rows.alone():
                self._lead() if self.steps.leads else self.steps.follow()
        except BaseException as error:  # whoever waits is told, and health says so
            self.fault = error
        end = End("cancelled") if self.fault is None else End("error", str(self.fault))
        with self._wake:
            self._closing = True
            for request in list(self.line.requests.values()):
                request.deliver(end)
            self.line.requests.clear()
            for one in self.wholes:
                one.error = OutsizeError(f"the engine has ended: {self.fault or 'it was closed'}")
                one.done.set()
        if self.fault is not None:
            self.failed()

    def _lead(self) -> None:
        def asked() -> bool:
            return bool(self.line.requests or self.wholes or self._closing)

        while not self._closing:
            with self._wake:  # as long as the others may wait
                idle = 0 if self._scattered else self.steps.idle()
                found = asked() or self._wake.wait_for(asked, idle)
                self._last = time.monotonic()
            if found:
                self.step()
            elif self._scattered:  # as long as nobody waits
                gather_huge(self._scattered.pop(0))
            else:
                self.steps.rest()
        self.steps.end()

    def step(self) -> None:
        """One step, on the engine's thread, or where that was not started."""
        with self._wake:
            if self._closing:
                return
            if self._watched is not None:
                came, self._came = self._came, False
                if self._watched.changed(came):
                    _renew(self, self._wake)
            self._turn = bool(self.wholes) and not (self._turn and self.line.requests)
            whole = self.wholes[0] if self._turn else None
            begin = time.perf_counter()
            feeds = self.line.feeds() if whole is None else []
        if whole is not None:
            self._see(whole)
        elif feeds and _settled(self, self._wake):
            self._step(feeds)
            with self._wake:
                self.line.ran(feeds, time.perf_counter() - begin)

    def _step(self, feeds: Sequence[Feed]) -> None:
        fed = [token for feed in feeds for token in feed.ids]
        draws = [
            Draw(row, one.request.draw, one.request.drawn + one.place, False)
            for row, one in enumerate(feeds)
            if one.draws
        ]
        self.steps.feed([feed.part for feed in feeds], fed, draws)
        with self._wake:
            self.line.take(feeds)

    def _see(self, one: _Whole) -> None:
        """A slice of a text, as long as a step may be; the next one behind others' step."""
        with self._wake:
            if one.owner is None:
                one.owner = self.line.lent(len(one.ids))
            pages, count = self.line.pages.of(one.owner), self.line.limits()[0]
        _settled(self, self._wake)
        try:
            one.see(self.steps, pages, self.room.slots, count, self.model.config.virtual)
        except Exception as error:
            one.error = error
            raise
        finally:
            if one.error is not None or one.seen == len(one.ids):
                _over(self, one, self._wake)


def _refuse_if(closed: bool) -> None:
    if closed:
        raise OutsizeError("the engine is closed; expected an open one")


def _over(engine: Engine, one: _Whole, lock: AbstractContextManager[object]) -> None:
    """A text that has begun has been looked at, or is refused. lock: of the line."""
    assert one.owner is not None, "it has begun"
    with lock:
        engine.wholes.remove(one)
        engine.line.pages.end(one.owner)
        engine.line.beside -= len(one.ids)
    one.done.set()


def _renew(engine: Engine, lock: AbstractContextManager[object]) -> None:
    """Go on with weights that somebody has changed. Under the lock, so that nobody comes between
    this and the step."""
    engine.steps.renew()
    begin_anew(engine.line)
    for one in [one for one in engine.wholes if one.seen]:
        one.error = OutsizeError("the weights were changed while this text was looked at")
        _over(engine, one, lock)


def _settled(engine: Engine, lock: AbstractContextManager[object]) -> bool:
    """Have the cache as the books do; whether all is there that the next step needs. lock: of the
    line."""
    line, below = engine.line, engine.below
    with lock:
        changed, line.pages.changed = line.pages.changed, {}
    if changed:
        engine.steps.hold(changed)
    return below is None or below.settle(line, engine.steps.page, lock)
