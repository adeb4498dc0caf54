"""Metrics of a run: JSON lines (the record) and TensorBoard events (for looking at).

One line a record, `step` in each; a number that is not finite, as of a step that loss scaling has
skipped, is left out, for JSON has none. Going on from a checkpoint cuts the lines off behind its
step, and tells TensorBoard to forget what came after; what was cut is then written again, the same.
Events are written by the calling thread: no queue that a kill could empty, no thread whose error
nobody sees.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, Self

from outsize.errors import OutsizeError
from outsize.texts import write_text

FILE = "metrics.jsonl"
TIMED = frozenset(
    {
        "seconds",
        "tokens_per_second",
        "resident_bytes",
        "resident_peak_bytes",
        "predicted_peak_bytes",
        "predicted_step_seconds",
        "measured_peak_bytes",
        "measured_step_seconds",
    }
)
"""Keys whose values differ from run to run; all others are the same, bit for bit."""

READ, WRITTEN = "_bytes_read", "_bytes_written"
"""Behind a tier's name: bytes of a step. They follow from the plan, which memory may change."""

Record = Mapping[str, float | int | str]


class Unwritten:
    """Of the workers of a run the first alone keeps records."""

    def write(self, record: Record) -> None:
        return None

    def flush(self) -> None:
        return None


class Metrics:
    """Writes the records of the run in `directory`, from after step `start` on.

    OutsizeError where the system refuses.
    """

    def __init__(self, directory: Path, start: int = 0) -> None:
        self.path = directory / FILE
        try:
            kept = "".join(f"{line}\n" for line in _lines(self.path, start))
            write_text(kept, self.path)
            self._file = self.path.open("a", encoding="utf-8")
            self._events = _events(directory, start)
        except OSError as error:
            raise self._refused(error) from error

    def write(self, record: Record) -> None:
        """Add a record; it has a `step`."""
        record = {name: value for name, value in record.items() if _written(value)}
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
            self._events.write_event(_event(record))
        except OSError as error:
            raise self._refused(error) from error

    def flush(self) -> None:
        """Bring everything so far to disk: before a checkpoint says that it is there."""
        try:
            os.fsync(self._file.fileno())
            self._events.flush()
        except OSError as error:
            raise self._refused(error) from error

    def close(self) -> None:
        """Close both files; what a full disk refuses now was reported by `flush`."""
        for close in (self._events.close, self._file.close):
            try:
                close()
            except OSError:
                continue

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refused(self, error: OSError) -> OutsizeError:
        return OutsizeError(f"cannot write metrics to {self.path}: {error.strerror or error}")


def read_metrics(directory: Path, timed: bool = True) -> list[dict[str, Any]]:
    """The records of a run; timed=False leaves out what differs from run to run."""
    records = (json.loads(line) for line in _lines(directory / FILE, None))
    return [{k: v for k, v in record.items() if timed or not _varies(k)} for record in records]


def _written(value: float | int | str) -> bool:
    return isinstance(value, str) or isfinite(value)


def _varies(key: str) -> bool:
    return key in TIMED or key.endswith((READ, WRITTEN))


def _lines(path: Path, last: int | None) -> Iterator[str]:
    """The whole lines up to step `last`; a kill may have left half of one at the end."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            return
        if last is not None and step > last:
            return
        yield line


def _events(directory: Path, start: int) -> Any:
    """A writer of TensorBoard events; `start` > 0 hides what an earlier process wrote after it."""
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto import event_pb2

    writer = EventsWriter(str(directory / "events"), f".{os.getpid()}")
    if start:
        begin = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        writer.write_event(
            event_pb2.Event(wall_time=time.time(), step=start + 1, session_log=begin)
        )
    return writer


def _event(record: Record) -> Any:
    from tensorboardX.proto import event_pb2, summary_pb2

    values = [
        summary_pb2.Summary.Value(tag=name, simple_value=value)
        for name, value in record.items()
        if name != "step" and isinstance(value, (int, float))
    ]
    return event_pb2.Event(
        wall_time=time.time(), step=int(record["step"]), summary=summary_pb2.Summary(value=values)
    )
