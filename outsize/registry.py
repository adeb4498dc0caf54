"""What published techniques add to the system, by name: one file of `outsize/techniques` each.

A joint of the system (optimizers, mesh axes, mixers, adapters, ...) is a Registry; a technique's
file adds to as many as it needs when it is imported. Who looks a name up need not import anything:
a look-up imports the file of that name, where a registry's names have a folder of files, or else
every technique.

A technique's settings are a frozen dataclass whose fields are made by `setting`. They are keys of a
run's file under the technique's own name, are listed by `outsize keys`, and are checked there.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import math
import pkgutil
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from outsize.errors import OutsizeError, nearest

T = TypeVar("T")
Clash = tuple[str, Callable[[Any], bool]]  # what a plan may have, and whether it has
_TECHNIQUES = "outsize.techniques"
_EVERY = "outsize.every_technique"  # imports them all


def filed(folder: str) -> frozenset[str]:
    """The techniques of a folder in which each is a file of its name; none is imported."""
    place = Path(__file__).parent / "techniques" / folder
    return frozenset(found.name for found in pkgutil.iter_modules([str(place)]))


class Registry(Generic[T]):
    """Names and what they stand for. what: the thing in a word, for errors ("optimizer"). folder:
    where a name's own file registers it; "" where files have other names, or there are several.
    strangers: modules of others that have added to any, which are no part of this package's source.
    """

    strangers: ClassVar[set[str]] = set()

    def __init__(self, what: str, folder: str = "") -> None:
        self.what, self._folder = what, folder
        self._entries: dict[str, T] = {}

    def add(self, name: str, value: T) -> T:
        """Register a value. OutsizeError where the name is taken."""
        if name in self._entries:
            raise OutsizeError(f"{self.what} {name!r} is registered twice; expected one file of it")
        self._entries[name] = value
        home = getattr(value, "__module__", None) or type(value).__module__
        if home.partition(".")[0] not in ("outsize", "builtins"):
            Registry.strangers.add(home)
        return value

    def get(self, name: str) -> T:
        """The value of a name. OutsizeError with the nearest name for one that is not known."""
        if self.find(name) is None:
            raise OutsizeError(f"{self.what} {name!r} is not known{nearest(name, self.names())}")
        return self._entries[name]

    def find(self, name: str) -> T | None:
        """The value of a name, None where there is none."""
        own = name.replace("-", "_")
        if name not in self._entries and self._folder and own in filed(self._folder):
            importlib.import_module(f"{_TECHNIQUES}.{self._folder}.{own}")
        if name not in self._entries:
            self._load()
        return self._entries.get(name)

    def names(self) -> tuple[str, ...]:
        """All names, in order."""
        self._load()
        return tuple(sorted(self._entries))

    def items(self) -> Iterator[tuple[str, T]]:
        """(name, value) of each, in order of the names."""
        return ((name, self._entries[name]) for name in self.names())

    @staticmethod
    def _load() -> None:
        importlib.import_module(_EVERY)


@dataclass(frozen=True)
class Technique:
    """A published technique as a user meets it.

    key: its place in a run's file, as "adapt.NAME". settings: a frozen dataclass of its settings,
    fields made by `setting`. meaning: what it does, in a line. exact: the numbers are those of the
    plain run; else `approximate` must name it. touches: what it changes the meaning of ("optimizer
    states", "the backward pass", ...): two that touch the same thing do not go together. clashes:
    what else does not, and whether a plan has it. method: what makes its steps, by import path
    (outsize/runtime/method.py), where that is no backward pass. axis: of the mesh, that needs
    several workers. short: the setting that a plain value under its key says, as of `train.only:
    PATTERN`; empty: a plain value says on or off.
    """

    key: str
    settings: type
    meaning: str
    exact: bool = True
    touches: frozenset[str] = frozenset()
    clashes: tuple[Clash, ...] = ()
    method: str = ""
    axis: str = ""
    short: str = ""


TECHNIQUES: Registry[Technique] = Registry("technique")


def technique(
    key: str,
    settings: type,
    meaning: str,
    exact: bool = True,
    touches: frozenset[str] = frozenset(),
    clashes: tuple[Clash, ...] = (),
    method: str = "",
    axis: str = "",
    short: str = "",
) -> Technique:
    """Register a technique under its key."""
    made = Technique(key, settings, meaning, exact, touches, clashes, method, axis, short)
    return TECHNIQUES.add(key, made)


class Touching(Protocol):
    """What changes the meaning of things, and its name."""

    @property
    def key(self) -> str: ...

    @property
    def touches(self) -> frozenset[str]: ...


def refuse_shared(keys: Iterable[str], others: Iterable[Touching] = ()) -> None:
    """OutsizeError where two of a run's techniques change the meaning of the same thing. keys: of
    techniques; other names stand for nothing. others: beside these."""
    found: list[Touching] = [
        one for key in dict.fromkeys(keys) if (one := TECHNIQUES.find(key)) is not None
    ]
    found.extend(others)
    for first, second in itertools.combinations(found, 2):
        for thing in sorted(first.touches & second.touches):
            raise OutsizeError(
                f"{first.key} and {second.key} both change {thing}; leave one of them out"
            )


def setting(
    default: T,
    meaning: str,
    least: float = -math.inf,
    most: float = math.inf,
    may_change: bool = False,
) -> T:
    """A field that is a key of a run: its default, meaning and range. may_change: when the run goes
    on, since it has a say in no number but how long that is."""
    metadata = {"meaning": meaning, "least": least, "most": most, "may_change": may_change}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Setting:
    """What `setting` made. kind: its type."""

    name: str
    kind: Any
    default: Any
    meaning: str
    least: float = -math.inf
    most: float = math.inf
    may_change: bool = False

    @property
    def range(self) -> str:
        """The numbers that it may be, in words; empty where it may be any, or is no number."""
        lower = "" if self.least == -math.inf else f"{self.least:g}"
        upper = "" if self.most == math.inf else f"{self.most:g}"
        if lower and upper:
            return f"{lower} to {upper}"
        return f"from {lower}" if lower else f"to {upper}" if upper else ""


@functools.cache
def settings_of(owner: type) -> tuple[Setting, ...]:
    """The fields of a dataclass that `setting` made, in order."""
    hints = typing.get_type_hints(owner)
    made = (field for field in dataclasses.fields(owner) if field.metadata)
    return tuple(Setting(f.name, hints[f.name], f.default, **f.metadata) for f in made)
