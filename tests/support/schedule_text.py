"""Reads what `Schedule.to_text` writes: that the text says all is seen by reading it back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from outsize.schedule import Action, Kind, Schedule
from outsize.schedule.action import WHOLE, Lane, State
from outsize.schedule.ends import ENDS, named
from outsize.schedule.item import Item
from outsize.schedule.residency import Residency
from outsize.schedule.role import Role


def read_schedule(text: str) -> Schedule:
    """The schedule of a text."""
    head, *lines = [line for line in text.splitlines() if line.strip()]
    said = _said(head)
    workers: list[list[Action]] = [[] for _ in range(int(said["workers"]))]
    role, rest = None, list[list[str]]()
    for line in lines:
        words = line.split()
        if words[0] == "role":
            role = _role(_said(line))
        elif words[0].isdecimal():
            workers[int(words[0])].append(_action(words[1:]))
        else:
            rest.append(words)
    cuts = [named(name, int(said[name])) for name in ENDS.names() if name in said]
    ends = cuts[0] if cuts else None
    return Schedule(
        int(said["stages"]), int(said["microbatches"]), tuple(map(tuple, workers)),
        frozenset(_numbers(said["recompute"])), int(said["first"]), _residency(rest),
        said.get("update") == "behind", ends, role,
        frozenset(_numbers(said.get("ahead", "-"))),
    )  # fmt: skip


def _said(line: str) -> dict[str, str]:
    return dict(word.split("=") for word in line.split() if "=" in word)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(",") if word != "-")


def _role(said: dict[str, str]) -> Role:
    plays = (word.split("/") for word in said["plays"].split(";") if word != "-")
    return Role(
        frozenset((int(stage), int(m)) for stage, ms in plays for m in ms.split(",")),
        frozenset(_numbers(said["holds"])),
        tuple(_numbers(path) for path in said["paths"].split(";") if path != "-"),
        _numbers(said.get("others", "-")),
    )


def _action(words: list[str]) -> Action:
    kind, stage, microbatch, lane, *tail = words
    kind, _, state = kind.partition(".")
    stage, _, part = stage.partition("#")
    workspace, allocates = 0, []
    for word in tail:
        if word.startswith("workspace="):
            workspace = int(word.partition("=")[2])
        else:
            cut = max(word.rfind("+"), word.rfind("-"))
            allocates.append((word[:cut], int(word[cut:])))
    return Action(
        Kind(kind), _index(stage), _index(microbatch), Lane(lane), tuple(allocates), workspace,
        State(state), _index(part or "*"),
    )  # fmt: skip


def _index(word: str) -> int:
    return WHOLE if word == "*" else int(word)


def _residency(lines: list[list[str]]) -> Residency | None:
    if not lines:
        return None
    (head,) = _of(lines, "residency")
    said = _said(" ".join(head))
    sets: dict[str, Any] = {n: frozenset(_numbers(s)) for n, s in said.items() if n != "direct"}
    return Residency(
        tuple(_numbers(others) for _, others in _of(lines, "uses")),
        parts={int(stage): int(count) for stage, count in _of(lines, "parts")},
        rooms={_item(*name): (int(a), int(b)) for *name, a, b in _of(lines, "room")},
        start=frozenset(_item(*name) for name in _of(lines, "start")),
        direct=said["direct"] == "1",
        **sets,
    )


def _of(lines: list[list[str]], word: str) -> Iterator[list[str]]:
    return (line[1:] for line in lines if line[0] == word)


def _item(state: str, name: str) -> Item:
    found = re.fullmatch(r"(\d+)(?:#(\d+))?", name)
    assert found is not None, name
    return Item(State(state), int(found[1]), WHOLE if found[2] is None else int(found[2]))
