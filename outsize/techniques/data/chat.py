"""Supervised fine-tuning on chats: only what the assistant says is a target.

A record is a chat in one of the forms of outsize/data/chats.py. An assistant's message may have a
"weight" (0 or more), which the loss of its tokens is times. The chat template of the model's own
tokenizer writes it out, or one that is named; outsize/data/targets.py says which of its tokens are
targets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from outsize.data import SOURCES, Document, Given, Source, SourceKind
from outsize.data.chats import Form, Turns, form_of, turns_of
from outsize.data.files import SourceFile
from outsize.data.records import BadRecordError, records
from outsize.data.source import held_out
from outsize.data.sources import ReadLog
from outsize.data.targets import Sample, placed, samples, unread
from outsize.data.template import NAMED, OWN, Template, template_of, template_text
from outsize.errors import OutsizeError
from outsize.registry import setting, technique

KEY = "data.chat"


@dataclass(frozen=True)
class Chat:
    form: Literal["auto", "messages", "sharegpt", "completion", "alpaca"] = setting(
        "auto", "of the records; auto: each one's fields say it"
    )
    field: str = setting("messages", "the JSON field or Parquet column that holds the messages")
    long: Literal["truncate", "leave", "refuse"] = setting(
        "truncate", "a chat longer than a row: keep its beginning, leave it out, or refuse it"
    )
    template: str = setting(
        OWN, f"own: the tokenizer's; else a file of Jinja, or one of {', '.join(NAMED)}"
    )


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
            "source": KEY, "field": own.field, "form": own.form, "long": own.long,
            "template": template.text, "special": dict(template.special),
            "sequence": self.given.sequence, "fraction": self.given.fraction,
        }  # fmt: skip

    def documents(self, log: ReadLog) -> Iterator[Document]:
        for file in self.given.files:
            for turns in self._chats(file, log):
                made = samples(turns, self.template, self.given.tokenizer)
                log.apart += len(made) - 1
                for what in unread(turns, self.template, made):
                    log.unread += 1
                    log.unread_at = log.unread_at or f"{turns.where}: {what}"
                first = made[-1].text  # of the whole chat: all of it is in one split
                for one in made:
                    document = self._fitted(self._document(turns.where, one, first, log), log)
                    if document is not None:
                        yield replace(document, part=file.part)

    def _chats(self, file: SourceFile, log: ReadLog) -> Iterator[Turns]:
        """The chats of a file. A file of a directory that has none is left out."""
        own, end = self.settings, log.done + file.size
        if file.kind == "text":
            if file.named:
                raise OutsizeError(
                    f"data file {file.path} is text; {KEY} reads chats from .jsonl, .json, .csv and"
                    " .parquet files"
                )
            log.ignored += 1
            return
        form: Form | None = None if own.form == "auto" else own.form
        try:
            for number, (where, record) in enumerate(records(file, log.told)):
                if isinstance(record, BadRecordError):
                    raise OutsizeError(f"{where}: {record}; expected chats, each a JSON object")
                if not (number or file.named or form or form_of(record, own.field)):
                    log.skip(where, "not a chat, so the file is left out")
                    break
                yield turns_of(where, record, own.field, form)
        except OSError as error:
            why = error.strerror or error
            raise OutsizeError(f"data file {file.path} cannot be read: {why}") from None
        log.done = end

    def _document(self, where: str, sample: Sample, whole: str, log: ReadLog) -> Document:
        """A text as tokens, with the weight of each."""
        tokens = placed(self.given.tokenizer, sample.text)
        weights = np.zeros(len(tokens.ids), dtype=np.float32)
        for (start, stop), weight in sample.spans:
            said = (tokens.starts < stop) & (tokens.ends > start)
            over = (said & (tokens.starts < start)).nonzero()[0]  # what the prompt ends in, too
            if len(over):
                before = placed(self.given.tokenizer, sample.text[:start]).ids
                said[over] = [at >= len(before) or before[at] != tokens.ids[at] for at in over]
            weights[said] = weight
            log.answers += 1
            log.unended += not sample.text[start:stop].rstrip().endswith(self.template.stops)
        weights[:1] = 0.0  # nothing is there to say it from
        if not weights.any():
            raise OutsizeError(
                f"{where}: no token of the chat is a target; what {self.template.name} marks"
                " as the assistant's is empty"
            )
        digest = hashlib.blake2b(whole.encode(), digest_size=16).digest()
        validation = held_out(digest, self.given.fraction)
        size = len(sample.text.encode())
        return Document(tokens.ids, validation, size, weights, tokens.widths, where)

    def _fitted(self, document: Document, log: ReadLog) -> Document | None:
        """A document that fits in a row, None for one that is left out."""
        most = self.given.sequence + 1  # the first token is read, the last one is said
        if not self.given.sequence or len(document.ids) <= most:
            return document
        if self.settings.long == "refuse":
            raise OutsizeError(
                f"{document.where}: the chat has {len(document.ids)} tokens, more than a row takes"
                f" ({most}); raise train.sequence, or set {KEY}.long to truncate or leave"
            )
        first = document.first(most)
        if self.settings.long == "leave" or not first.targets:
            log.long += 1
            return None
        log.cut += 1
        log.lost += document.targets - first.targets
        return first


def _open(settings: Chat, given: Given) -> Source:
    template = template_of(given.directory, given.tokenizer, settings.template)
    if template is None:
        raise OutsizeError(
            f"tokenizer {given.directory or 'bytes'} has no chat template (chat_template.jinja, or"
            f" chat_template in tokenizer_config.json); put one there, or set {KEY}.template to"
            f" one of {', '.join(NAMED)}, or to a file"
        )
    return ChatSource(given, settings, template)


def _files(settings: Chat) -> Mapping[str, str]:
    """A named template goes with the model that was trained on it."""
    own = settings.template == OWN
    return {} if own else {"chat_template.jinja": template_text(settings.template)}


technique(KEY, Chat, "chats (OpenAI messages, ShareGPT, Alpaca, prompt and completion), of which"
          " only the assistant's tokens are targets")  # fmt: skip
SOURCES.add(KEY, SourceKind(_open, weighed=True, takes=form_of, files=_files))
