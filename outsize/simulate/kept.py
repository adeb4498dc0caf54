"""What a rehearsal has found, kept for the next start.

What a step holds follows from data alone: the model's facts, formats, plan and request, and from
the code that plays it. A value lies in the user's cache directory under a digest of the text of all
that it was found for, of PyTorch's version, of what this process computes with, and of this
package's own source. It is believed where its file is whole, and is made of nothing but this
package's classes; else it is found anew, as it is where something that it depends on has no text
of its own (an object of somebody else's class).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import FunctionType, MappingProxyType
from typing import Any, TypeVar, cast

import torch

from outsize import accelerator
from outsize.hardware import host
from outsize.hardware.probe import user_cache
from outsize.kernels import building, native
from outsize.registry import Registry

T = TypeVar("T")
_PACKAGE = Path(__file__).parent.parent
_FOLDER = "rehearsed"
_MOST = 512  # files, a few KB each; then the older half goes
_SOURCES = (".py", ".cpp", ".h")
_PLAIN = frozenset({type(None), bool, int, float, str})
_MANY = (tuple, list, set, frozenset)
_NAMED = MappingProxyType({kind.__name__: kind for kind in _MANY})
_FACTS = (int, float, bool, str, bytes, complex, torch.dtype, torch.device, torch.Size)


class _Silent(Exception):
    """Something that has no text that says all of it."""


def kept(
    kind: type[T], key: object, find: Callable[[], T], holds: Callable[[T], bool] | None = None
) -> T:
    """What `find` gives, or gave a process before that asked with an equal key. holds: whether what
    was measured then is so now; None: it follows from the key."""
    path = _path(kind, key)
    known = None if path is None else _read(kind, path)
    if known is not None and (holds is None or holds(known)):
        return known
    found = find()
    if path is not None:
        with contextlib.suppress(OSError, _Silent):  # then the next start finds it again
            building.keep(json.dumps(_told(found)).encode(), path)
            _prune(path.parent)
    return found


def _path(kind: type, key: object) -> Path | None:
    """Where it is kept; None where it cannot be told from others."""
    if Registry.strangers:
        return None  # a technique of somebody else's, of whose source nothing is known
    try:
        text = "\n".join((kind.__qualname__, _text(key), _text(_computing())))
    except _Silent:
        return None
    return user_cache() / _FOLDER / _digest(text)


def _computing() -> tuple[object, ...]:
    """What operators and their kernels are."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    apart = None if kind is None else (kind.type, accelerator.grain(kind))
    return (
        _source(), torch.__version__, host.processor(), torch.get_num_threads(), apart,
        native.library() is not None, native.compiles(),
    )  # fmt: skip


@cache
def _source() -> str:
    """A digest of this package."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(p for p in _PACKAGE.rglob("*") if p.suffix in _SOURCES):
        digest.update(f"{path.relative_to(_PACKAGE)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _text(value: Any) -> str:
    """All that tells a value from others, the same in every process."""
    if value is None or isinstance(value, _FACTS):
        return repr(value)
    if isinstance(value, Enum):
        return f"{_name(type(value))}.{value.name}"
    if isinstance(value, type | FunctionType):
        return _name(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(sorted(f"{_text(k)}:{_text(v)}" for k, v in value.items())) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ",".join(sorted(map(_text, value))) + "}"
    if isinstance(value, tuple | list):
        return "(" + ",".join(map(_text, value)) + ")"
    if is_dataclass(value):
        said = (f.name for f in fields(value) if f.compare)
        parts = (f"{name}={_text(getattr(value, name))}" for name in said)
        return f"{_name(type(value))}({','.join(parts)})"
    raise _Silent


def mark(value: Any) -> str:
    """What tells a value from others in every process; nothing where it has no text that does."""
    try:
        return _digest(_text(value))
    except _Silent:
        return ""


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _name(value: type | FunctionType) -> str:
    """Of a class or a function of this package, which its source says."""
    name = f"{value.__module__}.{value.__qualname__}"
    if not name.startswith("outsize.") or "<" in name:
        raise _Silent
    return name


# -- files -----------------------------------------------------------------------------------------


def _told(value: Any) -> Any:
    """As JSON: what JSON lacks is a list that begins with what it is."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in _MANY:
        return [kind.__name__, *map(_told, value)]
    if kind is dict:
        return ["dict", *([_told(key), _told(one)] for key, one in value.items())]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if isinstance(value, Enum):
        return ["enum", _name(kind), value.name]
    if isinstance(value, str):  # of a class whose values are known by their text
        return ["word", _name(kind), str(value)]
    if isinstance(value, tuple):  # one with names
        return ["named", _name(kind), *map(_told, value)]
    if is_dataclass(value):
        return ["made", _name(kind), *(_told(getattr(value, f.name)) for f in fields(value))]
    raise _Silent


def _read(kind: type[T], path: Path) -> T | None:
    content = building.whole(path)
    if content is None:
        return None
    try:
        found = _made(json.loads(content))
    except (ValueError, ImportError, AttributeError, TypeError, KeyError, IndexError):
        return None
    return found if isinstance(found, kind) else None


def _made(told: Any) -> Any:
    if not isinstance(told, list):
        return told
    kind, *rest = told
    if kind in _NAMED:
        return _NAMED[kind](map(_made, rest))
    if kind == "dict":
        return {_made(key): _made(value) for key, value in rest}
    if kind == "dtype":
        found = getattr(torch, rest[0])
        if isinstance(found, torch.dtype):
            return found
    own, told = _class(rest[0]), rest[1:]
    if kind == "enum" and issubclass(own, Enum):
        return own[told[0]]
    if (kind == "word" and issubclass(own, str)) or (kind == "named" and issubclass(own, tuple)):
        return own(*map(_made, told))
    if kind == "made" and is_dataclass(own):
        value: Any = object.__new__(cast(type, own))
        for field, one in zip(fields(own), told, strict=True):
            object.__setattr__(value, field.name, _made(one))
        return value
    raise ValueError(kind)


def _class(name: str) -> Any:
    """A class of this package."""
    module, _, own = name.rpartition(".")
    if module.partition(".")[0] == "outsize":
        found = getattr(importlib.import_module(module), own)
        if isinstance(found, type) and found.__module__ == module:
            return found
    raise ValueError(name)


def _prune(folder: Path) -> None:
    files = list(folder.iterdir())
    if len(files) > _MOST:
        for old in sorted(files, key=lambda file: file.stat().st_mtime)[: _MOST // 2]:
            old.unlink(missing_ok=True)
