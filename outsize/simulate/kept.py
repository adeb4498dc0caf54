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
import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import torch

from outsize import accelerator
from outsize.hardware import host
from outsize.hardware.probe import user_cache
from outsize.kernels import native
from outsize.registry import Registry

T = TypeVar("T")
_PACKAGE = Path(__file__).parent.parent
_FOLDER = "rehearsed"
_MOST = 512  # files, a few KB each; then the older half goes
_SOURCES = (".py", ".cpp", ".h")
_FACTS = (int, float, bool, str, bytes, complex, torch.dtype, torch.device, torch.Size)


class _Silent(Exception):
    """Something that has no text that says all of it."""


def kept(kind: type[T], key: object, find: Callable[[], T]) -> T:
    """What `find` gives, or gave a process before that asked with an equal key."""
    path = _path(kind, key)
    known = None if path is None else _read(kind, path)
    if known is not None:
        return known
    found = find()
    if path is not None:
        with contextlib.suppress(OSError):  # then the next start finds it again
            native.keep(pickle.dumps(found), path)
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
    name = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return user_cache() / _FOLDER / name


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


def _name(value: type | FunctionType) -> str:
    """Of a class or a function of this package, which its source says."""
    name = f"{value.__module__}.{value.__qualname__}"
    if not name.startswith("outsize.") or "<" in name:
        raise _Silent
    return name


def _read(kind: type[T], path: Path) -> T | None:
    content = native.whole(path)
    if content is None:
        return None
    try:
        found = _Reader(io.BytesIO(content)).load()
    except (pickle.UnpicklingError, ImportError, AttributeError, TypeError, ValueError, EOFError):
        return None
    return found if isinstance(found, kind) else None


class _Reader(pickle.Unpickler):
    """Of values of this package's classes alone."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch":  # a dtype says its name
            found: Any = getattr(torch, name, None)
            if isinstance(found, torch.dtype):
                return found
        elif module.partition(".")[0] == "outsize" and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        elif (module, name) == ("builtins", "frozenset"):
            return frozenset
        raise pickle.UnpicklingError(f"{module}.{name} is not expected here")


def _prune(folder: Path) -> None:
    files = list(folder.iterdir())
    if len(files) > _MOST:
        for old in sorted(files, key=lambda file: file.stat().st_mtime)[: _MOST // 2]:
            old.unlink(missing_ok=True)
