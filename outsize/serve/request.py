"""A request that is served, from its coming to its end, and what a step feeds of it and takes. No
tensors but those that logits are drawn from."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from torch import Tensor

from outsize.decode.paged import Part
from outsize.errors import OutsizeError
from outsize.serve.asks import Ask, Deliver, Token, told
from outsize.serve.drafts import Drafter
from outsize.serve.price import Piece, Price
from outsize.serve.slo import Load
from outsize.serve.waiting import Waiting

_KEEP = 0.9  # of what was thought of earlier draws

Regime = Callable[[int], int]  # as of outsize/models/rope.py, by the tokens of a text


@dataclass
class Request:
    """ids: the prompt and what was drawn; fed: how many of them are in pages; slot: None while it
    has none; draft: tokens that this step feeds behind them; told, fault: what its draws said;
    took: seconds of processor time that those of this step took; more: that a draw takes, of late,
    beyond what is foretold of the likeliest token; first, came, last, spent: as of Waiting."""

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
    fault: str = ""
    took: float = 0.0
    more: float | None = None

    @property
    def begun(self) -> bool:
        return self.slot is not None

    @property
    def tokens(self) -> int:
        return len(self.ids) - self.fed

    @property
    def start(self) -> int:
        return self.fed

    @property
    def owner(self) -> str:
        return self.ask.owner

    def slice(self, count: int, regime: Regime | None) -> tuple[int, int]:
        """So many tokens at most that one step may feed, and the tokens of its text behind them.
        Where rotations go by the length of a text, those of its prompt are turned by the prompt's,
        and a drawn one by that of the text up to itself, however late it is fed: what is fed again
        is told so, too."""
        start, prompt = self.fed, len(self.ask.ids)
        count = min(count, self.tokens)
        if regime is None:
            return count, self.tokens - count
        if start < prompt:
            count = min(count, prompt - start)
            return count, prompt - start - count
        alike = partial(_regime, regime, start)
        return bisect_right(range(1, count + 1), alike(1), key=alike), 0

    def waits(self) -> Waiting:
        return Waiting(
            self.key, self.tokens, self.fed, self.first, self.came, self.last, self.spent,
            self.ask.owner,
        )  # fmt: skip

    def draw(self, logits_V: Tensor, index: int) -> int:
        """A Sampler that keeps what is told, and ends nothing but its own request. Behind a draft
        nothing is drawn where something else came before."""
        place, begin = index - self.drawn, time.thread_time()
        if place and not self._goes_on(place):
            return 0
        try:
            token = self.ask.sampler(logits_V, index)
            self.told.append(told(logits_V, token, self.ask.tops))
        except OutsizeError as error:
            self.fault = str(error)
            return 0
        except Exception as error:  # of a grammar, a bias, a sampler: nobody else's
            self.fault = f"drawing token {index} failed: {type(error).__name__}: {error}"
            return 0
        finally:
            self.took += time.thread_time() - begin
        return token

    def _goes_on(self, place: int) -> bool:
        if len(self.told) < place:
            return False
        last = self.told[place - 1].id
        return last == self.draft[place - 1] and last not in self.ask.stop


def _regime(regime: Regime, start: int, count: int) -> int:
    return regime(start + count)


class Feed(NamedTuple):
    """What a step feeds of a request. place: of its draw among the request's in this step; draws:
    whether it has one."""

    request: Request
    part: Part
    ids: Sequence[int]
    place: int = 0
    draws: bool = True


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


@dataclass
class Draws:
    """How much longer draws take than foretold: by chance, of a few of the likeliest, of a grammar,
    with penalties or log-probabilities. usual: seconds that are foretold of each; mean: more than
    these, of late, which is said of who has not drawn yet."""

    usual: float
    mean: float = 0.0

    def take(self, request: Request, drawn: int) -> None:
        """A step drew so many tokens of a request."""
        if drawn and (request.took or self.mean):
            more = max(0.0, request.took / drawn - self.usual)
            before = more if request.more is None else request.more
            request.more = _KEEP * before + (1 - _KEEP) * more
            self.mean = _KEEP * self.mean + (1 - _KEEP) * more

    def more(self, some: Iterable[Request]) -> float:
        """Seconds beyond what is foretold, of a draw of each."""
        mean = self.mean
        return sum([mean if one.more is None else one.more for one in some]) if mean else 0.0


def foretold(price: Price, pieces: Iterable[Piece], more: float = 0.0) -> float:
    """Seconds of a step of these. more: that draws take beyond their price."""
    tokens, drawn, past = price.seen(pieces)
    return price.step(tokens, drawn, past + more)


def load_of(request: Request, part: float, draws: Draws) -> Load:
    """part: that requests have drawn of the tokens that they might."""
    new, waiting = part * (request.ask.max_new_tokens - request.drawn), request.tokens
    prompt = waiting if waiting > 1 or not request.begun else 0
    more = draws.more((request,)) if not prompt else 0.0
    return Load(prompt, max(new, 1.0), request.fed, request.begun, more)
