"""From a description of data to datasets: the one way in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from outsize.data.build import Progress
from outsize.data.cache import open_cached
from outsize.data.dataset import Dataset
from outsize.data.files import STDLIB, Kind, find_files
from outsize.data.source import Given, Source, SourceKind
from outsize.data.sources import ReadLog
from outsize.data.texts import TextSource
from outsize.data.tokenizer import BYTES, Tokenizer, check_vocabulary, open_tokenizer
from outsize.errors import OutsizeError, nearest

_MOST_VALIDATION = 0.5


@dataclass(frozen=True)
class DataConfig:
    """What to train on.

    path: files, directories, patterns, or "stdlib", the text of the Python standard library; a
    mapping says the share of the rows that each has;
    kind: "text", "jsonl", "json", "csv", "parquet", or "auto" to go by the files' suffixes;
    field: the field of a JSON line, or the Parquet column, that holds the text;
    tokenizer: "bytes", or a directory with a tokenizer.json;
    validation: the part of the documents that is held out, 0 to 0.5;
    evaluation: files to validate on instead, of the same kind;
    cache: where tokenised data is kept, None for ~/.cache/outsize/data;
    source: what a document is, with its settings, None for plain text; sequence: tokens of a row,
    which a source of whole documents must know.
    """

    path: str | tuple[str, ...] | Mapping[str, float] = STDLIB
    kind: Literal["auto", "text", "jsonl", "json", "csv", "parquet"] = "auto"
    field: str = "text"
    tokenizer: str = BYTES
    validation: float = 0.03
    cache: str | None = None
    source: tuple[SourceKind, Any] | None = None
    sequence: int | None = None
    evaluation: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in (known := ("auto", *get_args(Kind))):
            raise OutsizeError(f"data.kind {self.kind!r} is unknown{nearest(self.kind, known)}")
        if not 0 <= self.validation <= _MOST_VALIDATION:
            raise OutsizeError(
                f"data.validation is {self.validation}: expected a part, 0 to {_MOST_VALIDATION}"
            )

        for path, share in self.path.items() if isinstance(self.path, Mapping) else ():
            if not (math.isfinite(share) and share > 0):
                raise OutsizeError(
                    f"data.path gives {path} the share {share:g}; expected a number above 0"
                )

    def paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else tuple(self.path)

    def shares(self) -> tuple[float, ...]:
        """Of each path, where they are said; the same for shares of any unit."""
        if not isinstance(self.path, Mapping):
            return ()
        total = math.fsum(self.path.values())
        return tuple(share / total for share in self.path.values())

    def cache_directory(self) -> Path:
        if self.cache is None:
            return Path.home() / ".cache" / "outsize" / "data"
        return Path(self.cache).expanduser()


@dataclass(frozen=True)
class Data:
    """Opened data: what to train on, what to validate on (without documents when nothing is held
    out), what reading left out, and the tokenizer of it all."""

    train: Dataset
    validation: Dataset
    skipped: ReadLog
    tokenizer: Tokenizer


def open_data(
    config: DataConfig,
    vocab_size: int | None = None,
    progress: Progress = lambda done, total: None,
) -> Data:
    """Tokenised train and validation data, from the cache or built now.

    `vocab_size` is the model's, checked before any work; `progress` is called now and then with
    the bytes of the files done and in all, from the calling thread. Raises OutsizeError for
    missing, binary or empty data, a tokenizer that cannot be used, or a cache that cannot be
    written.
    """
    tokenizer = open_tokenizer(config.tokenizer)
    if vocab_size is not None:
        check_vocabulary(tokenizer, vocab_size)
    own, cache = config.evaluation, config.cache_directory()
    source = source_of(config, tokenizer, config.paths(), 0.0 if own else config.validation)
    train, validation, skipped = open_cached(source, cache, progress)
    if own:
        _, validation, left = open_cached(source_of(config, tokenizer, own, 1.0), cache, progress)
        skipped = skipped.plus(left)
    if config.shares():
        train = _mixed(train, config)
    return Data(train, validation, skipped, tokenizer)


def source_of(
    config: DataConfig, tokenizer: Tokenizer, paths: tuple[str, ...], fraction: float
) -> Source:
    """What gives the documents of some paths. fraction: of them for validation."""
    found = find_files(paths, None if config.kind == "auto" else config.kind)
    directory = None if config.tokenizer == BYTES else config.tokenizer
    given = Given(
        found.files, found.ignored, tokenizer, directory, config.sequence or 0, fraction,
        config.field,
    )  # fmt: skip
    if config.source is None:
        return TextSource(given)
    kind, settings = config.source
    return kind.open(settings, given)


def _mixed(train: Dataset, config: DataConfig) -> Dataset:
    """Training data with the shares that a run says. OutsizeError for a path without documents."""
    paths, shares = config.paths(), config.shares()
    counts = (*train.counts, *(0,) * (len(paths) - len(train.counts)))
    for path, count in zip(paths, counts, strict=True):
        if not count:
            raise OutsizeError(
                f"data path {path} has no document to train on (of those that other paths have, or"
                " that are held out, none counts), and a share of the rows; leave it out"
            )
    said = ":".join(f"{share:.12g}" for share in shares)
    return replace(train, counts=counts, shares=shares, fingerprint=f"{train.fingerprint}/{said}")
