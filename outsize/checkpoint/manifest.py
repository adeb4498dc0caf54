"""The manifest: what a checkpoint consists of, to the byte, and the proof that it is all there.

It is written last, so its presence says that everything before it was written; it has a checksum of
its own and only one spelling, so that any changed byte in it is noticed. Everything read from one
is checked before use: names as paths, extents against file sizes, shapes against extents.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

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
    """A file: one of a group's tensor files (safetensors), or any other (group is None). crc32: of
    all that is not a tensor: the bytes before them, or the whole file."""

    bytes: int
    crc32: int
    group: str | None
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
    return f'{{"crc32": "{_hex(zlib.crc32(text.encode()))}",\n"manifest": {text}}}\n'.encode()


def _file_json(entry: FileEntry) -> dict[str, Any]:
    if entry.group is None:
        return {"bytes": entry.bytes, "crc32": _hex(entry.crc32)}
    tensors = {n: {**vars(one), "crc32": _hex(one.crc32)} for n, one in entry.tensors.items()}
    head = {"bytes": entry.bytes, "group": entry.group, "header_crc32": _hex(entry.crc32)}
    return {**head, "tensors": tensors}


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
    """The manifest in `data`, which has its own checksum; MalformedError when it is not one. What
    it says of files is compared with them when they are opened."""
    try:
        body = json.loads(data)["manifest"]
        spelt = _spell(body)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise MalformedError("it is not the JSON that was written") from error
    _expect(spelt == data, "its checksum does not match")
    _expect(isinstance(body, dict) and body.get("format") == FORMAT, f"format is not {FORMAT!r}")
    version = body.get("version")
    _expect(version == VERSION, f"version is {version!r}; this Outsize reads version {VERSION}")
    try:
        files = {path: _file(path, entry) for path, entry in body["files"].items()}
        return Manifest(body["step"], dict(body["meta"]), files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MalformedError(f"it is not of version {VERSION}: {error!r}") from error


def safe_path(path: str) -> bool:
    """Whether `path` is a plain relative one that stays where it is joined to."""
    plain = all(part not in ("", ".", "..") for part in path.split("/"))
    return plain and path.isprintable() and "\\" not in path and ":" not in path


def _file(path: str, plain: dict[str, Any]) -> FileEntry:
    _expect(safe_path(path) and path != MANIFEST_NAME, f"{path!r} is not the name of a file in it")
    if "group" not in plain:
        return FileEntry(plain["bytes"], int(plain["crc32"], 16), None, {})
    tensors = {
        name: TensorEntry(one["dtype"], tuple(one["shape"]), one["bytes"], int(one["crc32"], 16))
        for name, one in plain["tensors"].items()
    }
    return FileEntry(plain["bytes"], int(plain["header_crc32"], 16), plain["group"], tensors)


def _expect(condition: bool, complaint: str) -> None:
    if not condition:
        raise MalformedError(complaint)
