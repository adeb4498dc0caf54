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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

from outsize.errors import OutsizeError
from outsize.texts import write_text
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
    return Trace(_source(data.get("source"), name), read_events, meta)


def read(path: str | Path) -> Trace:
    """The trace in a file. Raises OutsizeError when it is missing, unreadable or damaged."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OutsizeError(f"{path}: cannot read the trace ({error}); name a trace.json") from None
    return loads(text, str(path))


def write(trace: Trace, path: str | Path) -> Path:
    """Write trace.json under its final name in one step; the file is never half there."""
    return write_text(dumps(trace), path)


def _line(number: int, event: Event) -> str:
    if not (math.isfinite(event.start) and math.isfinite(event.end)):
        raise OutsizeError(
            f"event {number} ({event.name}): times {event.start}, {event.end} are not finite; "
            "expected seconds"
        )
    fields = {
        "worker": event.worker,
        "lane": event.lane,
        "kind": event.kind,
        "stage": event.stage,
        "microbatch": event.microbatch,
        "start": event.start,
        "end": event.end,
        "live": dict(sorted(event.live.items())),
        "peak": event.peak,
    }
    if event.part >= 0:
        fields["part"] = event.part
    return json.dumps(fields)


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number of seconds or bytes")


def _source(value: object, name: str) -> Literal["predicted", "measured"]:
    if value == "predicted":
        return "predicted"
    if value == "measured":
        return "measured"
    raise OutsizeError(f'{name}: source {value!r}, expected "predicted" or "measured"')


def _event(item: object, where: str) -> Event:
    if not isinstance(item, dict):
        raise OutsizeError(f"{where}: {item!r:.80}, expected an object")
    start, end = _seconds(item, "start", where), _seconds(item, "end", where)
    if end < start:
        raise OutsizeError(f"{where}: end {end} lies before start {start}; expected end >= start")
    return Event(
        worker=_whole(item, "worker", where, 0),
        lane=_word(item, "lane", where),
        kind=_word(item, "kind", where),
        stage=_whole(item, "stage", where, -1),
        microbatch=_whole(item, "microbatch", where, -1),
        start=start,
        end=end,
        live=_live(item.get("live", {}), where),
        peak=_whole({"peak": item.get("peak", 0)}, "peak", where, 0),
        part=_whole({"part": item.get("part", -1)}, "part", where, -1),
    )


def _whole(item: Mapping[str, Any], field: str, where: str, least: int) -> int:
    value = item.get(field)
    if type(value) is not int or value < least:  # bool is an int to isinstance
        raise OutsizeError(f"{where}: {field} {value!r}, expected a whole number >= {least}")
    return value


def _word(item: Mapping[str, Any], field: str, where: str) -> str:
    value = item.get(field)
    if not isinstance(value, str) or not value:
        raise OutsizeError(f"{where}: {field} {value!r}, expected a name")
    return value


def _seconds(item: Mapping[str, Any], field: str, where: str) -> float:
    value = item.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise OutsizeError(f"{where}: {field} {value!r}, expected seconds")
    return float(value)


def _live(value: object, where: str) -> dict[str, int]:
    if not isinstance(value, dict):
        raise OutsizeError(f'{where}: live {value!r:.80}, expected bytes by "tier/kind"')
    for key, count in value.items():
        tier, slash, kind = key.partition("/")
        if not (tier and slash and kind):
            raise OutsizeError(f'{where}: live key {key!r}, expected "tier/kind"')
        _whole({key: count}, key, f"{where}: live", 0)
    return dict(value)
