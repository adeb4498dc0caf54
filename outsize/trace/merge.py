"""One Trace of a run's workers: each worker's own, on one clock.

A worker counts seconds from the start of its own step. On one machine time.perf_counter() is the
same clock in every process, so the starts say how the steps lie to each other. Clocks of different
machines have nothing to do with each other; there the end of NORM does: it is a sum over all
workers, so nobody leaves it before the last has come, and the first to leave is nearest to that.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from outsize.errors import OutsizeError
from outsize.trace.trace import Event, Trace

NORM = "NORM"


def merged(traces: Sequence[Trace], clocks: Sequence[str] = ()) -> Trace:
    """The traces of workers 0, 1, ... as one whose earliest step starts at second 0.

    clocks: by worker, the name of the clock that its `begin` is of; one clock where none are given.
    Where `begin` is not known the worker counts as one with a clock of its own. Predicted traces
    start together. OutsizeError for no traces, for those of different sources, and for one that is
    of several workers already.
    """
    _refuse_others(traces)
    shifts = [0.0] * len(traces) if traces[0].source == "predicted" else _shifts(traces, clocks)
    events = tuple(
        replace(event, worker=worker, start=event.start + shift, end=event.end + shift)
        for worker, (trace, shift) in enumerate(zip(traces, shifts, strict=True))
        for event in trace.events
    )
    begin = None if traces[0].begin is None else traces[0].begin - shifts[0]
    return Trace(traces[0].source, events, traces[0].meta, begin)


def laid_out(trace: Trace, like: Sequence[int]) -> Trace:
    """A trace of len(like) workers of which worker w does what worker like[w] of `trace` does."""
    by_worker: dict[int, list[Event]] = {}
    for event in trace.events:
        by_worker.setdefault(event.worker, []).append(event)
    events = tuple(
        replace(event, worker=worker)
        for worker, source in enumerate(like)
        for event in by_worker.get(source, ())
    )
    return replace(trace, events=events)


def _refuse_others(traces: Sequence[Trace]) -> None:
    sources = sorted({trace.source for trace in traces}, reverse=True)  # predicted, measured
    if len(sources) != 1:
        given = " and ".join(sources) or "none"
        raise OutsizeError(f"traces to merge: {given}; expected those of one source")
    for worker, trace in enumerate(traces):
        if len(trace.workers) > 1:
            raise OutsizeError(
                f"traces to merge: the one of worker {worker} is of workers {list(trace.workers)};"
                " expected one worker's own"
            )


def _shifts(traces: Sequence[Trace], clocks: Sequence[str]) -> list[float]:
    """By worker, the seconds between second 0 of the whole and its own; the least is 0."""
    names = clocks or [""] * len(traces)
    groups: dict[tuple[str, int], list[int]] = {}
    for worker, trace in enumerate(traces):
        own = -1 if trace.begin is not None else worker  # a clock that nobody shares
        groups.setdefault((names[worker], own), []).append(worker)
    shifts = [trace.begin or 0.0 for trace in traces]
    reference: list[float] | None = None  # of worker 0's clock
    for group in groups.values():
        first = min(shifts[worker] for worker in group)
        for worker in group:
            shifts[worker] -= first
        gates = _gates([(traces[worker], shifts[worker]) for worker in group])
        reference = gates if reference is None else reference
        apart = [mine - theirs for mine, theirs in zip(gates, reference, strict=False)]
        for worker in group:
            shifts[worker] -= statistics.median(apart or [0.0])
    least = min(shifts)
    return [shift - least for shift in shifts]


def _gates(group: Sequence[tuple[Trace, float]]) -> list[float]:
    """When the first of some workers left each NORM; every worker has as many."""
    ends = [
        sorted(event.end + shift for event in trace.events if event.kind == NORM)
        for trace, shift in group
    ]
    return [min(each) for each in zip(*ends, strict=False)]
