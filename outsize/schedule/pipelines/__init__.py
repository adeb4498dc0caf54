"""Pipeline schedules: each a function of devices and microbatches that gives a Pipeline; by name
here, with what each of them is told beside these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from outsize.errors import OutsizeError, nearest
from outsize.schedule.pipelines.bitpipe import bitpipe, chimera
from outsize.schedule.pipelines.breadth_first import breadth_first, gpipe
from outsize.schedule.pipelines.controllable import v_half, v_min
from outsize.schedule.pipelines.costs import EQUAL, Costs
from outsize.schedule.pipelines.dualpipe import dualpipe, dualpipe_v
from outsize.schedule.pipelines.hanayo import hanayo
from outsize.schedule.pipelines.interleaved import interleaved
from outsize.schedule.pipelines.one_f_one_b import one_f_one_b
from outsize.schedule.pipelines.pipeline import Pipeline, pipeline
from outsize.schedule.pipelines.skip_pipe import skip_pipe
from outsize.schedule.pipelines.uniform import uniform
from outsize.schedule.pipelines.zb_v import zb_v
from outsize.schedule.pipelines.zero_bubble import zb_2p, zb_h1, zb_h2, zero_bubble

MOST_PASSES = 500_000  # of a step, each forward and back: some ten seconds and a gigabyte


@dataclass(frozen=True)
class Shape:
    """What a schedule is made for. chunks, waves, skip: None where nobody said."""

    devices: int
    microbatches: int
    costs: Costs = EQUAL
    chunks: int | None = None
    waves: int | None = None
    skip: float | None = None


@dataclass(frozen=True)
class _Entry:
    make: Callable[[Shape], Pipeline]
    takes: frozenset[str] = frozenset()  # of chunks, waves and skip


def _plain(make: Callable[[int, int], Pipeline]) -> _Entry:
    return _Entry(lambda shape: make(shape.devices, shape.microbatches))


def _timed(make: Callable[[int, int, Costs], Pipeline]) -> _Entry:
    return _Entry(lambda shape: make(shape.devices, shape.microbatches, shape.costs))


def _chunked(make: Callable[[int, int, int], Pipeline]) -> _Entry:
    return _Entry(
        lambda shape: make(shape.devices, shape.microbatches, _or(shape.chunks, 2)),
        frozenset({"chunks"}),
    )


def _or(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


_ENTRIES: Mapping[str, _Entry] = MappingProxyType({
    "gpipe": _plain(gpipe),
    "1f1b": _plain(one_f_one_b),
    "interleaved": _chunked(interleaved),
    "breadth-first": _chunked(breadth_first),
    "uniform": _chunked(uniform),
    "zb-h1": _timed(zb_h1),
    "zb-h2": _timed(zb_h2),
    "zb-2p": _timed(zb_2p),
    "zb-v": _timed(zb_v),
    "v-half": _plain(v_half),
    "v-min": _plain(v_min),
    "hanayo": _Entry(
        lambda s: hanayo(s.devices, s.microbatches, _or(s.waves, 1), s.costs), frozenset({"waves"})
    ),
    "chimera": _timed(chimera),
    "bitpipe": _Entry(
        lambda s: bitpipe(s.devices, s.microbatches, _or(s.chunks, 2), s.costs),
        frozenset({"chunks"}),
    ),
    "dualpipe": _plain(dualpipe),
    "dualpipe-v": _plain(dualpipe_v),
    "skip-pipe": _Entry(
        lambda s: skip_pipe(
            s.devices, s.microbatches, 0.25 if s.skip is None else s.skip, s.costs
        ),
        frozenset({"skip"}),
    ),
})  # fmt: skip

NAMES = tuple(_ENTRIES)


def check_name(text: str) -> None:
    """OutsizeError for the name of no schedule, a number behind a colon aside."""
    _entry(text.partition(":")[0])


def _entry(name: str) -> _Entry:
    plain = {known.replace("-", ""): known for known in NAMES}
    entry = _ENTRIES.get(plain.get(name.lower().replace("-", "").replace("_", ""), ""))
    if entry is None:
        raise OutsizeError(f"schedule {name!r}: unknown{nearest(name, NAMES)}")
    return entry


def make(name: str, shape: Shape) -> Pipeline:
    """The named schedule of a shape. Raises OutsizeError for unknown names, for what the schedule
    does not take, and where its conditions do not hold."""
    _refuse_too_long(shape)
    entry = _entry(name)
    for option in ("chunks", "waves", "skip"):
        value = getattr(shape, option)
        if option == "chunks" and value == 1 and entry.make(shape).schedule.stages == shape.devices:
            continue  # as many as it has
        if value is not None and option not in entry.takes:
            raise OutsizeError(
                f"schedule {name!r}: {option} is {value}; it has no such choice; leave it out"
            )
    return entry.make(shape)


def _refuse_too_long(shape: Shape) -> None:
    """A list of millions of actions is more than anybody waits for, or has memory for."""
    passes = shape.devices * shape.microbatches * max(shape.chunks or 1, shape.waves or 1)
    if passes > MOST_PASSES:
        most = max(1, MOST_PASSES * shape.microbatches // passes)
        raise OutsizeError(
            f"microbatches is {shape.microbatches} of {shape.devices} devices: {passes:,} passes of"
            f" stages; expected at most {MOST_PASSES:,}, as of {most:,} microbatches"
        )


@lru_cache(maxsize=2)
def named(text: str, shape: Shape) -> Pipeline:
    """The schedule of a name with its number behind a colon, as "interleaved:2" or "hanayo:3".
    Kept: who draws or chooses one asks for it again with a plan."""
    name, colon, number = text.partition(":")
    if not colon:
        return make(name, shape)
    plain = {known.replace("-", ""): entry for known, entry in _ENTRIES.items()}
    entry = plain.get(name.lower().replace("-", "").replace("_", ""))
    (option,) = (entry.takes if entry else ()) or ("chunks",)
    try:
        value = float(number) if option == "skip" else int(number)
    except ValueError:
        raise OutsizeError(
            f"schedule {text!r}: expected a number behind the colon, as {name}:2"
        ) from None
    return make(name, replace(shape, **{option: value}))  # type: ignore[arg-type]
