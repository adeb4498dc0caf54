"""Supervised fine-tuning on chats: only what the assistant says is a target.

A line of JSON (or a Parquet row) is a chat in OpenAI's form, {"messages": [{"role", "content"}]}.
An assistant's message may have a "weight" (0 or more), which the loss of its tokens is times.
The chat template of the model's own tokenizer writes it out, rendered as transformers renders it.

What the assistant says is what the template marks ({% generation %}). Where it marks nothing, the
answer is found by rendering beginnings of the chat: the messages before it with the prompt for an
answer, and those with it, must be beginnings of the whole; between their ends is the answer with
the token that ends it. White space that the template puts behind that token is no target.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from outsize.data import SOURCES, Document, Given, Source, SourceKind
from outsize.data.files import SourceFile
from outsize.data.source import held_out
from outsize.data.sources import BadRecordError, ReadLog, from_json, json_lines, parquet_for
from outsize.data.template import Span, Template, template_of
from outsize.errors import OutsizeError, nearest
from outsize.registry import setting, technique

KEY = "data.chat"
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True)
class Chat:
    field: str = setting("messages", "the JSON field or Parquet column that holds the messages")
    long: Literal["refuse", "truncate", "leave"] = setting(
        "refuse", "a chat that is longer than a row: refuse it, truncate it, or leave it out"
    )
    template: Literal["own", "chatml"] = setting(
        "own", "the tokenizer's own chat template, or ChatML for a tokenizer that has none"
    )


@dataclass(frozen=True)
class Turns:
    """A chat that was checked. weights: of the assistant's messages, in order."""

    where: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None
    weights: tuple[float, ...]


@dataclass(frozen=True)
class ChatSource:
    """The chats of files."""

    given: Given
    settings: Chat
    template: Template
    whole = True
    weighed = True

    def identity(self) -> Mapping[str, Any]:
        own, template = self.settings, self.template
        return {
            "source": KEY, "field": own.field, "long": own.long, "template": template.text,
            "special": dict(template.special), "sequence": self.given.sequence,
            "fraction": self.given.fraction,
        }  # fmt: skip

    def documents(self, log: ReadLog) -> Iterator[Document]:
        for file in self.given.files:
            for where, record in records(file, log):
                document = self._fitted(where, self.document(turns_of(where, record, self)), log)
                if document is not None:
                    yield document

    def document(self, turns: Turns) -> Document:
        """A chat as tokens, with the weight of each."""
        text, spans = self.template.spans(turns.where, turns.messages, turns.tools)
        placed = self.given.tokenizer.encode_placed(text)
        weights = np.zeros(len(placed.ids), dtype=np.float32)
        for (start, stop), weight in zip(spans, _by_span(turns, spans), strict=True):
            weights[(placed.starts < stop) & (placed.ends > start)] = weight
        weights[:1] = 0.0  # nothing is there to say it from
        if not weights.any():
            raise OutsizeError(
                f"{turns.where}: no token of the chat is a target; what {self.template.name} marks"
                " as the assistant's is empty"
            )
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        validation = held_out(digest, self.given.fraction)
        return Document(placed.ids, validation, len(text.encode()), weights, placed.widths)

    def _fitted(self, where: str, document: Document, log: ReadLog) -> Document | None:
        """A document that fits in a row, None for one that is left out."""
        most = self.given.sequence + 1  # the first token is read, the last one is said
        if len(document.ids) > most:
            if self.settings.long == "refuse":
                raise OutsizeError(
                    f"{where}: the chat has {len(document.ids)} tokens, more than a row takes"
                    f" ({most}); raise train.sequence, or set {KEY}.long to truncate or leave"
                )
            document = _first(document, most)
            if self.settings.long == "leave" or not document.weights.any():  # type: ignore[union-attr]
                log.long += 1
                return None
            log.cut += 1
        return document


def _first(document: Document, count: int) -> Document:
    """The first tokens of a document."""
    assert document.weights is not None and document.widths is not None
    widths = document.widths[:count]
    return Document(
        document.ids[:count], document.validation, int(widths.sum()), document.weights[:count],
        widths,
    )  # fmt: skip


def _by_span(turns: Turns, spans: Sequence[Span]) -> Sequence[float]:
    """The weight of each span: they are the assistant's messages, in order."""
    if len(spans) == len(turns.weights):
        return turns.weights
    if len(set(turns.weights)) == 1:
        return turns.weights[:1] * len(spans)
    raise OutsizeError(
        f"{turns.where}: the chat template marks {len(spans)} answers, and the assistant's messages"
        f" are {len(turns.weights)}, with weights of their own; expected as many, or one weight"
    )


# -- records ---------------------------------------------------------------------------------------


def records(file: SourceFile, log: ReadLog) -> Iterator[tuple[str, Any]]:
    """What is in a file, each with "file:line" (for Parquet, "file:row")."""
    if file.kind == "text":
        raise OutsizeError(
            f"data file {file.path} is text; {KEY} reads chats from .jsonl and .parquet files"
        )
    end = log.done + file.size
    yield from _lines(file, log) if file.kind == "jsonl" else _rows(file)
    log.done = end


def _lines(file: SourceFile, log: ReadLog) -> Iterator[tuple[str, Any]]:
    for where, line in json_lines(file, log):
        try:
            yield where, from_json(line)
        except BadRecordError as error:
            raise OutsizeError(f"{where}: {error}; expected a chat a line of JSON") from None


def _rows(file: SourceFile) -> Iterator[tuple[str, Any]]:
    parquet, broken = parquet_for(file)
    row = 0
    try:
        with parquet.ParquetFile(file.path) as table:
            for batch in table.iter_batches(batch_size=256):
                for record in batch.to_pylist():
                    row += 1
                    yield f"{file.path}:{row}", record
    except broken as error:
        why = " ".join(str(error).split())[:160]
        raise OutsizeError(f"data file {file.path} not readable as Parquet: {why}") from None


def turns_of(where: str, record: Any, source: ChatSource) -> Turns:
    """A record as a chat. OutsizeError for whatever is not one."""
    field = source.settings.field
    if not isinstance(record, dict):
        raise OutsizeError(f"{where}: expected a JSON object, found {type(record).__name__}")
    if field not in record:
        has = ", ".join(map(repr, record))[:120]
        raise OutsizeError(
            f"{where}: no field {field!r} (fields: {has}); expected a chat,"
            f' {{"{field}": [{{"role": "user", "content": ...}}, ...]}}, or set {KEY}.field'
        )
    messages = record[field]
    if not isinstance(messages, list) or not messages:
        raise OutsizeError(f"{where}: {field} is {_short(messages)}; expected a list of messages")
    checked = [_message(f"{where}: message {i}", one) for i, one in enumerate(messages, start=1)]
    weights = tuple(weight for message, weight in checked if message["role"] == "assistant")
    if not any(weights):
        what = "all messages of the assistant have weight 0" if weights else "no assistant message"
        raise OutsizeError(f"{where}: {what}; expected one to train on, or leave the chat out")
    return Turns(where, [message for message, _ in checked], record.get("tools") or None, weights)


def _message(where: str, message: Any) -> tuple[dict[str, Any], float]:
    """A message without its weight, and that."""
    if not isinstance(message, dict):
        raise OutsizeError(
            f"{where} is {_short(message)}; expected an object with role and content"
        )
    said = {name: value for name, value in message.items() if value is not None}
    role, weight = said.get("role"), said.pop("weight", None)
    if role not in ROLES:
        raise OutsizeError(f"{where} has the role {_short(role)}{nearest(str(role), ROLES)}")
    content = said.get("content")
    if content is None and said.get("tool_calls"):
        content = "(calls)"
    if not isinstance(content, str):
        raise OutsizeError(f"{where} has the content {_short(content)}; expected a string")
    if role != "assistant":
        if weight is not None:
            raise OutsizeError(f"{where} is the {role}'s and has a weight; only the assistant's do")
        return said, 0.0
    if not content.strip():
        raise OutsizeError(f"{where} is the assistant's and empty; expected what it should say")
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if weight is not None and not (number and math.isfinite(weight) and weight >= 0):
        raise OutsizeError(
            f"{where} has the weight {_short(weight)}; expected a finite number, 0 or more"
        )
    return said, 1.0 if weight is None else float(weight)


def _short(value: Any) -> str:
    return repr(value)[:60]


def _open(settings: Chat, given: Given) -> Source:
    template = template_of(given.directory, given.tokenizer, settings.template == "chatml")
    if template is None:
        raise OutsizeError(
            f"tokenizer {given.directory or 'bytes'} has no chat template (chat_template.jinja, or"
            f" chat_template in tokenizer_config.json); put one there, or set {KEY}.template to"
            " chatml"
        )
    return ChatSource(given, settings, template)


technique(KEY, Chat, "chats (OpenAI messages), of which only the assistant's tokens are targets")
SOURCES.add(KEY, SourceKind(_open, weighed=True))
