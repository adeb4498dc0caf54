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

from collections.abc import Iterator
from dataclasses import fields

from outsize.schedule.residency import Residency

_SETS = (
    "parameters", "gradients", "own", "spills", "fixed", "hosts", "gathered", "summed", "collected",
    "merged",
)  # fmt: skip
assert {*_SETS, "uses", "parts", "direct", "rooms", "start"} == {f.name for f in fields(Residency)}


def numbers(values: frozenset[int] | tuple[int, ...]) -> str:
    """Stages as the text form has them: "0,1,4"; "-" for none. Those of a set are sorted."""
    order = sorted(values) if isinstance(values, frozenset) else values
    return ",".join(map(str, order)) or "-"


def lines_of(residency: Residency) -> Iterator[str]:
    """The lines of a residency."""
    sets = " ".join(f"{name}={numbers(getattr(residency, name))}" for name in _SETS)
    yield f"residency {sets} direct={int(residency.direct)}"
    yield from (f"uses {s} {numbers(others)}" for s, others in enumerate(residency.uses))
    yield from (f"parts {s} {count}" for s, count in sorted(residency.parts.items()))
    for name, (offset, size) in sorted(residency.rooms.items()):
        yield f"room {name} {offset} {size}"
    yield from (f"start {name}" for name in sorted(residency.start))
