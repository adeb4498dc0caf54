"""Hardware as YAML or JSON: written by field name, read back checked type by type."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from outsize import typed
from outsize.errors import OutsizeError
from outsize.hardware.hardware import Hardware

T = TypeVar("T")


def to_plain(value: object) -> Any:
    """Dictionaries, lists, numbers and strings; fields at their default are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kept = [f for f in dataclasses.fields(value) if getattr(value, f.name) != _default(f)]
        return {field.name: to_plain(getattr(value, field.name)) for field in kept}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    return value


def from_plain(kind: type[T], value: object, where: str = "hardware") -> T:
    """The object of this type, every field checked. Raises OutsizeError naming the field."""
    built: T = typed.read(kind, value, where)
    return built


def dumps(hardware: Hardware) -> str:
    """YAML text; equal hardware gives equal text."""
    text: str = yaml.safe_dump(to_plain(hardware), sort_keys=False, allow_unicode=True, width=100)
    return text


def loads(text: str, name: str = "hardware") -> Hardware:
    """Hardware from YAML or JSON text (JSON is YAML). Raises OutsizeError naming the field."""
    try:
        # JSON writes 1e+20 without a point, which YAML 1.1 takes for a string.
        data = json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise OutsizeError(f"{name}: neither YAML nor JSON ({reason})") from None
    return from_plain(Hardware, data, name)


def read(path: str | Path) -> Hardware:
    """Hardware from a file. Raises OutsizeError when it is missing or damaged."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OutsizeError(f"{path}: cannot read hardware ({error}); name a YAML file") from None
    return loads(text, str(path))


def _default(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default  # MISSING where there is none, which equals no value
