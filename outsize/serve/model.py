"""The model that `load` gives, whatever its memory and its workers: an nn.Module that generates.

What differs is its Home: where its weights are and what plays steps over them. Weights in memory
are stepped by a Session made for the request, those in files within a budget (files.py) and those
cut over workers (meshed.py) by one that stays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from outsize.collectives import World
from outsize.data.tokenizer import Tokenizer, ends_in, open_tokenizer
from outsize.decode.generate import (
    GREEDY,
    PREFILL_TOKENS,
    Request,
    check_request,
    generate,
    play,
)
from outsize.decode.runs import runs_of
from outsize.decode.samplers import Sampler
from outsize.decode.text import StopStrings, prompt_ids, stream_text
from outsize.errors import OutsizeError
from outsize.memory.ledger import in_grains
from outsize.models.decoder import Decoder
from outsize.models.layout import begun, prompted, without
from outsize.runtime.generating import Generated
from outsize.runtime.session import Session

STOPS_IDS = (
    "stop strings are of texts, and a prompt of token ids is answered by token ids; expected texts,"
    " or no stop strings"
)
BYTES_AND_SPECIALS = range(257, 321)  # vocabularies of models over bytes, rounded up


class Home(Protocol):
    """Where the weights of a model are that is not in memory as a whole."""

    what: str  # the argument of `load` that asked for it
    world: World  # the workers that share it

    @property
    def buffers(self) -> int:
        """Bytes to read through, there whatever is asked."""

    def ready(self, request: Request) -> tuple[Session, int]:
        """What plays the steps of a request, and how many tokens of its prompt are fed at once.
        OutsizeError where it does not fit."""

    def peak(self, request: Request) -> int:
        """Most bytes of tensors on this worker's device while it is served, predicted."""

    def ready_for_rows(self, rows: int, length: int) -> Session:
        """What gives the logits of rows of so many tokens."""

    def __str__(self) -> str:
        """What is said of it before the first token."""

    def timing(self) -> str:
        """What the last request took and held, measured and predicted."""

    def close(self, faulty: bool = False) -> None:
        """Let files, threads and other workers go, once everything has gone to them; after a
        fault without waiting for that."""


class Model(Decoder):
    """A language model: `model(input_ids) -> logits`, `model.generate(prompt)`. Use one with a
    memory budget or a mesh in a `with`, or close it.

    decoder: whose parts it has. home: where its weights are; None: in memory, to be trained and
    saved as those of any module. counts: whether a request is timed and its bytes counted; timing:
    what the last such took and held, measured and predicted.
    """

    counts, timing = False, ""

    def __init__(self, decoder: Decoder, home: Home | None = None) -> None:
        nn.Module.__init__(self)
        self.config, self.origin, self.home = decoder.config, decoder.origin, home
        self.words, self.taken_up = decoder.words, decoder.taken_up
        self.between, self.away = decoder.between, "" if home is None else home.what
        self.prologue, self.blocks = decoder.prologue, decoder.blocks
        self.epilogue = decoder.epilogue

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids (B, S) or (S,), int64, each row a document -> logits (B, S, V) or (S, V);
        without gradients where the weights are not in memory as a whole."""
        if self.home is None:
            return super().forward(input_ids)
        if input_ids.dim() not in (1, 2) or not input_ids.numel():
            raise OutsizeError(
                f"input_ids has shape {tuple(input_ids.shape)}; expected (rows, tokens) or"
                " (tokens,), of at least one token"
            )
        length = input_ids.shape[-1]
        bounds = tuple(range(0, input_ids.numel() + 1, length))
        logits_TV = self.logits(input_ids.flatten().cpu(), bounds)
        return logits_TV.view(*input_ids.shape, logits_TV.shape[-1])

    @torch.no_grad()
    def logits(self, ids_T: Tensor, bounds: tuple[int, ...]) -> Tensor:
        """logits_TV of tokens laid flat, wherever the weights are. ids_T: int64, in the host's
        memory; bounds: cumulative offsets (0, ..., T) of the documents, which see nothing of one
        another."""
        sizes = [stop - first for first, stop in itertools.pairwise(bounds)]
        if self.home is not None:
            return self._laid(self.home.ready_for_rows(len(sizes), max(sizes)), ids_T, bounds)
        with Session(self) as session:
            return self._laid(session, ids_T, bounds)

    def _laid(self, session: Session, ids_T: Tensor, bounds: tuple[int, ...]) -> Tensor:
        device = self.prologue.tokens.weight.device  # known once its home is ready
        before, own = self.config.virtual, bounds
        ids_T, bounds = begun(ids_T, bounds, before)
        sizes = (stop - first for first, stop in itertools.pairwise(bounds))
        positions_T = torch.cat([torch.arange(size, device=device) for size in sizes])
        return without(session.steps.logits(ids_T, positions_T, bounds), own, before)

    @torch.no_grad()
    def generate(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = 128,
        sampling: Sampler = GREEDY,
        stop: Collection[str] = (),
        tokenizer: str | Path | Tokenizer | None = None,
        on_text: Callable[[str], None] | None = None,
        on_ready: Callable[[str], None] | None = None,
        ends: Collection[int] | None = None,
    ) -> str | list[int]:
        """What follows a prompt, as outsize.generate has it, with its draws as one thing. on_ready:
        called before the first token, with a line about where the weights are, "" for those in
        memory. ends: tokens that end a text, by default those of `ends_of`; with them, text
        follows token ids too."""
        as_text = isinstance(prompt, str) or ends is not None
        text = tokenizer_of(self, tokenizer) if as_text else None
        if isinstance(prompt, str):
            assert text is not None
            ids: Sequence[int] = prompt_ids(text, prompt)
        else:
            ids = ids_of(prompt)
        if text is None and StopStrings(stop).strings:
            raise OutsizeError(STOPS_IDS)
        check_request(self, ids, max_tokens)
        request = Request(prompted(ids, self.config.virtual), max_tokens, sampling)
        with self._session(request) as (session, at_once):
            if on_ready is not None:
                on_ready("" if self.home is None else str(self.home))
            if text is None:
                return generate(self, ids, max_tokens, sampling, (), None, session, at_once)
            pieces, ends = [], ends_of(self, text) if ends is None else ends
            for piece in stream_text(
                self, text, ids, max_tokens, sampling, stop, ends, session, at_once
            ):
                pieces.append(piece)
                if on_text is not None:
                    on_text(piece)
            return "".join(pieces)

    @torch.no_grad()
    def scored(self, request: Request) -> Generated:
        """The tokens that follow a request's prompt (virtual tokens included), and of each the log
        of the probability that the model gave it. OutsizeError as of generate."""
        check_request(self, request.ids[self.config.virtual :], request.max_new_tokens)
        with self._session(request) as (session, at_once):
            device = self.prologue.tokens.weight.device  # known once its home is ready
            found = [one for _, one in play([request], session, device, at_once)]
        return Generated([one.token for one in found], [one.logprob for one in found])

    def peak(self, prompt: int, max_tokens: int, sampling: Sampler = GREEDY) -> int:
        """Most bytes of tensors, weights included, that this worker's device will hold while
        `max_tokens` tokens follow a prompt of so many: found by playing the steps on tensors
        without bytes. OutsizeError as of generate."""
        check_request(self, (0,) * prompt, max_tokens)
        request = Request(prompted((0,) * prompt, self.config.virtual), max_tokens, sampling)
        return self._peak(request)

    def close(self) -> None:
        """Let what it has open go: files, threads, other workers. One in memory stays as it is."""
        if self.home is not None:
            self.home.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *fault: object) -> None:
        if self.home is not None:
            self.home.close(fault[0] is not None)

    @contextmanager
    def _session(self, request: Request) -> Iterator[tuple[Session, int]]:
        if self.home is not None:
            session, at_once = self.home.ready(request)
            if self.counts:
                session.count(self.home.buffers)
            yield session, at_once
            if self.counts:
                self.timing = self.home.timing()
            return
        with Session(self, run=None if self.counts else runs_of(self, prompts=False)) as session:
            if self.counts:
                session.count()
            yield session, PREFILL_TOKENS
            if self.counts:
                from outsize.simulate.tokens import pace, probed, seconds

                stages, length = range(len(self.blocks) + 2), PREFILL_TOKENS
                one, some = (
                    pace(self, stages, count).whole(self) for count in (1, probed(request, length))
                )
                token, prompt = seconds(request, length, one, some)
                self.timing = session.timing(self._peak(request), prompt, token)

    def _peak(self, request: Request) -> int:
        if self.home is not None:
            return self.home.peak(request)
        from outsize.simulate.tokens import Share, needs, resident

        held = resident(self)
        weights = sum(in_grains(x.nbytes, held.grain) for x in self.parameters())
        return Share(weights, needs(held, request, PREFILL_TOKENS)).peak


def tokenizer_of(model: Decoder, named: str | Path | Tokenizer | None = None) -> Tokenizer:
    """The tokenizer that a model goes with: the one named, its directory's, or bytes."""
    if named is not None and not isinstance(named, (str, Path)):
        return named
    if named is not None:
        return open_tokenizer(str(named))
    if model.words is not None and (model.words / "tokenizer.json").is_file():
        return open_tokenizer(str(model.words))
    if model.config.vocab in BYTES_AND_SPECIALS:
        return open_tokenizer("bytes")
    raise OutsizeError(
        f"no tokenizer is known for this model of {model.config.vocab} ids; pass"
        " tokenizer=DIRECTORY with a tokenizer.json, or a prompt of token ids"
    )


def ends_of(model: Decoder, text: Tokenizer) -> frozenset[int]:
    """The tokens that end a text: the tokenizer's own, and all that the model's files name."""
    own = frozenset((text.eos,))
    return own if model.origin is None else own | ends_in(model.origin, model.config.vocab)


def ids_of(prompt: Sequence[int] | Tensor) -> list[int]:
    """The token ids of a prompt that is no text. OutsizeError for what is none."""
    given = prompt.tolist() if isinstance(prompt, Tensor) else prompt
    whole = isinstance(given, Sequence) and all(
        isinstance(i, Integral) and not isinstance(i, bool) for i in given
    )
    if not whole:
        raise OutsizeError(
            f"prompt is {shortly(prompt)}; expected a text, or token ids as a list of whole numbers"
        )
    return [int(token) for token in given]


def shortly(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"
