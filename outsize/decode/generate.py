"""Generation: prompts in, tokens out, as many requests at once as there are.

Every request has tokens that wait to be fed: its prompt at first, then the one just drawn. A step
feeds what waits, long prompts in slices, and draws a token for each request that has nothing left
waiting. How a step goes through the model is the `forward` it is given.

N requests of a step, T their tokens laid flat, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outsize import accelerator
from outsize.decode.paged import PAGE, PagedCache, PagedPast, Part, pages_of
from outsize.decode.samplers import Drawn, Sampler, Sampling, drawn
from outsize.errors import OutsizeError, TooLong, counted
from outsize.kernels import rows
from outsize.models.decoder import Decoder
from outsize.models.layout import prompted
from outsize.models.seams import Past

PREFILL_TOKENS = 2048  # prompt tokens fed in one step: bounds the activations, not the prompt

GREEDY = Sampling()


class Forward(Protocol):
    """One step through the model."""

    def __call__(
        self, ids_T: Tensor, positions_T: Tensor, bounds: tuple[int, ...], past: Past
    ) -> Tensor:
        """logits_NV of the last token of each of the N sequences that `bounds` cut ids_T into."""


class Draw(NamedTuple):
    """A token that a step is to draw. row: of the step's sequences; number: of the request's new
    tokens; scored: with its log-probability."""

    row: int
    sampler: Sampler
    number: int
    scored: bool


class TokenStep(Protocol):
    """One step that ends in tokens, the same on all workers that take part in it."""

    def __call__(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        bounds: tuple[int, ...],
        past: Past,
        draws: Sequence[Draw],
    ) -> list[Drawn]:
        """A token for each of the draws. ids_T: in the host's memory."""


def drawing(forward: Forward) -> TokenStep:
    """A step whose logits are here."""

    def step(
        ids_T: Tensor,
        positions_T: Tensor,
        bounds: tuple[int, ...],
        past: Past,
        draws: Sequence[Draw],
    ) -> list[Drawn]:
        logits_NV = forward(ids_T, positions_T, bounds, past).cpu()  # the one wait of a step
        return [drawn(logits_NV[d.row], d.sampler, d.number, d.scored) for d in draws]

    return step


def direct(model: Decoder) -> Forward:
    """The plain way: the model's parts in order; only last tokens go through the head."""

    def forward(ids_T: Tensor, positions_T: Tensor, bounds: tuple[int, ...], past: Past) -> Tensor:
        ctx = model.context(positions_T, bounds, past=past)
        x_TD = model.prologue(accelerator.sent(ids_T, positions_T.device), ctx)
        for block in model.blocks:
            x_TD = block(x_TD, ctx)
        last_N = accelerator.sent(torch.tensor(bounds[1:]) - 1, x_TD.device)
        logits_NV: Tensor = model.epilogue.logits(model.epilogue(x_TD, ctx)[last_N])
        return logits_NV

    return forward


def generate(
    model: Decoder,
    ids: Sequence[int],
    max_new_tokens: int,
    sampling: Sampler = GREEDY,
    stop: Collection[int] = (),
    on_token: Callable[[int], None] | None = None,
    step: TokenStep | None = None,
    prefill_tokens: int = PREFILL_TOKENS,
) -> list[int]:
    """The tokens that follow the prompt `ids`: at most `max_new_tokens`, the last one a token of
    `stop` if one was drawn. `on_token` sees each as it is drawn.

    OutsizeError for an empty prompt, ids outside the vocabulary, more tokens than the model has
    positions for.
    """
    new = []
    for token in stream_tokens(model, ids, max_new_tokens, sampling, stop, step, prefill_tokens):
        new.append(token)
        if on_token is not None:
            on_token(token)
    return new


def stream_tokens(
    model: Decoder,
    ids: Sequence[int],
    max_new_tokens: int,
    sampling: Sampler = GREEDY,
    stop: Collection[int] = (),
    step: TokenStep | None = None,
    prefill_tokens: int = PREFILL_TOKENS,
) -> Iterator[int]:
    """As `generate`, one token at a time; what is not asked for is not computed."""
    check_request(model, ids, max_new_tokens)
    fed = prompted(ids, model.config.virtual)
    request = Request(fed, max_new_tokens, sampling, frozenset(stop))
    device = model.prologue.tokens.weight.device
    steps = play([request], step or drawing(direct(model)), device, prefill_tokens)
    return (one.token for _, one in steps)


@dataclass(frozen=True)
class Request:
    """A prompt, behind virtual tokens if there are some, and how it is gone on with. scored:
    log-probabilities are asked for too."""

    ids: tuple[int, ...]
    max_new_tokens: int
    sampler: Sampler
    stop: frozenset[int] = frozenset()
    scored: bool = False

    @property
    def capacity(self) -> int:
        """Tokens of which something is kept: the last one drawn is not fed again."""
        return len(self.ids) + max(self.max_new_tokens - 1, 0)


def check_request(model: Decoder, ids: Sequence[int], max_new_tokens: int) -> None:
    """OutsizeError for a request that the model cannot serve."""
    config = model.config
    most: object = max_new_tokens
    if not isinstance(most, Integral):
        raise OutsizeError(f"max_tokens is {max_new_tokens}; expected a whole number")
    if max_new_tokens < 0:
        raise OutsizeError(f"max_tokens is {max_new_tokens}; expected 0 or more")
    if not ids:
        raise OutsizeError("the prompt has no tokens; expected at least one, such as the start id")
    kinds: dict[type, object] = {type(token): token for token in ids}
    odd = [one for one in kinds.values() if not isinstance(one, Integral)]
    wrong: Sequence[object] = odd or [token for token in ids if not 0 <= token < config.vocab]
    if wrong:
        raise OutsizeError(
            f"the prompt has token {wrong[0]}; expected 0 to {config.vocab - 1}, the model's "
            "vocabulary: use the model's own tokenizer"
        )
    room = config.learned_positions - config.position_offset - config.virtual
    fed = len(ids) + max(max_new_tokens - 1, 0)  # the last token drawn is not fed again
    if config.learned_positions and fed > room:
        raise TooLong(
            f"a prompt of {counted(len(ids), 'token')} and {max_new_tokens} new need"
            f" {counted(fed, 'position')}; "
            f"this {config.family} model has learned {room}: ask for at most "
            f"{counted(max(room - len(ids) + 1, 0), 'new token')} or shorten the prompt"
        )


def play(
    requests: Sequence[Request],
    step: TokenStep,
    device: torch.device,
    prefill_tokens: int = PREFILL_TOKENS,
) -> Iterator[tuple[int, Drawn]]:
    """(index of the request, what was drawn) in the order in which tokens are drawn, by steps that
    end in tokens."""
    going = Going(requests, device)
    while going.waiting:
        fed = going.feed(going.waiting, prefill_tokens)
        with torch.no_grad(), rows.alone():
            found = step(fed.ids_T, fed.positions_T, fed.past.bounds, fed.past, fed.draws)
        yield from going.take(fed, found)
        going.leave()


class Fed(NamedTuple):
    """What a step feeds. asked: the requests of its draws."""

    ids_T: Tensor
    positions_T: Tensor
    past: PagedPast
    draws: list[Draw]
    asked: list[int]


class Going:
    """Requests under way. waiting: by request, the tokens that wait to be fed; over: those that
    have their last token and have not left."""

    def __init__(self, requests: Sequence[Request], device: torch.device) -> None:
        self._requests, self._device = requests, device
        counts = [pages_of(request.capacity) for request in requests]
        self._pages = [
            range(stop - count, stop)
            for count, stop in zip(counts, itertools.accumulate(counts), strict=True)
        ]
        self._cache = PagedCache(sum(counts), PAGE, len(requests))
        self._fed = [0] * len(requests)
        self.waiting = {i: list(r.ids) for i, r in enumerate(requests) if r.max_new_tokens > 0}
        self.over = set[int]()
        self._count = dict.fromkeys(self.waiting, 0)

    @property
    def left(self) -> int:
        """Tokens that every request may have still."""
        return min(self._requests[i].max_new_tokens - self._count[i] for i in self.waiting)

    def feed(self, some: Iterable[int], most: int = PREFILL_TOKENS) -> Fed:
        """Of these requests one token at least, `most` more together. One that is over is fed what
        it has drawn, and asked for nothing."""
        fed = _slices({i: self.waiting[i] for i in some}, most)
        ahead = [len(self.waiting[i]) - len(ids) for i, ids in fed.items()]
        parts = [
            Part(self._pages[i], self._fed[i], len(ids), more, i)
            for (i, ids), more in zip(fed.items(), ahead, strict=True)
        ]
        past = PagedPast(self._cache, tuple(parts))
        ids_T = torch.tensor([token for ids in fed.values() for token in ids])
        ends = {i: row for row, i in enumerate(fed) if len(fed[i]) == len(self.waiting[i])}
        asked = {i: row for i, row in ends.items() if i not in self.over}
        draws = [
            Draw(row, self._requests[i].sampler, self._count[i], self._requests[i].scored)
            for i, row in asked.items()
        ]
        for index, ids in fed.items():
            self._fed[index] += len(ids)
            self.waiting[index] = ids if index in self.over else self.waiting[index][len(ids) :]
        return Fed(ids_T, past.positions(self._device), past, draws, list(asked))

    def take(self, fed: Fed, found: Sequence[Drawn]) -> list[tuple[int, Drawn]]:
        """(index of the request, what was drawn)."""
        drawn = list(zip(fed.asked, found, strict=True))
        for index, one in drawn:
            self._count[index] += 1
            self.waiting[index] = [one.token]
            request = self._requests[index]
            if one.token in request.stop or self._count[index] == request.max_new_tokens:
                self.over.add(index)
        return drawn

    def leave(self) -> None:
        """Those that are over are fed no more."""
        for index in self.over:
            del self.waiting[index]
        self.over.clear()


def _slices(waiting: dict[int, list[int]], most: int) -> dict[int, list[int]]:
    """What the next step feeds: one token of each request at least, `most` more together."""
    fed = {}
    for index, ids in waiting.items():
        fed[index] = ids[: 1 + most]
        most -= len(fed[index]) - 1
    return fed
