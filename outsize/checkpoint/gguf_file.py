"""Reading one GGUF file: everything that it says of itself is checked before it is believed.

The layout is that of ggml's docs/gguf.md, versions 2 and 3: facts by name, tensors by name, shape,
type and place, then their bytes. Lengths are bounded by what the file has left, so that one that
lies asks for no memory. Reading uses `pread`: a file that shrinks meanwhile is an error.

O outputs, R bytes of a row.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from outsize.checkpoint.files import memory_of, read_all
from outsize.checkpoint.gguf import FLOATS, MAGIC, TYPES
from outsize.errors import OutsizeError
from outsize.models.coding import Format, decoded, format_of

VERSIONS = (2, 3)
MOST_DIMENSIONS = 4
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
            12: "d"}  # fmt: skip
_STRING, _LIST = 8, 9
_KINDS = {number: name for name, (number, _) in TYPES.items()}
_OTHERS = {3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 10: "Q2_K", 11: "Q3_K", 16: "IQ2_XXS", 20: "IQ4_NL",
           23: "IQ4_XS", 39: "MXFP4"}  # fmt: skip  # that are not read, to be called by name


def coder(kind: str) -> Format:
    """The format of a type that holds codes."""
    return format_of(kind.lower(), kind)


@dataclass(frozen=True)
class Span:
    """A tensor of a file. shape: rows first; start: of its bytes in the file."""

    name: str
    shape: tuple[int, ...]
    kind: str
    start: int
    bytes: int


@dataclass(frozen=True)
class GgufFile:
    """facts: by name, as plain values; spans: by name of the tensor."""

    path: Path
    facts: Mapping[str, Any]
    spans: Mapping[str, Span]

    def fact(self, name: str, kind: type, otherwise: Any = None) -> Any:
        """A fact of a type. OutsizeError where it is another, or is missing without a default."""
        found = self.facts.get(name, otherwise)
        if kind is float and isinstance(found, int) and not isinstance(found, bool):
            found = float(found)
        if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
            raise OutsizeError(
                f"{self.path}: {name} is {_short(found)}; expected {kind.__name__} there"
            )
        return found

    def raw(self, span: Span) -> Tensor:
        """Its bytes, uint8 (O, R), of a vector (R,). OutsizeError where the file has shrunk."""
        found = torch.empty(span.bytes, dtype=torch.uint8)
        try:
            with self.path.open("rb", buffering=0) as file:
                read_all(file.fileno(), memory_of(found), span.start, self.path, span.name)
        except OSError as error:
            raise OutsizeError(f"{self.path}: cannot be read: {error.strerror}") from None
        return found if len(span.shape) == 1 else found.view(prod(span.shape[:-1]), -1)

    def values(self, span: Span) -> Tensor:
        """Its numbers, as they are or what its codes stand for, float32 (shape)."""
        raw = self.raw(span)
        if span.kind in FLOATS:
            return raw.view(FLOATS[span.kind]).view(span.shape)
        rows_OR = raw.view(-1, raw.shape[-1])
        form = coder(span.kind)
        if not form.finite(rows_OR, None):
            raise OutsizeError(f"{self.path}: {span.name}: its scales are not finite numbers")
        found = [
            decoded(form, one, None) for one in rows_OR.split(max(1, (1 << 22) // span.shape[-1]))
        ]
        return torch.cat(found).view(span.shape)


def open_gguf(path: Path) -> GgufFile:
    """A file whose head has been read. OutsizeError for one that is cut, lies about its sizes, or
    holds types that are not read."""
    try:
        with path.open("rb") as file:
            return _Head(path, file, path.stat().st_size).read()
    except OSError as error:
        raise OutsizeError(f"{path}: cannot be read: {error.strerror}") from None


class _Head:
    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path, self._file, self._size = path, file, size

    def read(self) -> GgufFile:
        if self._take(4) != MAGIC:
            raise self._wrong("is no GGUF file: it begins otherwise")
        version = self._number("I")
        if version not in VERSIONS:
            raise self._wrong(f"is of GGUF version {version}; expected one of {VERSIONS}")
        tensors, facts = self._count(24, "tensors"), self._count(13, "facts")
        said = dict[str, Any]()
        for _ in range(facts):
            name = self._text()
            if name in said:
                raise self._wrong(f"says {name!r} twice")
            said[name] = self._value(self._number("I"), name)
        align = said.get("general.alignment", 32)
        if not isinstance(align, int) or align < 8 or align & (align - 1):
            raise self._wrong(f"has the alignment {_short(align)}; expected a power of two")
        spans = [self._span() for _ in range(tensors)]
        start = -(-self._file.tell() // align) * align
        return GgufFile(self._path, said, self._placed(spans, start, align))

    def _placed(self, spans: list[Span], start: int, align: int) -> dict[str, Span]:
        found = dict[str, Span]()
        for one in spans:
            if one.name in found:
                raise self._wrong(f"holds the tensor {one.name!r} twice")
            at = start + one.start
            if one.start % align or at + one.bytes > self._size:
                raise self._wrong(
                    f"tensor {one.name!r} would end at byte {at + one.bytes:,} of"
                    f" {self._size:,}; the file is cut, or says it wrongly"
                )
            found[one.name] = Span(one.name, one.shape, one.kind, at, one.bytes)
        for before, after in pairwise(sorted(found.values(), key=lambda one: one.start)):
            if before.start + before.bytes > after.start:
                raise self._wrong(f"tensors {before.name!r} and {after.name!r} overlap")
        return found

    def _span(self) -> Span:
        name, dims = self._text(), self._number("I")
        if not 1 <= dims <= MOST_DIMENSIONS:
            raise self._wrong(f"tensor {name!r} has {dims} dimensions")
        shape = tuple(self._number("Q") for _ in range(dims))[::-1]
        number, offset = self._number("I"), self._number("Q")
        kind = _KINDS.get(number)
        if kind is None:
            called = _OTHERS.get(number, f"type {number}")
            raise self._wrong(
                f"tensor {name!r} is {called}, which is not read; expected {', '.join(TYPES)}"
            )
        if min(shape) < 1 or prod(shape) > 64 * self._size:
            raise self._wrong(f"tensor {name!r} has the shape {shape}, more than the file holds")
        if kind in FLOATS:
            return Span(name, shape, kind, offset, prod(shape) * FLOATS[kind].itemsize)
        form = coder(kind)
        if shape[-1] % form.group:
            raise self._wrong(
                f"tensor {name!r} has rows of {shape[-1]}; {kind} has blocks of {form.group}"
            )
        return Span(name, shape, kind, offset, prod(shape) // form.group * form.block)

    def _value(self, kind: int, name: str) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _LIST:
            inner = self._number("I")
            if inner == _LIST or (inner != _STRING and inner not in _NUMBERS):
                raise self._wrong(f"{name} is a list of the kind {inner}, which is not known")
            if inner == _STRING:
                return [self._text() for _ in range(self._count(8, name))]
            form = struct.Struct(f"<{_NUMBERS[inner]}")
            count = self._count(form.size, name)
            return [one for (one,) in form.iter_unpack(self._take(count * form.size))]
        if kind not in _NUMBERS:
            raise self._wrong(f"{name} is of the kind {kind}, which is not known")
        return self._number(_NUMBERS[kind])

    def _count(self, least: int, what: str) -> int:
        """Of things that take so many bytes each at least."""
        count: int = self._number("Q")
        if count * least > self._size - self._file.tell():
            raise self._wrong(f"says it has {count:,} of {what}, more than it has bytes for")
        return count

    def _text(self) -> str:
        raw = self._take(self._count(1, "characters"))
        return raw.decode("utf-8", "replace")

    def _number(self, form: str) -> Any:
        (found,) = struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}")))
        return found

    def _take(self, count: int) -> bytes:
        found = self._file.read(count)
        if len(found) < count:
            raise self._wrong(f"ends at byte {self._size:,}, within what it says of itself")
        return found

    def _wrong(self, what: str) -> OutsizeError:
        return OutsizeError(f"{self._path}: {what}")


def _short(value: Any) -> str:
    return "missing" if value is None else repr(value)[:60]
