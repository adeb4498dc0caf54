"""Hardware as YAML or JSON: written by field name, read back checked type by type."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from outsize.errors import OutsizeError, nearest
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
    built: T = _build(kind, value, where)
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


def _build(kind: Any, value: object, where: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _record(kind, value, where)
    if origin in (Union, types.UnionType):  # only "X or None" is used
        return None if value is None else _build(inner[0], value, where)
    if origin is Literal:
        if value not in inner:
            raise OutsizeError(f"{where}: {value!r}, expected {' or '.join(map(repr, inner))}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise OutsizeError(f"{where}: {value!r:.60}, expected a list")
        return tuple(_build(inner[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is Mapping:
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise OutsizeError(f"{where}: {value!r:.60}, expected names with values")
        return {key: _build(inner[1], item, f"{where}.{key}") for key, item in value.items()}
    return _scalar(kind, value, where)


def _record(kind: Any, value: object, where: str) -> Any:
    if not isinstance(value, dict):
        raise OutsizeError(f"{where}: {value!r:.60}, expected the fields of a {kind.__name__}")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in value:
        if key not in fields:
            raise OutsizeError(f"{where}: unknown field {key!r}{nearest(str(key), tuple(fields))}")
    missing = [
        n for n, f in fields.items() if n not in value and _default(f) is dataclasses.MISSING
    ]
    if missing:
        raise OutsizeError(f"{where}: {missing[0]!r} is missing; a {kind.__name__} needs it")
    hints = get_type_hints(kind)
    built = {key: _build(hints[key], item, f"{where}.{key}") for key, item in value.items()}
    try:
        return kind(**built)
    except OutsizeError as error:
        raise OutsizeError(f"{where}: {error}") from None


def _scalar(kind: type, value: object, where: str) -> object:
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:  # bool is an int to isinstance
        raise OutsizeError(f"{where}: {value!r:.60}, expected {kind.__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise OutsizeError(f"{where}: {value}, expected a finite number")
    return value
