"""The manifest: what a checkpoint consists of, to the byte, and the proof that it is all there.

It is written last, so its presence says that everything before it was written; it has a checksum of
its own and only one spelling, so that any changed byte in it is noticed. Everything read from one
is checked before use: names as paths, extents against file sizes, shapes against extents.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from outsize.checkpoint.crc import crc32
from outsize.checkpoint.files import DTYPES
from outsize.errors import OutsizeError

MANIFEST_NAME = "manifest.json"
FORMAT = "outsize checkpoint"
VERSION = 1

JSON: TypeAlias = bool | int | float | str | list["JSON"] | dict[str, "JSON"] | None


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file: `dtype` as safetensors spells it."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    crc32: int


@dataclass(frozen=True)
class FileEntry:
    """A file: one of a group's tensor files (safetensors), or any other (group is None).

    `header_crc32` is that of the bytes before the tensors.
    """

    bytes: int
    crc32: int
    group: str | None
    header_crc32: int
    tensors: Mapping[str, TensorEntry]


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's description; `files` by path relative to its directory, '/' between parts."""

    step: int
    meta: Mapping[str, JSON]
    files: Mapping[str, FileEntry]


class MalformedError(Exception):
    """A manifest that is none: the message says where it goes wrong."""


# --- writing --------------------------------------------------------------------------------------


def encode(manifest: Manifest) -> bytes:
    """The manifest as it lies in its file, checksum first."""
    body = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "meta": manifest.meta,
        "files": {path: _file_json(entry) for path, entry in manifest.files.items()},
    }
    return _spell(body)


def _spell(body: Mapping[str, Any]) -> bytes:
    text = json.dumps(body, indent=1, allow_nan=False)
    return f'{{"crc32": "{_hex(crc32(text.encode()))}",\n"manifest": {text}}}\n'.encode()


def _file_json(entry: FileEntry) -> dict[str, Any]:
    plain: dict[str, Any] = {"bytes": entry.bytes, "crc32": _hex(entry.crc32)}
    if entry.group is not None:
        plain["group"] = entry.group
        plain["header_crc32"] = _hex(entry.header_crc32)
        plain["tensors"] = {name: _tensor_json(tensor) for name, tensor in entry.tensors.items()}
    return plain


def _tensor_json(tensor: TensorEntry) -> dict[str, Any]:
    return {
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "bytes": tensor.bytes,
        "crc32": _hex(tensor.crc32),
    }


def _hex(crc: int) -> str:
    return f"{crc:08x}"


def as_json(value: object, where: str) -> JSON:
    """`value` as what JSON gives back for it: tuples as lists, mappings as dicts.

    OutsizeError, naming the place below `where`, for what JSON cannot hold.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, list | tuple):
        return [as_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: as_json(item, f"{where}[{key!r}]") for key, item in value.items()}
    raise OutsizeError(
        f"{where} is {value!r} of type {type(value).__name__}; expected what JSON can hold "
        "(finite numbers, strings, booleans, None, lists, and dicts with string keys)"
    )


# --- reading --------------------------------------------------------------------------------------


def decode(data: bytes) -> Manifest:
    """The manifest in `data`, wholly checked; MalformedError when it is not one."""
    try:
        body = json.loads(data)["manifest"]
        spelt = _spell(body)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise MalformedError("it is not the JSON that was written") from error
    _expect(spelt == data, "its checksum does not match")
    _expect(isinstance(body, dict) and body.get("format") == FORMAT, f"format is not {FORMAT!r}")
    version = body.get("version")
    _expect(version == VERSION, f"version is {version!r}; this Outsize reads version {VERSION}")
    files, meta = _dict(body, "files", "the manifest"), _dict(body, "meta", "the manifest")
    entries = {path: _file(path, entry) for path, entry in files.items()}
    return Manifest(_count(body, "step", "the manifest"), meta, entries)


def safe_path(path: str) -> bool:
    """Whether `path` is a plain relative one that stays where it is joined to."""
    plain = all(part not in ("", ".", "..") for part in path.split("/"))
    return plain and path.isprintable() and "\\" not in path and ":" not in path


def _file(path: str, plain: object) -> FileEntry:
    _expect(safe_path(path) and path != MANIFEST_NAME, f"{path!r} is not the name of a file in it")
    where = f"file {path!r}"
    if not isinstance(plain, dict):
        raise MalformedError(f"{where} is not described")
    size, crc = _count(plain, "bytes", where), _crc(plain, "crc32", where)
    if "group" not in plain:
        return FileEntry(size, crc, None, crc, {})
    group = plain["group"]
    _expect(isinstance(group, str), f"the group of {where} is {group!r}")
    tensors = {
        name: _tensor(f"{where}, tensor {name!r}", entry)
        for name, entry in _dict(plain, "tensors", where).items()
    }
    return FileEntry(size, crc, group, _crc(plain, "header_crc32", where), tensors)


def _tensor(where: str, plain: object) -> TensorEntry:
    if not isinstance(plain, dict):
        raise MalformedError(f"{where} is not described")
    dtype, shape, size = plain.get("dtype"), plain.get("shape"), _count(plain, "bytes", where)
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise MalformedError(f"{where} has the unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(_is_count(extent) for extent in shape):
        raise MalformedError(f"{where} has no shape")
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    _expect(size == expected, f"{where} has {size} bytes; its shape has {expected}")
    return TensorEntry(dtype, tuple(shape), size, _crc(plain, "crc32", where))


def _expect(condition: bool, complaint: str) -> None:
    if not condition:
        raise MalformedError(complaint)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _count(plain: Mapping[str, Any], key: str, where: str) -> int:
    value = plain.get(key)
    if not isinstance(value, int) or not _is_count(value):
        raise MalformedError(f"{key!r} of {where} is {value!r}; expected a count")
    return value


def _crc(plain: Mapping[str, Any], key: str, where: str) -> int:
    value = plain.get(key)
    if not isinstance(value, str) or len(value) != 8 or set(value) - set("0123456789abcdef"):
        raise MalformedError(f"{key!r} of {where} is {value!r}; expected a checksum")
    return int(value, 16)


def _dict(plain: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    value = plain.get(key)
    if not isinstance(value, dict):
        raise MalformedError(f"{where} has no {key!r}")
    return value
