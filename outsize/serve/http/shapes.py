"""Answers of a shape: JSON by a schema, calls of tools, by the grammars of llguidance.

Before each draw the tokens that cannot go on are ruled out, so what comes is of the shape as far as
it comes; an answer that is cut for its length may be a part of it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import llguidance
import numpy as np
import torch
from torch import Tensor

from outsize.data.tokenizer import FileTokenizer, Tokenizer
from outsize.decode.samplers import Sampler
from outsize.errors import OutsizeError
from outsize.serve.calls import CallForm

_LONGEST = 200  # characters of what the grammar says is wrong
_ENDLESS = (
    "nothing is of it, as of a part that refers to itself and to nothing else; expected another way"
    " for it to end, as null beside the reference"
)


class _Bytes:
    """The tokenizer of bytes, as llguidance asks for one."""

    def __init__(self, text: Tokenizer) -> None:
        self.eos_token_id = self.bos_token_id = text.eos
        self.tokens = [bytes((one,)) for one in range(256)] + [b"<|end|>"]
        self.special_token_ids = [text.eos]

    def __call__(self, text: bytes | str) -> Sequence[int]:
        return list(text.encode() if isinstance(text, str) else text)


@dataclass
class Shaped:
    """A sampler whose tokens go on with a shape."""

    inner: Sampler
    matcher: Any

    def __call__(self, logits_V: Tensor, index: int) -> int:
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        self._check()
        scores_V = logits_V.detach().float()
        # The grammar may know fewer ids than the model, whose further ones are no tokens.
        able = np.unpackbits(bits, count=len(scores_V), bitorder="little").astype(bool)
        ruled_V = scores_V.masked_fill(~torch.from_numpy(able), float("-inf"))
        token = self.inner(ruled_V, index)
        self.matcher.consume_token(token)
        self._check()
        return token

    def _check(self) -> None:
        if self.matcher.is_error():
            raise OutsizeError(f"the answer's grammar: {_short(self.matcher.get_error())}")


class Shapes:
    """Of one tokenizer, for a model of so many ids; ends: those that end an answer."""

    def __init__(self, text: Tokenizer, vocab: int, ends: Collection[int]) -> None:
        self._text, self._vocab, self._ends = text, vocab, sorted(ends)

    @cached_property
    def _tokens(self) -> Any:
        own = self._text
        known: Any = llguidance.TokenizerWrapper(_Bytes(own))
        if isinstance(own, FileTokenizer):
            known = own.content
        return llguidance.LLTokenizer(known, n_vocab=self._vocab, eos_token=self._ends)

    def of(self, schema: dict[str, Any]) -> Any:
        """What a JSON schema allows. OutsizeError for one that cannot be compiled."""
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        except ValueError as error:
            raise _refused("response_format", str(error)) from None
        return self._matcher("response_format", grammar)

    def calling(
        self, form: CallForm, tools: dict[str, dict[str, Any]], must: bool, several: bool
    ) -> Any:
        """Answers that may call tools, or must. tools: the schemas of their arguments."""
        added = self._text.added if isinstance(self._text, FileTokenizer) else {}
        special = {name: i for name, i in added.items() if self._tokens.is_special_token(i)}
        return self._matcher("tools", form.grammar(tools, must, several, special))

    def _matcher(self, field: str, grammar: str) -> Any:
        matcher = llguidance.LLMatcher(self._tokens, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # which finds out whether anything can begin
        if matcher.is_error():
            raise _refused(field, matcher.get_error())
        return matcher


def _refused(field: str, why: str) -> OutsizeError:
    return OutsizeError(f"{field}: a schema cannot be compiled: {_short(why)}")


def _short(why: str) -> str:
    """In one line, without the state of the parser that follows."""
    if why.startswith("NoExtensionBias"):
        return _ENDLESS
    return " ".join(why.partition("<state>")[0].split())[:_LONGEST]
