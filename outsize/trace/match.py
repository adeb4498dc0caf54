"""Predicted and measured, action by action: which of them took longer than was predicted.

Who waits for another worker is not slow, so waiting is taken off first: of a receive, what it
spends before the send begins, and the other way round; of a sum or a gather, what it spends before
the last that takes part begins. Then the workers that cause a delay are named, and not those that
suffer it.

No number of seconds is built in: traces in other units, or of a machine that is faster in
everything, give the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from outsize.trace.trace import Event, Trace

# Actions that several workers do as one.
SHARED = ("NORM", "GATHER", "REDUCE", "COLLECT", "MERGE", "EXCHANGE")
SEND, RECEIVE = "SEND", "RECV"


@dataclass(frozen=True)
class Difference:
    """An action as it was predicted and as it ran. expected, took: its seconds in either, without
    waiting for other workers; waited: what it waited for them when it ran."""

    predicted: Event
    measured: Event
    expected: float
    took: float
    waited: float

    @property
    def beyond(self) -> float:
        """Seconds beyond forecast; negative where it was quicker."""
        return self.took - self.expected


@dataclass(frozen=True)
class Sum:
    """Differences of one name together, in seconds."""

    name: str
    count: int
    expected: float
    took: float
    waited: float

    @property
    def beyond(self) -> float:
        """Seconds beyond forecast."""
        return self.took - self.expected


def pairs(predicted: Trace, measured: Trace) -> list[tuple[int, int]]:
    """Places of the same action in the events of both, in the order of the first. An action is the
    same by worker, kind, stage, microbatch and part; where a step does it again, by its turn."""
    places = {key: place for place, key in enumerate(_keys(measured.events, _named))}
    return [
        (place, places[key])
        for place, key in enumerate(_keys(predicted.events, _named))
        if key in places
    ]


def differences(predicted: Trace, measured: Trace) -> list[Difference]:
    """Every action that both have, those that took longest beyond forecast first."""
    idle = waiting(predicted), waiting(measured)
    found = []
    for i, j in pairs(predicted, measured):
        before, now = predicted.events[i], measured.events[j]
        expected = before.end - before.start - idle[0][i]
        took = now.end - now.start - idle[1][j]
        found.append(Difference(before, now, expected, took, idle[1][j]))
    return sorted(found, key=lambda one: (-one.beyond, one.measured.start, one.measured.worker))


def pace_of(found: Iterable[Difference]) -> float:
    """How many times longer than predicted actions took: half of the predicted time took less, half
    more. 1 where nothing was predicted to take time."""
    ratios = sorted((one.took / one.expected, one.expected) for one in found if one.expected > 0)
    half, so_far = sum(weight for _, weight in ratios) / 2, 0.0
    for ratio, weight in ratios:
        so_far += weight
        if so_far >= half:
            return ratio
    return 1.0


def paced(trace: Trace, pace: float) -> Trace:
    """A trace in which everything takes so many times longer."""
    events = (replace(e, start=e.start * pace, end=e.end * pace) for e in trace.events)
    return replace(trace, events=tuple(events))


def sums(found: Iterable[Difference], name: Callable[[Difference], str]) -> list[Sum]:
    """By name, the names that took longest beyond forecast first."""
    named: dict[str, list[Difference]] = {}
    for one in found:
        named.setdefault(name(one), []).append(one)
    made = [
        Sum(
            key, len(each), sum(one.expected for one in each), sum(one.took for one in each),
            sum(one.waited for one in each),
        )
        for key, each in named.items()
    ]  # fmt: skip
    return sorted(made, key=lambda each: (-each.beyond, each.name))


def alone(predicted: Trace, measured: Trace) -> tuple[list[Event], list[Event]]:
    """The events of each that the other does not have."""
    both = pairs(predicted, measured)
    here, there = {i for i, _ in both}, {j for _, j in both}
    return (
        [event for i, event in enumerate(predicted.events) if i not in here],
        [event for j, event in enumerate(measured.events) if j not in there],
    )


def messages(trace: Trace) -> list[tuple[int, int]]:
    """Places of what is sent and of its receiving. Of several senders and receivers of the same the
    first sender goes with the first receiver, since the pipelines of a mesh lie side by side."""
    found: list[tuple[int, int]] = []
    for places in _together(trace.events, _message):
        ranked = sorted(places, key=lambda place: trace.events[place].worker)
        sends = [place for place in ranked if _word(trace.events[place]) == SEND]
        receives = [place for place in ranked if _word(trace.events[place]) == RECEIVE]
        found += zip(sends, receives, strict=False)
    return found


def waiting(trace: Trace) -> list[float]:
    """By event, seconds of it that another worker had not begun yet."""
    events = trace.events
    since = [event.start for event in events]
    for send, receive in messages(trace):
        since[receive] = events[send].start  # nothing is received before it is sent
        if events[receive].start <= events[send].end:  # else it was put down and left
            since[send] = events[receive].start
    for places in _together(events, _shared):
        for place in places:  # who begins after it has ended had no part in it: another group's
            starts = (events[other].start for other in places)
            since[place] = max(start for start in starts if start <= events[place].end)
    return [
        min(max(start - event.start, 0.0), event.end - event.start)
        for start, event in zip(since, events, strict=True)
    ]


def _together(events: Sequence[Event], name: Callable[[Event], Hashable]) -> list[list[int]]:
    """Places of events that have a name in common; those named None are left out."""
    found: dict[Hashable, list[int]] = {}
    for place, key in enumerate(_keys(events, name)):
        if key is not None:
            found.setdefault(key, []).append(place)
    return list(found.values())


def _keys(events: Sequence[Event], name: Callable[[Event], Hashable]) -> list[Hashable]:
    """The name of each event with how many of that name and worker start before it."""
    seen: dict[Hashable, int] = {}
    found: list[Hashable] = [None] * len(events)
    for place in sorted(range(len(events)), key=lambda i: events[i].start):
        key = name(events[place])
        if key is not None:
            turn = seen[events[place].worker, key] = seen.get((events[place].worker, key), -1) + 1
            found[place] = (key, turn)
    return found


def _named(event: Event) -> Hashable:
    return (event.worker, event.kind, event.stage, event.microbatch, event.part)


def _word(event: Event) -> str:
    return event.kind.partition(".")[0]


def _message(event: Event) -> Hashable:
    word, _, state = event.kind.partition(".")
    if word not in (SEND, RECEIVE):
        return None
    return (state, event.stage, event.microbatch, event.part)


def _shared(event: Event) -> Hashable:
    if _word(event) not in SHARED:
        return None
    return (event.kind, event.stage, event.microbatch, event.part)
