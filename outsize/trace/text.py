"""The JSON form of a Trace (trace.json): one event a line, stable, read back exactly.

    {"format": "outsize-trace", "version": 1, "source": "measured", "meta": {...}, "events": [
    {"worker": 0, "lane": "compute", "kind": "FORWARD", "stage": 0, "microbatch": 0,
     "start": 0.0, "end": 0.5, "live": {"device/activations": 4096}, "peak": 8192}]}

An action on one part of a stage has "part" too.

Times are seconds, memory is bytes. Equal traces give equal text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from outsize.errors import OutsizeError
from outsize.texts import read_text, write_text
from outsize.trace.trace import Event, Trace

FORMAT = "outsize-trace"
VERSION = 1


def dumps(trace: Trace) -> str:
    """The JSON text of a trace. Raises OutsizeError for a time that is not finite."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "source": trace.source,
        "meta": dict(sorted(trace.meta.items())),
    }
    lines = [_line(number, event) for number, event in enumerate(trace.events)]
    body = ",\n".join(lines)
    return json.dumps(head)[:-1] + ', "events": [\n' + body + "\n]}\n"


def loads(text: str, name: str = "trace") -> Trace:
    """The trace of a JSON text, checked field by field; name is what errors call the text.

    Raises OutsizeError naming the event and the field.
    """
    try:
        data = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise OutsizeError(f"{name}: not a JSON trace ({error}); write one with --trace") from None
    if isinstance(data, dict) and "traceEvents" in data:
        raise OutsizeError(
            f"{name}: a file for Perfetto; expected a trace, as predicted.json and measured.json"
            " of a run are"
        )
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise OutsizeError(f'{name}: no "format": "{FORMAT}" in it; expected a trace.json')
    if data.get("version") != VERSION:
        raise OutsizeError(
            f"{name}: version {data.get('version')!r}, expected {VERSION}; "
            "write it again with this release"
        )
    meta = data.get("meta", {})
    if not isinstance(meta, dict) or not all(isinstance(v, str) for v in meta.values()):
        raise OutsizeError(f"{name}: meta must map names to strings, found {meta!r:.80}")
    events = data.get("events")
    if not isinstance(events, list):
        raise OutsizeError(f"{name}: events must be a list, found {type(events).__name__}")
    read_events = tuple(_event(item, f"{name}: event {i}") for i, item in enumerate(events))
    if (source := data.get("source")) not in ("predicted", "measured"):
        raise OutsizeError(f'{name}: source {source!r}, expected "predicted" or "measured"')
    return Trace(source, read_events, meta)


def read(path: str | Path) -> Trace:
    """The trace in a file. Raises OutsizeError when it is missing, unreadable or damaged."""
    return loads(read_text(path, "name a trace.json"), str(path))


def write(trace: Trace, path: str | Path) -> Path:
    """Write trace.json under its final name in one step; the file is never half there."""
    return write_text(dumps(trace), path)


def _line(number: int, event: Event) -> str:
    if not (math.isfinite(event.start) and math.isfinite(event.end)):
        raise OutsizeError(
            f"event {number} ({event.name}): times {event.start}, {event.end} are not finite; "
            "expected seconds"
        )
    said = {field: getattr(event, field) for field in FIELDS}
    said["live"] = dict(sorted(event.live.items()))
    if event.part < 0:
        del said["part"]
    return json.dumps(said)


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number of seconds or bytes")


def _event(item: object, where: str) -> Event:
    if not isinstance(item, dict):
        raise OutsizeError(f"{where}: {item!r:.80}, expected an object")
    said: dict[str, Any] = {field: item.get(field, UNSAID.get(field)) for field in FIELDS}
    for field, (holds, expected) in FIELDS.items():
        if not holds(said[field]):
            raise OutsizeError(f"{where}: {field} {said[field]!r:.80}, expected {expected}")
    start, end = said["start"], said["end"] = float(said["start"]), float(said["end"])
    if end < start:
        raise OutsizeError(f"{where}: end {end} lies before start {start}; expected end >= start")
    return Event(**said)


def _whole(value: object, least: int) -> bool:
    return type(value) is int and value >= least  # bool is an int to isinstance


def _seconds(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _live(value: object) -> bool:
    return isinstance(value, dict) and all(
        all(key.partition("/")) and _whole(count, 0) for key, count in value.items()
    )


_NAME = (lambda value: isinstance(value, str) and bool(value), "a name")
_SECONDS = (_seconds, "seconds")
_BYTES = (partial(_whole, least=0), "a whole number >= 0")
_PLACE = (partial(_whole, least=-1), "a whole number >= -1")
# Of an event, in the order of a file: what holds of each field, and in words.
FIELDS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "worker": _BYTES,
    "lane": _NAME,
    "kind": _NAME,
    "stage": _PLACE,
    "microbatch": _PLACE,
    "start": _SECONDS,
    "end": _SECONDS,
    "live": (_live, 'bytes, 0 or more, by "tier/kind"'),
    "peak": _BYTES,
    "part": _PLACE,
}
UNSAID: Mapping[str, Any] = {"live": {}, "peak": 0, "part": -1}
