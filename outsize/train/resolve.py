"""A run's file and `--set`s into one RunConfig, remembering for every value where it came from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from outsize.errors import OutsizeError
from outsize.train.config import SHORT, RunConfig, check, config_of, leaves
from outsize.typed import load_yaml, place, read, unknown

SET = "--set"
DEFAULT = "default"
DERIVED = "derived: "


@dataclass(frozen=True)
class Resolved:
    """Values by full key name; `origins` says where those that are not defaults came from."""

    values: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)

    @property
    def config(self) -> RunConfig:
        return config_of(self.values)

    def get(self, name: str) -> Any:
        """The value of a key, or its default."""
        return self.values[name] if name in self.values else leaves()[name].default

    def given(self, name: str) -> bool:
        """Whether somebody said it (a file, --set, or a derivation)."""
        return name in self.values

    def is_derived(self, name: str) -> bool:
        """Whether its value was filled in rather than said."""
        return self.origins.get(name, "").startswith(DERIVED)

    def with_value(self, name: str, value: Any, origin: str) -> Resolved:
        """The same with one more value. OutsizeError for a number out of its range."""
        check(name, value, origin)
        return Resolved({**self.values, name: value}, {**self.origins, name: origin})

    def derive(self, name: str, value: Any, reason: str) -> Resolved:
        """The same with an open value filled in; what is not open stays."""
        if self.get(name) is not None:
            return self
        return self.with_value(name, value, f"{DERIVED}{reason}")

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(key, value, where it came from, what it means) of every key, in order."""
        return [
            (name, _text(self.get(name)), self.origins.get(name, DEFAULT), leaf.meaning)
            for name, leaf in leaves().items()
        ]

    def to_yaml(self) -> str:
        """A run's file that says every value."""
        nested: dict[str, Any] = {}
        for name in leaves():
            section, dot, key = name.partition(".")
            value = self.get(name)
            value = list(value) if isinstance(value, tuple) else value
            if dot:
                nested.setdefault(section, {})[key] = value
            else:
                nested[name] = value
        return yaml.safe_dump(nested, sort_keys=False)


def resolve(path: str | Path | None, sets: Iterable[str] = ()) -> Resolved:
    """The values of a run's file (none: all defaults), then of "key=value" texts.

    OutsizeError, one line with the place, for a file that cannot be read, an unknown key, a wrong
    type.
    """
    resolved = Resolved()
    if path is not None:
        resolved = apply_text(resolved, _content(Path(path)), Path(path).name)
    for text in sets:
        resolved = apply_set(resolved, text)
    _one_length(resolved)
    return resolved


def apply_text(resolved: Resolved, text: str, source: str) -> Resolved:
    """Add the values of a file's text."""
    found = load_yaml(text, source)
    if found is None:
        return resolved
    for name, value in _flatten(found, source):
        kind = leaves()[name].kind
        read_value = read(kind, value, source, name)
        check(name, read_value, source)
        resolved = resolved.with_value(name, read_value, source)
    return resolved


def apply_set(resolved: Resolved, text: str) -> Resolved:
    """Add one "key=value", the value being YAML (or, for a text, as it stands)."""
    name, equals, raw = text.partition("=")
    name = SHORT.get(name.strip(), name.strip())
    if not equals:
        raise OutsizeError(f"{SET} {text!r}: expected key=value")
    if name not in leaves():
        raise _unknown(name, SET)
    kind = leaves()[name].kind
    value = load_yaml(raw, f"{SET} {name}")
    try:
        read_value = read(kind, value, SET, name)
    except OutsizeError:
        try:  # a text that looks like something else: output=2024
            read_value = read(kind, raw, SET, name)
        except OutsizeError:
            read_value = read(kind, value, SET, name)
    return resolved.with_value(name, read_value, SET)


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise OutsizeError(f"run file {path} is not text; expected YAML in UTF-8") from None
    except OSError as error:
        raise OutsizeError(
            f"run file {path} cannot be read: {error.strerror}; expected a YAML file"
        ) from None


def _flatten(found: Any, source: str) -> Iterable[tuple[str, Any]]:
    """(full key, plain value) of a nested mapping."""
    sections = {f.name for f in dataclasses.fields(RunConfig)}
    if not isinstance(found, dict):
        raise OutsizeError(
            f"{source}: {found!r}; expected a mapping of {', '.join(sorted(sections))}"
        )
    for outer, value in found.items():
        if outer in leaves():
            yield outer, value
        elif outer not in sections:
            raise _unknown(str(outer), source)
        elif isinstance(value, dict):
            for key, inner in value.items():
                if f"{outer}.{key}" not in leaves():
                    raise _unknown(f"{outer}.{key}", source)
                yield f"{outer}.{key}", inner
        elif outer in SHORT and value is not None:
            yield SHORT[outer], value
        elif value is not None:
            keys = ", ".join(_keys(outer))
            raise OutsizeError(f"{place(source, outer)}: {value!r}; expected a mapping of {keys}")


def _keys(section: str) -> tuple[str, ...]:
    return tuple(n.removeprefix(f"{section}.") for n in leaves() if n.startswith(f"{section}."))


def _unknown(name: str, source: str) -> OutsizeError:
    """The error of an unknown key, with the nearest: in its section, else anywhere."""
    section, dot, key = name.partition(".")
    if dot and _keys(section):
        return unknown(key, _keys(section), source, section)
    homes = [full for full in leaves() if full.rpartition(".")[2] == name]
    if homes:
        return OutsizeError(f"{place(source, name)}: unknown key; did you mean {homes[0]!r}?")
    outer = tuple(f.name for f in dataclasses.fields(RunConfig))
    return unknown(name, outer, source, "")


def _one_length(resolved: Resolved) -> None:
    said = [n for n in ("train.steps", "train.tokens", "train.minutes") if resolved.given(n)]
    said = [name for name in said if resolved.get(name) is not None]
    if len(said) > 1:
        raise OutsizeError(
            f"{' and '.join(said)} are given together; expected one of them to say how long"
        )


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
