"""Residency as lines of a schedule's text form, behind its first line:

    residency parameters=0,1 gradients=- own=0,1 spills=- ... merged=- direct=0
    uses 0 0,1
    parts 1 2
    room optimizer 1#0 4096 8192
    start parameters 0

uses: a stage, and those whose parameters its passes compute with; parts: a stage, and the number
of parts in which it is updated; room: an item, its offset and bytes; start: an item that is there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, replace

from outsize.errors import OutsizeError
from outsize.schedule.item import Item
from outsize.schedule.residency import Residency, Room

_SETS = (
    "parameters", "gradients", "own", "spills", "fixed", "hosts", "gathered", "summed", "collected",
    "merged",
)  # fmt: skip
_LIST = r"(-|\d+(?:,\d+)*)"
_ITEM = r"((?:parameters|gradients|optimizer) \d+(?:#\d+)?)"
_FORMS = {
    "residency": " ".join(f"{name}={_LIST}" for name in _SETS) + " direct=([01])",
    "uses": rf"(\d+) {_LIST}",
    "parts": r"(\d+) (\d+)",
    "room": rf"{_ITEM} (\d+) (\d+)",
    "start": _ITEM,
}
_SHOWN = {
    "residency": " ".join(f"{name}=-|s,s..." for name in _SETS) + " direct=0|1",
    "uses": "STAGE s,s...",
    "parts": "STAGE NUMBER",
    "room": "STATE STAGE[#PART] OFFSET BYTES",
    "start": "STATE STAGE[#PART]",
}
assert {*_SETS, "uses", "parts", "direct", "rooms", "start"} == {f.name for f in fields(Residency)}


def numbers(values: frozenset[int] | tuple[int, ...]) -> str:
    """Stages as the text form has them: "0,1,4"; "-" for none. Those of a set are sorted."""
    order = sorted(values) if isinstance(values, frozenset) else values
    return ",".join(map(str, order)) or "-"


def read_numbers(text: str) -> tuple[int, ...]:
    """The stages that `numbers` wrote."""
    return tuple(int(word) for word in text.split(",") if word != "-")


def lines_of(residency: Residency) -> Iterator[str]:
    """The lines of a residency."""
    sets = " ".join(f"{name}={numbers(getattr(residency, name))}" for name in _SETS)
    yield f"residency {sets} direct={int(residency.direct)}"
    yield from (f"uses {s} {numbers(others)}" for s, others in enumerate(residency.uses))
    yield from (f"parts {s} {count}" for s, count in sorted(residency.parts.items()))
    for name, (offset, size) in sorted(residency.rooms.items()):
        yield f"room {name} {offset} {size}"
    yield from (f"start {name}" for name in sorted(residency.start))


class Collected:
    """Reads lines of a residency, one by one; `made` is the residency, None where there was none.

    stages: of the schedule. OutsizeErrors name the line.
    """

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._head: tuple[str, ...] = ()
        self._number = 0
        self._uses: dict[int, tuple[int, ...]] = {}
        self._parts: dict[int, int] = {}
        self._rooms: dict[Item, Room] = {}
        self._start: set[Item] = set()

    def line(self, text: str, number: int) -> bool:
        """Take a line; gives whether it is one of a residency."""
        word, _, rest = text.strip().partition(" ")
        if word not in _FORMS:
            return False
        match = re.fullmatch(_FORMS[word], rest)
        if match is None:
            raise _wrong(number, text, f"'{word} {_SHOWN[word]}'")
        if (word == "residency") == bool(self._head):
            raise _wrong(number, text, "one line 'residency ...' before all others of its kind")
        self._take(word, match.groups(), text, number)
        return True

    def _take(self, word: str, found: tuple[str, ...], text: str, number: int) -> None:
        if word == "residency":
            self._head, self._number = found, number
            for stages in found[:-1]:
                self._check(read_numbers(stages), text, number)
        elif word == "uses":
            self._check((int(found[0]), *read_numbers(found[1])), text, number)
            self._once(int(found[0]) not in self._uses, text, number)
            self._uses[int(found[0])] = read_numbers(found[1])
        elif word == "parts":
            self._check((int(found[0]),), text, number)
            self._once(int(found[0]) not in self._parts, text, number)
            self._parts[int(found[0])] = int(found[1])
        elif word == "room":
            name = Item.read(found[0])
            self._once(name not in self._rooms, text, number)
            self._rooms[name] = (int(found[1]), int(found[2]))
        else:
            name = Item.read(found[0])
            if name not in self._rooms:
                raise _wrong(number, text, "an item that has a room, on a line before")
            self._start.add(name)

    def _check(self, stages: tuple[int, ...], text: str, number: int) -> None:
        if any(stage >= self._stages for stage in stages):
            raise _wrong(number, text, f"stages from 0 to {self._stages - 1}")

    @staticmethod
    def _once(fresh: bool, text: str, number: int) -> None:
        if not fresh:
            raise _wrong(number, text, "one line for each")

    @property
    def made(self) -> Residency | None:
        """What the lines said."""
        if not self._head:
            return None
        if sorted(self._uses) != list(range(self._stages)):
            raise OutsizeError(
                f"schedule line {self._number}: the residency has 'uses' lines of"
                f" {len(self._uses)} stages; expected one for each of {self._stages}"
            )
        *sets, direct = self._head
        uses = tuple(self._uses[s] for s in range(self._stages))
        made = Residency(
            uses, parts=self._parts, direct=direct == "1", rooms=self._rooms,
            start=frozenset(self._start),
        )  # fmt: skip
        found = {n: frozenset(read_numbers(s)) for n, s in zip(_SETS, sets, strict=True)}
        return replace(made, **found)  # type: ignore[arg-type]


def _wrong(number: int, text: str, expected: str) -> OutsizeError:
    return OutsizeError(f"schedule line {number}: {text.strip()!r}; expected {expected}")
