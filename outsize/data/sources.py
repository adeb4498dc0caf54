"""Documents from files: text, and a field of records. What cannot be read is skipped and reported.

A run over much data meets broken records. None of them stops it: each is counted and remembered
with its file and line, and the caller shows the report.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from outsize.data.files import SourceFile, looks_binary
from outsize.data.records import BadRecordError, parquet_for, records
from outsize.data.unpacked import opened
from outsize.errors import OutsizeError, counted

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
    length was kept; lost: targets that were cut off; answers, unended: turns of an assistant, and
    those that end in no token which ends a turn; apart: turns in samples of their own; unread:
    texts of messages that a chat template leaves out, and where the first of them is; done: bytes
    of the files."""

    skips: list[Skip] = field(default_factory=list)
    bad: int = 0
    duplicates: int = 0
    empty: int = 0
    ignored: int = 0
    long: int = 0
    cut: int = 0
    lost: int = 0
    answers: int = 0
    unended: int = 0
    apart: int = 0
    unread: int = 0
    unread_at: str = ""
    done: int = 0

    def told(self, count: int) -> None:
        self.done += count

    def skip(self, where: str, why: str) -> None:
        self.bad += 1
        if len(self.skips) < SKIPS_KEPT:
            self.skips.append(Skip(where, why))

    def plus(self, other: ReadLog) -> ReadLog:
        """Both together."""
        counts = {
            one.name: getattr(self, one.name) + getattr(other, one.name)
            for one in fields(self)
            if one.type == "int"
        }
        at = self.unread_at or other.unread_at
        return ReadLog([*self.skips, *other.skips], unread_at=at, **counts)

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
        targets = f" ({counted(self.lost, 'target', ',')} lost)" if self.lost else ""
        return f"{skipped}; {self.cut} cut to the length of a row{targets}" if self.cut else skipped

    def warnings(self) -> Iterator[str]:
        """What a user should know of before training, a line each."""
        if self.unended:
            none = self.unended == self.answers
            how = "no answer ends in" if none else f"{self.unended} of {self.answers} answers lack"
            yield (
                f"data: {how} a token that ends a turn, so the model does not learn to stop there;"
                " take a template that writes special tokens of the tokenizer"
            )
        if self.unread:
            yield (
                f"data: the chat template leaves out {counted(self.unread, 'text', ',')} of"
                f" messages, which no token says (first: {self.unread_at}); take a template that"
                " writes them, or leave them out"
            )
        if self.apart:
            yield (
                f"data: answers that are samples of their own: {self.apart:,}, since the chat"
                " template writes them otherwise once others follow"
            )


def read_documents(file: SourceFile, column: str, log: ReadLog) -> Iterator[str]:
    """The documents of a file, in order; never empty ones. `column` names the field that holds
    the text of a record.

    Raises OutsizeError for a named file that is no Parquet, or when pyarrow is missing.
    """
    readers = {"text": _text, "parquet": _parquet}
    end = log.done + file.size
    try:
        for text in readers.get(file.kind, _records)(file, column, log):
            if text:
                yield text
            else:
                log.empty += 1
    except OSError as error:
        log.skip(str(file.path), f"cannot be read: {error.strerror or error}")
    log.done = end


def _text(file: SourceFile, column: str, log: ReadLog) -> Iterator[str]:
    if looks_binary(file.path, file.packed):
        log.skip(str(file.path), "binary (NUL bytes at its start), expected UTF-8 text")
        return
    if not file.size:
        yield ""
    line, rest = 1, b""
    with opened(file.path, file.packed, log.told) as stream:
        while chunk := stream.read(PIECE_BYTES):
            raw = rest + chunk
            cut = _cut(raw) if len(chunk) == PIECE_BYTES else len(raw)
            piece, rest = raw[:cut], raw[cut:]
            text = _decode(piece, file.path, line, log)
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


def _records(file: SourceFile, column: str, log: ReadLog) -> Iterator[str]:
    for where, record in records(file, log.told):
        try:
            text = _field(record, column)
        except BadRecordError as error:
            log.skip(where, str(error))
        else:
            yield text


def _field(record: Any, column: str) -> str:
    if isinstance(record, BadRecordError):
        raise record
    if not isinstance(record, dict):
        raise BadRecordError(f"expected a JSON object, found {type(record).__name__}")
    if column not in record:
        fields = ", ".join(map(repr, record))
        raise BadRecordError(
            f"no field {column!r} (fields: {fields[:120]}); data.field names the one that has the"
            " text"
        )
    return _checked(record[column], column)


def _checked(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise BadRecordError(f"{column!r} is {type(value).__name__}, expected a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRecordError(f"{column!r} holds half a surrogate pair") from None
    return value


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
        why = " ".join(f"not readable as Parquet: {error}".split())[:240]
        if file.named and not row:
            raise OutsizeError(f"data file {file.path} {why}") from None
        log.skip(f"{file.path}:{row + 1}", why)


def _column(table: Any, column: str) -> Iterator[Any]:
    names = table.schema_arrow.names
    if column not in names:
        raise BadRecordError(
            f"no column {column!r} (columns: {', '.join(names)[:120]}); data.field names the one"
            " that has the text"
        )
    for batch in table.iter_batches(batch_size=1024, columns=[column]):
        yield from batch.column(0).to_pylist()
