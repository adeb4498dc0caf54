"""Which characters of a chat that is written out are the assistant's, turn by turn.

A template that marks answers says so itself. Where it does not, a turn is found between two
renderings: of the messages before it with the prompt for an answer, and of those with it. The first
is the beginning of the second; where a template writes other things in front of an answer than in
front of a prompt, their tokens agree as far as the prompt goes. What the prompt supplies is no
target, what the assistant says is, and the token that ends the turn; what is written only at the
end of a chat, and white space behind the turn's end, are none.

Many templates write earlier turns otherwise once others follow (they leave out the thinking). A
turn whose rendering is no beginning of the whole chat's is trained on as it was said: in a sample
of its own that ends with it, with the turns before it as the model reads them then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from outsize.data.chats import Message, Turns
from outsize.data.sandbox import Span
from outsize.data.template import END, Template
from outsize.data.tokenizer import Placed, Tokenizer
from outsize.errors import OutsizeError

_TEXTS = ("content", "reasoning_content", "thinking")  # of a message
_BEFORE = 64  # characters between a prompt and the content of an answer


@dataclass
class Sample:
    """A text to train on, and by span of it the weight of what is said there."""

    text: str
    spans: list[tuple[Span, float]] = field(default_factory=list)


def samples(turns: Turns, template: Template, tokenizer: Tokenizer) -> list[Sample]:
    """What a chat is trained as: one text, and one more for each turn that a later text has
    otherwise. OutsizeError for a template that fails, or by which nobody can tell."""
    if template.marks:
        return [_marked(turns, template)]
    reading = _Reading(turns, template, tokenizer)
    found = [Sample(reading.upto(len(turns.messages)))]
    for index, weight in reversed(list(_answers(turns))):
        if weight:
            text, span = reading.answer(index)
            home = next((s for s in found if s.text.startswith(text[: span[1]])), None)
            if home is None:
                found.append(home := Sample(text))
            home.spans.insert(0, (span, weight))
    return [one for one in reversed(found) if one.spans]


def unread(turns: Turns, template: Template, made: Sequence[Sample]) -> Iterator[str]:
    """What of a chat its template writes into none of its samples, whatever it says."""
    for place, message in enumerate(turns.messages):
        for name in _TEXTS:
            said = message.get(name)
            text = said.rpartition("</think>")[2].strip() if isinstance(said, str) else ""
            if text and not any(text in one.text for one in made):
                others = list(turns.messages)
                others[place] = {**message, name: "."}
                if _alike_written(turns, template, others):
                    yield f"message {place + 1}, the {message['role']}'s {name}"


def _alike_written(turns: Turns, template: Template, others: Sequence[Message]) -> bool:
    """Whether a template writes other messages as it does a chat's."""
    try:
        written = template.render(turns.where, others, turns.tools, False)
    except OutsizeError:
        return False
    return written == template.render(turns.where, turns.messages, turns.tools, False)


def _answers(turns: Turns) -> Iterator[tuple[int, float]]:
    """Place and weight of each message of the assistant."""
    own = (i for i, one in enumerate(turns.messages) if one["role"] == "assistant")
    return zip(own, turns.weights, strict=True)


def _marked(turns: Turns, template: Template) -> Sample:
    text, marks = template.render(turns.where, turns.messages, turns.tools, False)
    weights: Sequence[float] = turns.weights
    if not marks:
        raise OutsizeError(f"{turns.where}: the chat template of {template.name} marks no answer")
    if len(marks) != len(weights):
        if len(set(weights)) > 1:
            raise OutsizeError(
                f"{turns.where}: the chat template marks {len(marks)} answers, and the assistant's"
                f" messages are {len(weights)}, with weights of their own; expected as many, or one"
                " weight"
            )
        weights = [weights[0]] * len(marks)
    return Sample(text, list(zip(marks, weights, strict=True)))


@dataclass
class _Reading:
    """A chat, and what its template has made of beginnings of it."""

    turns: Turns
    template: Template
    tokenizer: Tokenizer
    _known: dict[int, str] = field(default_factory=dict)

    def upto(self, count: int) -> str:
        """The first messages, without a prompt."""
        if count not in self._known:
            self._known[count] = self._render(count, False)
        return self._known[count]

    def answer(self, index: int) -> tuple[str, Span]:
        """The messages up to the one of the assistant, and where in them that is."""
        text, before = self.upto(index + 1), self._render(index, True)
        start = len(before) if text.startswith(before) else self._shared(text, before)
        if start < len(before) and start < self._shared(before, self.upto(index)):
            start = self._behind(index, text, before)
            text, start = before + text[start:], len(before)
        return text, (start, start + len(self._said(index, text, start)))

    def _behind(self, index: int, text: str, before: str) -> int:
        """Where in `text` the answer begins, of a template that writes the messages before it in
        another way once it is there: what stands before its content there ends as the prompt does.
        The answer is trained on behind the prompt, as it will be said."""
        content = (self.turns.messages[index].get("content") or "").strip()
        at = text.rfind(content) if content else -1
        near = range(at, max(at - _BEFORE, 0) - 1, -1) if at >= 0 else range(0)
        best = max(near, key=lambda place: _alike(text[:place], before), default=0)
        if not _alike(text[:best], before):
            raise OutsizeError(
                f"{self.turns.where}: the chat template of {self.template.name} writes the messages"
                f" before number {index + 1} in another way once that is there, so that nobody can"
                " tell where the answer is; put {% generation %} ... {% endgeneration %} around it"
                " in the template, or set data.chat.template to another one"
            )
        return best

    def _said(self, index: int, text: str, start: int) -> str:
        """What is a target behind the prompt."""
        ends, said = self.template.ends, text[start:]
        bare = said.rstrip()
        last = _ending(bare, ends)
        if not last:
            return said
        if _ending(bare[: -len(last)].rstrip(), ends) and (other := self._followed(index)):
            shared = self._shared(text, other) - start
            if shared > 0 and not _without(said[shared:], ends):
                said = said[:shared].rstrip()
                return said if _ending(said, ends) else bare
        return bare

    def _followed(self, index: int) -> str:
        """The chat with a message behind the answer; "" where the template takes none."""
        if index + 2 <= len(self.turns.messages):
            return self.upto(index + 2)
        more = [*self.turns.messages[: index + 1], {"role": "user", "content": "."}]
        try:
            return self.template.render(self.turns.where, more, self.turns.tools, False)[0]
        except OutsizeError:
            return ""

    def _shared(self, text: str, other: str) -> int:
        """Characters at the beginning of `text` whose tokens `other` has too."""
        if other.startswith(text):
            return len(text)
        mine = placed(self.tokenizer, text)
        theirs = placed(self.tokenizer, other).ids
        common = min(len(mine.ids), len(theirs))
        differs = (mine.ids[:common] != theirs[:common]).nonzero()[0]
        count = int(differs[0]) if len(differs) else common
        stop = int(mine.ends[count - 1]) if count else 0
        # Bytes of one character are tokens of their own: the last may stand for part of it.
        return stop if other.startswith(text[:stop]) else int(mine.starts[count - 1])

    def _render(self, count: int, prompt: bool) -> str:
        own = self.turns
        try:
            return self.template.render(own.where, own.messages[:count], own.tools, prompt)[0]
        except OutsizeError:
            if count:
                raise
            raise OutsizeError(
                f"{own.where}: message 1 is the assistant's, and the chat template of"
                f" {self.template.name} takes none before the user's; leave that message out"
            ) from None


def _alike(text: str, other: str) -> int:
    """Characters at the end that two texts have in common."""
    both = zip(reversed(text), reversed(other), strict=False)
    return next((i for i, (a, b) in enumerate(both) if a != b), min(len(text), len(other)))


def _ending(text: str, ends: tuple[str, ...]) -> str:
    """The special token that a text ends in, "" for none."""
    return max((one for one in ends if one and text.endswith(one)), key=len, default="")


def _without(text: str, ends: tuple[str, ...]) -> str:
    """A text without special tokens and white space at its end."""
    while True:
        text = text.rstrip()
        last = _ending(text, ends)
        if not last:
            return text
        text = text[: -len(last)]


def placed(tokenizer: Tokenizer, text: str) -> Placed:
    """The tokens of a text that a template has written."""
    return tokenizer.encode_placed(text) if END not in text else _ended(tokenizer, text)


def _ended(tokenizer: Tokenizer, text: str) -> Placed:
    """Of one that says where the end token of bytes is."""
    ids, starts, ends, widths = [], [], [], []
    at = 0
    for number, part in enumerate(text.split(END)):
        if number:
            ids.append(np.array([tokenizer.eos], dtype=np.uint32))
            starts.append(np.array([at - 1]))
            ends.append(np.array([at]))
            widths.append(np.zeros(1, dtype=np.uint32))
        own = tokenizer.encode_placed(part)
        ids.append(own.ids)
        starts.append(own.starts + at)
        ends.append(own.ends + at)
        widths.append(own.widths)
        at += len(part) + 1
    join = np.concatenate
    return Placed(join(ids), join(starts), join(ends), join(widths))
