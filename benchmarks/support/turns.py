"""Rounds of a comparison: everybody in turn, in an order that is turned round each time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import psutil

QUIET = 10.0  # percent of the cores that others may keep busy
Case = TypeVar("Case")


def busy() -> float:
    """Percent of the cores that others keep busy now."""
    return psutil.cpu_percent(interval=1.0)


def turns(cases: Sequence[Case], rounds: int) -> Iterator[tuple[int, Case]]:
    """The number of a round and who is measured; says how busy the machine is before each round."""
    for number in range(rounds):
        load = busy()
        print(f"round {number + 1}: cores busy with something else: {load:.0f}%", flush=True)
        if load > QUIET:
            print("THE MACHINE IS NOT QUIET: times and ratios are no result")
        for one in cases if number % 2 == 0 else cases[::-1]:
            yield number, one


def keep(path: Path | None, found: Mapping[Any, Sequence[Any]]) -> None:
    """Write the figures of every round to a file, where one is said."""
    if path is not None:
        plain = [
            {**asdict(one), "rounds": [asdict(f) for f in each]} for one, each in found.items()
        ]
        path.write_text(json.dumps(plain, indent=1), encoding="utf-8")
