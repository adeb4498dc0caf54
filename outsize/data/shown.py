"""Samples as a run would train on them: what of each is a target, what a row has no room for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from outsize.data.open import DataConfig, source_of
from outsize.data.source import Document
from outsize.data.sources import ReadLog
from outsize.data.tokenizer import Tokenizer, open_tokenizer
from outsize.errors import OutsizeError, counted

Kind = Literal["context", "target", "cut"]


@dataclass(frozen=True)
class Piece:
    """Tokens that follow one another and are alike. weight: of a target."""

    text: str
    kind: Kind
    weight: float


@dataclass(frozen=True)
class Sample:
    """where: "file:line", where it is known. cut: tokens that a row has no room for, which are
    among `tokens` and not among `targets`."""

    where: str
    tokens: int
    targets: int
    cut: int
    pieces: tuple[Piece, ...]


@dataclass
class Overview:
    """All samples of some files. sequence: tokens of a row; shown: the first of them; lengths,
    targets, cut: of each, in tokens; whole: each is in one row, or cut to it."""

    sequence: int
    whole: bool
    shown: list[Sample] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    cut: list[int] = field(default_factory=list)
    log: ReadLog = field(default_factory=ReadLog)

    @property
    def share(self) -> float:
        """Targets of all tokens that are trained on or read."""
        return sum(self.targets) / max(1, sum(self.lengths) - sum(self.cut))

    def lines(self) -> Iterator[str]:
        """What there is to say of all samples."""
        count = len(self.lengths)
        least, most, half = min(self.lengths), max(self.lengths), int(np.median(self.lengths))
        samples, tokens = counted(count, "sample", ","), sum(self.lengths)
        yield f"{samples}, {tokens:,} tokens: {least:,} to {most:,}, half of them up to {half:,}"
        yield f"{sum(self.targets):,} targets, {self.share:.1%} of the tokens"
        longer = sum(1 for one in self.cut if one)
        if self.whole:
            lost = f", by {sum(self.cut):,} tokens in all" if longer else ""
            yield f"{longer:,} longer than a row of {self.sequence:,}{lost}"
        empty = sum(1 for one in self.targets if not one)
        if empty:
            yield f"{empty:,} without a target in a row, which are left out"
        yield self.log.summary()
        yield from self.log.warnings()


def look(config: DataConfig, sequence: int, count: int) -> Overview:
    """What a run of rows of `sequence` tokens would train on; `count` samples are kept as text.
    OutsizeError as in a run, and where there is no sample."""
    tokenizer = open_tokenizer(config.tokenizer)
    source = source_of(replace(config, sequence=None), tokenizer, config.paths(), 0.0)
    made = Overview(sequence, source.whole)
    made.log.ignored = source.given.ignored
    for document in source.documents(made.log):
        room = len(document.ids)
        if source.whole:
            room = min(room, sequence + 1)  # the first token is read, the last one is said
        kept = document if room == len(document.ids) else _within(document, room)
        made.lengths.append(len(document.ids))
        made.targets.append(kept.targets)
        made.cut.append(len(document.ids) - room)
        if len(made.shown) < count:
            made.shown.append(_sample(document, kept, tokenizer))
    if not made.lengths:
        paths = ", ".join(config.paths())
        raise OutsizeError(f"data in {paths} is empty: {made.log.summary()}")
    return made


def _within(document: Document, room: int) -> Document:
    weights = None if document.weights is None else document.weights[:room]
    return replace(document, ids=document.ids[:room], weights=weights)


def _sample(document: Document, kept: Document, tokenizer: Tokenizer) -> Sample:
    weights = np.ones(len(document.ids)) if document.weights is None else document.weights
    room = len(kept.ids)
    marks = [("cut", 0.0)] * len(document.ids)
    marks[:room] = [("target" if w else "context", float(w)) for w in weights[:room]]
    pieces, start, said = list[Piece](), 0, ""
    for (kind, weight), run in itertools.groupby(marks):
        start += len(list(run))
        text = tokenizer.written(document.ids[:start].tolist())
        pieces.append(Piece(text[len(said) :], kind, weight))  # type: ignore[arg-type]
        said = text
    cut = len(document.ids) - room
    return Sample(document.where, len(document.ids), kept.targets, cut, tuple(pieces))
