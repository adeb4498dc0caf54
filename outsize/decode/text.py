"""Text as it is generated: whole characters only, and never any of a string that ends it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from outsize.decode.generate import GREEDY, PREFILL_TOKENS, TokenStep, stream_tokens
from outsize.decode.samplers import Sampler
from outsize.errors import OutsizeError
from outsize.models.decoder import Decoder

if TYPE_CHECKING:
    from outsize.data.tokenizer import TextStream, Tokenizer


class StopStrings:
    """Lets text through up to the first of the strings that comes; holds back what may be the
    beginning of one. The first to be complete counts, of several the longest."""

    def __init__(self, strings: Collection[str]) -> None:
        some = isinstance(strings, Collection) and not isinstance(strings, (str, bytes))
        if not some or not all(isinstance(one, str) and one for one in strings):
            raise OutsizeError(
                f"stop strings are {strings!r}; expected a list of strings, none of them empty"
            )
        self.strings = tuple(strings)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """What of the text so far can be shown; nothing more once `stopped`."""
        if self.stopped:
            return ""
        text = self._held + text
        found = [(at + len(s), at) for s in self.strings if (at := text.find(s)) >= 0]
        self.stopped = bool(found)
        shown = min(found)[1] if found else len(text) - self._beginning(text)
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """What was held back, if nothing came of it."""
        held, self._held = self._held, ""
        return "" if self.stopped else held

    def _beginning(self, text: str) -> int:
        """Characters at the end of `text` that begin a stop string."""
        longest = max((len(string) - 1 for string in self.strings), default=0)
        for count in range(min(longest, len(text)), 0, -1):
            if any(string.startswith(text[-count:]) for string in self.strings):
                return count
        return 0


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The tokens that a text begins with."""
    check_prompt(prompt)
    return begun(tokenizer, tokenizer.encode(prompt))


def many_ids(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """The same of several, of which Python is let go meanwhile."""
    for one in prompts:
        check_prompt(one)
    return [begun(tokenizer, ids.tolist()) for ids in tokenizer.encode_many(prompts)]


def begun(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """The ids of a text behind what the tokenizer itself puts in front, as the model's other
    programs read a prompt; of no text what documents of training begin with."""
    return [*tokenizer.front, *ids] or [tokenizer.start]


def check_prompt(prompt: str) -> None:
    """Refuse one that no tokenizer can read: bytes of a command line that are not UTF-8, which
    Python hands over as half surrogate pairs."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        begun = prompt[: error.start]
        raise OutsizeError(
            f"prompt is not UTF-8 behind {begun[-40:]!r}; expected text in UTF-8"
        ) from None


def stream_text(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    max_new_tokens: int,
    sampling: Sampler = GREEDY,
    stop_strings: Collection[str] = (),
    stop: Collection[int] | None = None,
    step: TokenStep | None = None,
    prefill_tokens: int = PREFILL_TOKENS,
) -> Iterator[str]:
    """The text that follows `prompt`, or its `prompt_ids`, in pieces that are never empty, as it
    comes.

    Ends before the first of `stop_strings`, at a token of `stop` (by default the tokenizer's eos)
    or after `max_new_tokens`. OutsizeError, before anything is computed, as of `generate`.
    """
    ids = prompt_ids(tokenizer, prompt) if isinstance(prompt, str) else prompt
    ends = frozenset((tokenizer.eos,) if stop is None else stop)
    tokens = stream_tokens(model, ids, max_new_tokens, sampling, ends, step, prefill_tokens)
    return pieces(tokens, tokenizer.stream(), StopStrings(stop_strings), ends)


def pieces(
    tokens: Iterator[int], text: TextStream, stops: StopStrings, ends: Collection[int]
) -> Iterator[str]:
    """The text of tokens, in pieces that are never empty, up to one of `ends` or a stop string."""
    for token in tokens:
        if token in ends:
            break
        if piece := stops.push(text.push(token)):
            yield piece
        if stops.stopped:
            return
    if piece := stops.push(text.finish()) + stops.finish():
        yield piece
