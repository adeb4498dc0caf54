"""A request that is served, from its coming to its end, and what a step feeds of it and takes. No
tensors but those that logits are drawn from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from outsize.decode.paged import Part
from outsize.errors import OutsizeError
from outsize.serve.asks import Ask, Deliver, Token, told
from outsize.serve.drafts import Drafter
from outsize.serve.price import Piece, Price
from outsize.serve.slo import Load
from outsize.serve.waiting import Waiting


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
    fault: str = ""

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

    def waits(self) -> Waiting:
        return Waiting(
            self.key, self.tokens, self.fed, self.first, self.came, self.last, self.spent,
            self.ask.owner,
        )  # fmt: skip

    def draw(self, logits_V: Tensor, index: int) -> int:
        """A Sampler that keeps what is told, and ends nothing but its own request. Behind a draft
        nothing is drawn where something else came before."""
        place = index - self.drawn
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


def foretold(price: Price, pieces: Iterable[Piece]) -> float:
    """Seconds of a step of these."""
    return price.step(*price.seen(pieces))


def load_of(request: Request, part: float) -> Load:
    """part: that requests have drawn of the tokens that they might."""
    new, waiting = part * (request.ask.max_new_tokens - request.drawn), request.tokens
    prompt = waiting if waiting > 1 or not request.begun else 0
    return Load(prompt, max(new, 1.0), request.fed, request.begun)
