"""Source: where documents come from, as token ids with their targets marked.

A source that is not plain text is a technique: it registers how it is opened under its key in a
run's file, and whoever opens data asks `sourced` which one a run has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outsize.data.files import STDLIB, SourceFile, find_files
from outsize.data.records import records
from outsize.data.sources import ReadLog
from outsize.data.tokenizer import Ids, Tokenizer
from outsize.errors import OutsizeError
from outsize.registry import Registry


@dataclass(frozen=True)
class Document:
    """One document of N tokens. ids: (N,) with all that begins and ends it, but for the start token
    of plain text. validation: held out. bytes: of its text. weights: (N,) float32, what the loss of
    saying each token is times, 0 for no target; None where each one is a target. widths: (N,) the
    UTF-8 bytes that each stands for; None where nobody measures them. where: "file:line", where it
    is known. part: which of the data paths it is of, from 0."""

    ids: Ids
    validation: bool
    bytes: int
    weights: NDArray[np.float32] | None = None
    widths: Ids | None = None
    where: str = ""
    part: int = 0

    @property
    def targets(self) -> int:
        return len(self.ids) if self.weights is None else int(np.count_nonzero(self.weights))

    def first(self, count: int) -> Document:
        """Its first tokens; `widths` are known."""
        assert self.widths is not None
        widths = self.widths[:count]
        weights = None if self.weights is None else self.weights[:count]
        size = int(widths.sum())
        return replace(self, ids=self.ids[:count], bytes=size, weights=weights, widths=widths)


@dataclass(frozen=True)
class Given:
    """What a source is opened with. ignored: files of directories that nothing reads; directory: of
    the tokenizer's files, None for bytes; sequence: tokens of a row, 0 while it is open;
    fraction: of the documents to be held out; field: as data.field."""

    files: tuple[SourceFile, ...]
    ignored: int
    tokenizer: Tokenizer
    directory: str | None
    sequence: int
    fraction: float
    field: str


class Source(Protocol):
    """Documents in a fixed order."""

    @property
    def given(self) -> Given:
        """What it was opened with."""

    @property
    def whole(self) -> bool:
        """No document is cut: a row has several whole ones, and none that is longer than it. Else
        they are laid end to end into rows, each behind a start token."""

    @property
    def weighed(self) -> bool:
        """Its documents have weights."""

    def identity(self) -> Mapping[str, Any]:
        """All that decides the documents beside the files and the tokenizer, as JSON."""

    def documents(self, log: ReadLog) -> Iterator[Document]:
        """All of them; `log` learns what is left out, and how far reading is. OutsizeError, naming
        file and line, for what is refused."""


@dataclass(frozen=True)
class SourceKind:
    """A registered source. open: makes it of the technique's settings; weighed: as Source has it,
    known before anything is read. takes: whether a record (of a file without any word of what it
    is) is one of its own, by a name for what it is. files: by name, those that a model trained on
    it has beside its tokenizer's."""

    open: Callable[[Any, Given], Source]
    weighed: bool
    takes: Callable[[Any], str | None] = lambda record: None
    files: Callable[[Any], Mapping[str, str]] = lambda settings: {}


SOURCES: Registry[SourceKind] = Registry("source")  # by the technique's key


def sourced(techniques: Mapping[str, Any]) -> tuple[SourceKind, Any] | None:
    """The source that a run has switched on, with its settings; None for plain text. techniques:
    settings by key. OutsizeError for two of them."""
    found = [(key, kind) for key, kind in SOURCES.items() if key in techniques]
    if len(found) > 1:
        both = " and ".join(key for key, _ in found)
        raise OutsizeError(f"{both}: each says what a document is; switch one of them off")
    return next(((kind, techniques[key]) for key, kind in found), None)


def detected(paths: tuple[str, ...], field: str) -> tuple[str, str, SourceFile] | None:
    """The key of the source that the first object of some files is of, the name of its form, and
    the file; None for text, and for files that cannot be read, of which whoever reads them tells.
    field: a record that has it is text."""
    try:
        for file in find_files(tuple(path for path in paths if path != STDLIB)).files:
            if file.kind == "text":
                continue
            for _, record in records(file, lambda count: None):
                if not isinstance(record, dict):  # nor read, or not known for what it is
                    continue
                if isinstance(record.get(field), str):
                    return None
                found = ((key, kind.takes(record)) for key, kind in SOURCES.items())
                return next(((key, form, file) for key, form in found if form), None)
    except (OutsizeError, OSError):
        return None
    return None


def held_out(digest: bytes, fraction: float) -> bool:
    """Whether a document of a content's digest is for validation: whatever else there is."""
    return int.from_bytes(digest[:8], "little") < fraction * 2**64
