"""Documents from files: text, JSON lines, Parquet. What cannot be read is skipped and reported.

A run over much data meets broken records. None of them stops it: each is counted and remembered
with its file and line, and the caller shows the report.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outsize.data.files import SourceFile, looks_binary
from outsize.errors import OutsizeError

# A text file beyond this is read as several documents, cut at the ends of lines: one string of a
# whole dump, and its encoding, would not fit in memory. Far longer than any context.
PIECE_BYTES = 4 * 2**20
SKIPS_KEPT = 100  # places remembered in a report; the count goes on


@dataclass(frozen=True)
class Skip:
    """One thing that was left out: `where` is "file:line" (for Parquet, "file:row")."""

    where: str
    why: str


@dataclass
class ReadLog:
    """What reading files has left out, collected by one thread, and how far it is. `skips` holds
    the first SKIPS_KEPT of `bad` broken records; ignored: files of a directory whose suffix no
    reader takes; long, cut: documents longer than a row that were left out, or of which a row's
    length was kept; done: bytes of the files."""

    skips: list[Skip] = field(default_factory=list)
    bad: int = 0
    duplicates: int = 0
    empty: int = 0
    ignored: int = 0
    long: int = 0
    cut: int = 0
    done: int = 0

    def skip(self, where: str, why: str) -> None:
        self.bad += 1
        if len(self.skips) < SKIPS_KEPT:
            self.skips.append(Skip(where, why))

    def summary(self) -> str:
        """One line for people; "nothing skipped" when that is so."""
        first = f" (first: {self.skips[0].where}: {self.skips[0].why})" if self.skips else ""
        counts = (
            (self.bad, f"unreadable{first}"),
            (self.duplicates, "duplicates"),
            (self.empty, "empty"),
            (self.ignored, "files of other kinds"),
            (self.long, "longer than a row"),
        )
        said = [f"{count} {what}" for count, what in counts if count]
        skipped = f"skipped {', '.join(said)}" if said else "nothing skipped"
        return f"{skipped}; {self.cut} cut to the length of a row" if self.cut else skipped


def read_documents(file: SourceFile, column: str, log: ReadLog) -> Iterator[str]:
    """The documents of a file, in order; never empty ones. `column` names the field that holds
    the text of a JSON line or a Parquet row.

    Raises OutsizeError for a named file that is no Parquet, or when pyarrow is missing.
    """
    readers = {"text": _text, "jsonl": _jsonl, "parquet": _parquet}
    end = log.done + file.size
    try:
        for text in readers[file.kind](file, column, log):
            if text:
                yield text
            else:
                log.empty += 1
    except OSError as error:
        log.skip(str(file.path), f"cannot be read: {error.strerror or error}")
    log.done = end


def _text(file: SourceFile, column: str, log: ReadLog) -> Iterator[str]:
    if looks_binary(file.path):
        log.skip(str(file.path), "binary (NUL bytes at its start), expected UTF-8 text")
        return
    if not file.size:
        yield ""
    line, rest = 1, b""
    with file.path.open("rb") as stream:
        while chunk := stream.read(PIECE_BYTES):
            raw = rest + chunk
            cut = _cut(raw) if len(chunk) == PIECE_BYTES else len(raw)
            piece, rest = raw[:cut], raw[cut:]
            text = _decode(piece, file.path, line, log)
            log.done += len(chunk)
            line += piece.count(b"\n")
            if text is not None:
                yield text
    if rest and (text := _decode(rest, file.path, line, log)) is not None:
        yield text


def _cut(raw: bytes) -> int:
    """Where to end a piece: after a line, else before a character of UTF-8."""
    cut = raw.rfind(b"\n") + 1 or len(raw) - 1
    while cut > 1 and cut < len(raw) and raw[cut] & 0xC0 == 0x80:  # inside a character
        cut -= 1
    return cut


def _decode(raw: bytes, path: Path, line: int, log: ReadLog) -> str | None:
    try:
        return raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        at = line + raw[: error.start].count(b"\n")
        log.skip(f"{path}:{at}", f"not UTF-8 (byte 0x{raw[error.start]:02x})")
        return None


class BadRecordError(Exception):
    """Why a record cannot be read."""


def json_lines(file: SourceFile, log: ReadLog) -> Iterator[tuple[str, bytes]]:
    """The lines of a file that hold something, each with "file:line"."""
    with file.path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            log.done += len(line)
            if line.strip():
                yield f"{file.path}:{number}", line


def from_json(line: bytes) -> Any:
    """What a line says. BadRecordError where it is not JSON."""
    try:
        return json.loads(line.removeprefix(b"\xef\xbb\xbf"))
    except UnicodeDecodeError:
        raise BadRecordError("not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise BadRecordError(f"not JSON ({str(error)[:80]})") from None


def _jsonl(file: SourceFile, column: str, log: ReadLog) -> Iterator[str]:
    for where, line in json_lines(file, log):
        try:
            text = _field(from_json(line), column)
        except BadRecordError as error:
            log.skip(where, str(error))
        else:
            yield text


def _field(record: Any, column: str) -> str:
    if not isinstance(record, dict):
        raise BadRecordError(f"expected a JSON object, found {type(record).__name__}")
    if column not in record:
        fields = ", ".join(map(repr, record))
        raise BadRecordError(f"no field {column!r} (fields: {fields[:120]})")
    return _checked(record[column], column)


def _checked(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise BadRecordError(f"{column!r} is {type(value).__name__}, expected a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRecordError(f"{column!r} holds half a surrogate pair") from None
    return value


def parquet_for(file: SourceFile) -> tuple[Any, type[Exception]]:
    """pyarrow's module for a Parquet file, and what it raises for a damaged one. OutsizeError with
    what to install where there is none."""
    try:
        parquet = importlib.import_module("pyarrow.parquet")
        return parquet, importlib.import_module("pyarrow").lib.ArrowException
    except ImportError:
        raise OutsizeError(
            f"data file {file.path} is Parquet, which needs pyarrow: pip install 'outsize[data]'"
        ) from None


def _parquet(file: SourceFile, column: str, log: ReadLog) -> Iterator[str]:
    parquet, broken = parquet_for(file)
    row = 0
    try:
        with parquet.ParquetFile(file.path) as table:
            for value in _column(table, column):
                row += 1
                try:
                    text = _checked(value, column)
                except BadRecordError as error:
                    log.skip(f"{file.path}:{row}", str(error))
                else:
                    yield text
    except (broken, BadRecordError) as error:
        why = " ".join(f"not readable as Parquet: {error}".split())[:200]
        if file.named and not row:
            raise OutsizeError(f"data file {file.path} {why}") from None
        log.skip(f"{file.path}:{row + 1}", why)


def _column(table: Any, column: str) -> Iterator[Any]:
    names = table.schema_arrow.names
    if column not in names:
        raise BadRecordError(f"no column {column!r} (columns: {', '.join(names)[:120]})")
    for batch in table.iter_batches(batch_size=1024, columns=[column]):
        yield from batch.column(0).to_pylist()
