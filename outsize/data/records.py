"""Records from files: lines of JSON, a JSON array, rows of CSV and of Parquet.

What cannot be read is given as a BadRecordError in the record's place: who reads text leaves it
out and reports it, who reads chats refuses it.
"""

from __future__ import annotations

import codecs
import csv
import importlib
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from outsize.data.files import SourceFile
from outsize.data.unpacked import opened
from outsize.errors import OutsizeError

PIECE_BYTES = 2**20  # of a JSON array that are looked at together
_FIELD_BYTES = 2**27  # of a cell of CSV
_WHITE = re.compile(r"\s*")


class BadRecordError(Exception):
    """Why a record cannot be read."""


Told = Callable[[int], None]  # learns the bytes of files that were read
Placed = tuple[str, Any]  # "file:line" (of Parquet and CSV, "file:row"), and what stands there


def records(file: SourceFile, told: Told) -> Iterator[Placed]:
    """What is in a file, in order. OSError where it cannot be read; OutsizeError where a package
    for it is missing."""
    readers = {"jsonl": json_lines, "json": json_values, "csv": csv_rows, "parquet": parquet_rows}
    yield from readers[file.kind](file, told)


def json_lines(file: SourceFile, told: Told) -> Iterator[Placed]:
    """The lines of a file that hold something."""
    with opened(file.path, file.packed, told) as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield f"{file.path}:{number}", from_json(line)


def from_json(line: bytes) -> Any:
    """What a line says; a BadRecordError where it is not JSON."""
    try:
        return json.loads(line.removeprefix(b"\xef\xbb\xbf"))
    except UnicodeDecodeError:
        return BadRecordError("not UTF-8")
    except (ValueError, RecursionError) as error:
        return BadRecordError(f"not JSON ({str(error)[:80]})")


def json_values(file: SourceFile, told: Told) -> Iterator[Placed]:
    """The elements of an array; of a file that is none, the values one after another, as lines of
    JSON in a file that is called .json. Nothing is read beyond what is broken, as where an array
    does not end, or has something behind it."""
    scan, decode = _Scan(), json.JSONDecoder().raw_decode
    with opened(file.path, file.packed, told) as stream:
        scan.begin(stream)
        array = scan.next() == "["
        if array:
            scan.skip(1)
        while (first := scan.next()) and not (array and first == "]"):
            where = f"{file.path}:{scan.line}"
            value, stop = scan.value(decode)
            yield where, value
            if isinstance(value, BadRecordError):
                return
            scan.skip(stop)
            if array and scan.next() == ",":
                scan.skip(1)
            elif array and scan.next() != "]":
                yield f"{file.path}:{scan.line}", BadRecordError("not JSON (no ',' or ']' behind)")
                return
        scan.skip(1 if array and first else 0)
        if array and (not first or scan.next()):
            why = "something stands behind the array" if first else "the array does not end"
            yield f"{file.path}:{scan.line}", BadRecordError(f"not JSON ({why})")


class _Scan:
    """Text of a stream from where reading is; line: where that is."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at, self._ended, self.line = "", 0, False, 1
        self._stream: Any = None

    def begin(self, stream: Any) -> None:
        self._stream = stream

    def next(self) -> str:
        """The next character that is not white space, "" at the end."""
        while True:
            white = _WHITE.match(self._text, self._at)
            assert white is not None
            self.skip(white.end() - self._at)
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more(PIECE_BYTES):
                return ""

    def skip(self, count: int) -> None:
        self.line += self._text.count("\n", self._at, self._at + count)
        self._at += count

    def value(self, decode: Any) -> tuple[Any, int]:
        """The JSON that begins here, and its characters; twice as much is read each time that it
        does not end in what is there."""
        wanted = PIECE_BYTES
        while True:
            try:
                found, stop = decode(self._text, self._at)
            except (ValueError, RecursionError) as error:
                if isinstance(error, RecursionError) or not self._more(wanted):
                    return BadRecordError(f"not JSON ({str(error)[:80]})"), 0
                wanted *= 2
            else:
                if stop < len(self._text) or not self._more(PIECE_BYTES):
                    return found, stop - self._at

    def _more(self, wanted: int) -> bool:
        """Read on; False at the end, or where bytes are no text."""
        if self._ended:
            return False
        raw = self._stream.read(wanted)
        self._ended = not raw
        try:
            more = self._decoder.decode(raw, final=not raw)
        except UnicodeDecodeError as error:  # up to there; behind it what no JSON has
            sound = error.object[: error.start].removeprefix(codecs.BOM_UTF8)
            self._ended, more = True, sound.decode() + "\0"
        self._text, self._at = self._text[self._at :] + more, 0
        return bool(more) or not self._ended


def csv_rows(file: SourceFile, told: Told) -> Iterator[Placed]:
    """Rows as objects by the names of the first one; .tsv files have tabs between."""
    csv.field_size_limit(_FIELD_BYTES)
    tabs = file.path.name.lower().removesuffix(f".{file.packed}").endswith(".tsv")
    row = 1
    with opened(file.path, file.packed, told) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        reader = csv.DictReader(text, delimiter="\t" if tabs else ",", strict=True)
        try:
            columns = Counter(reader.fieldnames or ())
            twice = [one for one, count in columns.items() if one and count > 1]
            if twice:
                yield f"{file.path}:1", BadRecordError(f"two columns are called {twice[0]!r}")
                return
            for found in reader:
                row += 1
                where = f"{file.path}:{row}"
                if None in found or None in found.values():
                    names = len(reader.fieldnames or ())
                    yield where, BadRecordError(f"not {names} cells, as the first row has")
                else:
                    yield where, dict(found)
        except UnicodeDecodeError:
            yield f"{file.path}:{row + 1}", BadRecordError("not UTF-8")
        except csv.Error as error:
            yield f"{file.path}:{row + 1}", BadRecordError(f"not CSV ({error})")


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


def _there(value: Any) -> Any:
    """A value without the null fields of objects in it: all objects of a column have the fields
    that any of them has."""
    if isinstance(value, dict):
        return {name: _there(one) for name, one in value.items() if one is not None}
    return [_there(one) for one in value] if isinstance(value, list) else value


def parquet_rows(file: SourceFile, told: Told) -> Iterator[Placed]:
    parquet, broken = parquet_for(file)
    row = 0
    try:
        with parquet.ParquetFile(file.path) as table:
            for batch in table.iter_batches(batch_size=256):
                for record in batch.to_pylist():
                    row += 1
                    yield f"{file.path}:{row}", {name: _there(x) for name, x in record.items()}
    except broken as error:
        why = " ".join(str(error).split())[:160]
        raise OutsizeError(f"data file {file.path} not readable as Parquet: {why}") from None
