"""The engine for texts: prompts in, texts out, many at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from functools import cached_property, partial
from queue import SimpleQueue

from outsize.data.tokenizer import Tokenizer
from outsize.decode.samplers import Sampling
from outsize.decode.text import StopStrings, pieces, prompt_ids
from outsize.errors import OutsizeError
from outsize.serve.asks import Ask, End, Token
from outsize.serve.changed import Watched
from outsize.serve.drafts import DRAFTERS
from outsize.serve.engine import Engine
from outsize.serve.model import STOPS_IDS, Model, ends_of, ids_of, shortly
from outsize.serve.policies import chosen
from outsize.serve.pooling import PLAIN, Pooling, pooling_in
from outsize.serve.room import Served, Wanted, served

Prompt = str | Sequence[int]


class TextEngine:
    """A model that many may ask at once, from any thread; use it in a `with`.

    plan: what it has room for, and how long a token takes. OutsizeError where the memory is too
    small. On a mesh all workers make one: the one that leads is asked, the others go on from their
    `with` when it does.
    """

    def __init__(
        self,
        model: Model,
        text: Tokenizer | None,
        wanted: Wanted,
        policy: str = "mixed",
        draft: str | None = None,
        watched: Watched | None = None,
    ) -> None:
        self.text = text
        self._ends = frozenset[int]() if text is None else ends_of(model, text)
        drafter = None if draft is None else DRAFTERS.get(draft)
        playing = chosen(policy, wanted.slo)
        self.plan: Served = served(model, wanted)
        self._model = model
        self.engine = Engine(
            model, self.plan.room, playing, self.plan.session, drafter, below=self.plan.below,
            watched=watched,
        )  # fmt: skip

    def __enter__(self) -> TextEngine:
        self.engine.start()
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    def close(self) -> None:
        try:
            self.engine.close()
        finally:
            self._model.close()

    @property
    def leads(self) -> bool:
        """Whether this is the worker that is asked."""
        return self.engine.steps.leads

    def generate(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int = 128,
        sampling: Sampling | Sequence[Sampling] = Sampling(),  # noqa: B008  frozen
        stop: Collection[str] = (),
    ) -> list[str | list[int]]:
        """What follows each prompt: a text for a text, token ids for token ids, each what it would
        be alone. OutsizeError, before anything is computed, for a prompt that cannot be served."""
        _check_several("generate", prompts)
        own = _samplings(sampling, len(prompts))
        if StopStrings(stop).strings and not all(isinstance(one, str) for one in prompts):
            raise OutsizeError(STOPS_IDS)
        asks = [self._ask(p, max_tokens, one) for p, one in zip(prompts, own, strict=True)]
        for ask in asks:
            self.engine.check(ask.ids, ask.max_new_tokens)
        ended, over = SimpleQueue[End](), 0
        keys, left = dict[int, int](), list(range(len(asks)))[::-1]
        found = [list[int]() for _ in asks]
        shown = {i: self._shown(stop) for i, p in enumerate(prompts) if stop and isinstance(p, str)}

        # Tokens are put down on the engine's thread: this one is woken by what it has to do alone.
        def take(number: int, one: Token | End) -> None:
            stopped = False
            if isinstance(one, Token):
                found[number].append(one.id)
            try:
                stopped = number in shown and shown[number](_id(one))
            except Exception as error:  # of the tokenizer: nobody else's
                ended.put(End("error", f"prompt {number}: {type(error).__name__}: {error}"))
            if isinstance(one, End):
                ended.put(End("stop") if stopped else one)
            elif stopped and number in keys:
                self.engine.cancel(keys[number])

        def submit() -> None:  # no more than may go at once, so that the queue is others' too
            number = left.pop()
            keys[number] = self.engine.submit(asks[number], partial(take, number))

        try:
            while left and len(keys) < self.engine.room.slots:
                submit()
            while over < len(asks):
                one = ended.get()
                if one.reason in ("error", "cancelled"):
                    raise OutsizeError(one.error or "the engine is closed; expected an open one")
                over += 1
                if left:
                    submit()
        finally:
            for key in keys.values():
                self.engine.cancel(key)
        return [
            "".join(self._pieces(iter(ids), stop)) if isinstance(prompt, str) else ids
            for prompt, ids in zip(prompts, found, strict=True)
        ]

    def stream(
        self,
        prompt: Prompt,
        max_tokens: int = 128,
        sampling: Sampling = Sampling(),  # noqa: B008  frozen
        stop: Collection[str] = (),
    ) -> Iterator[str]:
        """The text that follows a prompt, in pieces that are never empty, as it comes."""
        ask = self._ask(prompt, max_tokens, sampling, text=True)
        with closing(self.engine.tokens(ask)) as tokens:
            yield from self._pieces((one.id for one in tokens), stop)

    def logprobs(self, prompt: Prompt) -> list[float]:
        """Of each token but the first, the log of the probability that the model gave it."""
        return [one.logprob for one in self.engine.logprobs(self._ids(prompt))]

    def embed(self, prompts: Sequence[Prompt], pooling: Pooling | None = None) -> list[list[float]]:
        """A vector of each text, of what the head would multiply; how, the model's directory says
        where nobody does. Texts get what the tokenizer puts around them."""
        pooling = self._pooling if pooling is None else pooling
        _check_several("embed", prompts)
        texts = [self._known().framed(p) if isinstance(p, str) else ids_of(p) for p in prompts]
        return [pooling.vector(self.engine, ids).tolist() for ids in texts]

    @cached_property
    def _pooling(self) -> Pooling:
        """What the model's directory says, if it has one."""
        return PLAIN if self._model.origin is None else pooling_in(self._model.origin)

    def _shown(self, stop: Collection[str]) -> Callable[[int | None], bool]:
        """What is told tokens as they come; says whether one of these strings has."""
        stream, held = self._known().stream(), StopStrings(stop)

        def push(token: int | None) -> bool:
            if token is not None and token not in self._ends:
                held.push(stream.push(token))
            return held.stopped

        return push

    def _pieces(self, tokens: Iterator[int], stop: Collection[str]) -> Iterator[str]:
        return pieces(tokens, self._known().stream(), StopStrings(stop), self._ends)

    def _ask(self, prompt: Prompt, most: int, sampling: Sampling, text: bool = False) -> Ask:
        ends = self._ends if text or isinstance(prompt, str) else frozenset[int]()
        return Ask(tuple(self._ids(prompt)), most, sampling, ends)

    def _ids(self, prompt: Prompt) -> Sequence[int]:
        return prompt_ids(self._known(), prompt) if isinstance(prompt, str) else ids_of(prompt)

    def _known(self) -> Tokenizer:
        if self.text is None:
            raise OutsizeError(
                "no tokenizer is known for this model; pass tokenizer=DIRECTORY with a"
                " tokenizer.json, or prompts of token ids"
            )
        return self.text


def _id(one: Token | End) -> int | None:
    return one.id if isinstance(one, Token) else None


def _check_several(what: str, prompts: Sequence[Prompt]) -> None:
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        raise OutsizeError(f"{what}: prompts is {shortly(prompts)}; expected a list of prompts")


def _samplings(sampling: Sampling | Sequence[Sampling], prompts: int) -> list[Sampling]:
    """One for each prompt."""
    if not isinstance(sampling, (Sampling, Sequence)):
        raise OutsizeError(
            f"generate: sampling is {sampling!r}; expected an outsize.Sampling, or a list of them"
        )
    own = [sampling] * prompts if isinstance(sampling, Sampling) else list(sampling)
    if len(own) != prompts:
        raise OutsizeError(
            f"generate: {len(own)} samplings for {prompts} prompts; expected one for all, or one"
            " each"
        )
    return own
