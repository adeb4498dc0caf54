"""Predicted and measured, matched action by action; who was slow, and who only waited."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from outsize.trace import Event, Trace, alone, differences, pace_of, paced, pairs, waiting


def trace(source, *events: Event) -> Trace:
    return Trace(source, events)


def drawn(seed: int, source="predicted") -> Trace:
    """Two workers with forwards and backwards of random lengths, one after the other."""
    draw, events = random.Random(seed), []
    for worker in range(2):
        now = 0.0
        for kind in ("FORWARD", "BACKWARD"):
            for m in range(6):
                end = now + 0.5 + draw.random()
                events.append(Event(worker, "compute", kind, worker, m, now, end))
                now = end
    return Trace(source, tuple(events))


def scaled(one: Trace, by: float) -> Trace:
    events = (replace(e, start=e.start * by, end=e.end * by) for e in one.events)
    return replace(one, events=tuple(events))


def names(found) -> list[tuple[int, str]]:
    return [(one.measured.worker, one.measured.name) for one in found]


def test_longest_beyond_forecast_come_first() -> None:
    predicted, measured = drawn(1), drawn(2, "measured")
    found = differences(predicted, measured)
    assert len(found) == 24
    lengths = {(e.worker, e.name): e.end - e.start for e in predicted.events}
    beyond = {
        (e.worker, e.name): e.end - e.start - lengths[e.worker, e.name] for e in measured.events
    }
    assert names(found) == sorted(beyond, key=lambda key: -beyond[key])
    assert [d.beyond for d in found] == pytest.approx(sorted(beyond.values(), reverse=True))


@pytest.mark.parametrize("by", [1e-9, 1000.0])
def test_no_unit_of_time_is_built_in(by) -> None:
    predicted, measured = drawn(1), drawn(2, "measured")
    plain = differences(predicted, measured)
    other = differences(scaled(predicted, by), scaled(measured, by))
    assert names(plain) == names(other)
    assert [d.beyond * by for d in plain] == pytest.approx([d.beyond for d in other])


def test_pace_takes_a_machine_that_is_slower_in_everything_off() -> None:
    predicted, measured = drawn(1), drawn(2, "measured")
    slow = differences(paced(scaled(predicted, 0.25), 4.0), measured)
    assert names(slow) == names(differences(predicted, measured))
    steady = scaled(replace(predicted, source="measured"), 3.0)
    last = steady.events[-1]
    late = replace(steady, events=(*steady.events[:-1], replace(last, end=last.end + 50)))
    found = differences(predicted, late)
    assert pace_of(found) == pytest.approx(3.0), "one action that is far out moves it not at all"
    again = differences(paced(predicted, pace_of(found)), late)
    assert again[0].beyond == pytest.approx(50) and abs(again[1].beyond) < 1e-9
    assert pace_of([]) == 1.0


def test_a_step_that_does_something_twice_is_matched_by_turn() -> None:
    def gathers(source, *spans):
        return trace(
            source, *(Event(0, "network", "GATHER.parameters", 1, -1, a, b) for a, b in spans)
        )

    predicted = gathers("predicted", (5.0, 6.0), (0.0, 1.0))  # not in order of time
    measured = gathers("measured", (0.0, 3.0), (7.0, 7.5), (9.0, 9.5))
    assert pairs(predicted, measured) == [(0, 1), (1, 0)]
    found = differences(predicted, measured)
    assert [(d.predicted.start, d.beyond) for d in found] == [(0.0, 2.0), (5.0, -0.5)]
    assert alone(predicted, measured) == ([], [measured.events[2]])


def test_parts_and_workers_are_told_apart() -> None:
    def updates(source):
        return trace(
            source,
            *(
                Event(w, "host", "UPDATE", 0, -1, p, p + 1 + w, part=p)
                for w in (0, 1)
                for p in (1, 0)
            ),
        )

    both = pairs(updates("predicted"), updates("measured"))
    assert both == [(i, i) for i in range(4)]
    elsewhere = trace("measured", replace(updates("measured").events[0], worker=5))
    assert pairs(updates("predicted"), elsewhere) == []
    assert (
        pairs(
            updates("predicted"), trace("measured", replace(elsewhere.events[0], worker=0, part=9))
        )
        == []
    )


def test_who_receives_late_because_it_was_sent_late_is_not_slow() -> None:
    def step(source, slow: float) -> Trace:
        done = 1.0 + slow
        state = "activations"
        return trace(
            source,
            Event(0, "compute", "FORWARD", 0, 3, 0.0, done),
            Event(0, "send", f"SEND.{state}", 0, 3, done, done + 0.2),
            Event(1, "receive", f"RECV.{state}", 0, 3, 0.5, done + 0.25),
            Event(1, "compute", "FORWARD", 1, 3, done + 0.25, done + 1.25),
        )

    measured = step("measured", 2.0)
    assert waiting(measured) == pytest.approx([0, 0, 2.5, 0])
    found = differences(step("predicted", 0.0), measured)
    assert names(found)[0] == (0, "FORWARD s0 m3") and found[0].beyond == pytest.approx(2.0)
    assert [d.beyond for d in found[1:]] == pytest.approx([0, 0, 0])
    received = next(d for d in found if d.measured.kind.startswith("RECV"))
    assert (received.took, received.waited) == pytest.approx((0.25, 2.5))


def test_receivers_of_two_pipelines_wait_for_their_own_sender() -> None:
    events = [Event(w, "send", "SEND", 0, 0, at, at + 1) for w, at in ((0, 4.0), (1, 2.0))]
    events += [Event(w, "receive", "RECV", 0, 0, 1.0, 6.0) for w in (3, 2)]
    assert waiting(trace("measured", *events)) == [0, 0, 1.0, 3.0]


def test_who_sends_before_it_is_awaited_waits_too() -> None:
    def passed(sent, received):
        return trace(
            "measured",
            Event(0, "send", "SEND.gradients", 2, 1, *sent),
            Event(1, "receive", "RECV.gradients", 2, 1, *received),
        )

    assert waiting(passed((1.0, 5.0), (4.0, 5.5))) == [3.0, 0.0]
    assert waiting(passed((1.0, 2.0), (4.0, 5.5))) == [0.0, 0.0], "it was put down and left"
    assert waiting(passed((5.6, 5.7), (4.0, 5.5))) == [0.0, 1.5], "its thread wrote the time late"


def test_sums_wait_for_the_last_that_takes_part() -> None:
    norms = [Event(w, "compute", "NORM", -1, -1, at, 5.0) for w, at in enumerate((1.0, 4.5, 3.0))]
    assert waiting(trace("measured", *norms)) == [3.5, 0.0, 1.5]
    apart = [  # two groups of two that gather the same stage one group after the other
        Event(w, "network", "GATHER.parameters", 2, -1, at, end)
        for w, at, end in ((0, 0.0, 2.0), (1, 1.0, 2.0), (2, 7.0, 9.0), (3, 8.5, 9.0))
    ]
    assert waiting(trace("measured", *apart)) == [1.0, 0.0, 1.5, 0.0]
    backward = [Event(w, "compute", "BACKWARD", 0, 0, 2.0 * w, 5.0) for w in (0, 1)]
    assert waiting(trace("measured", *backward)) == [0, 0], (
        "copies of a stage compute by themselves"
    )


def test_empty_traces() -> None:
    assert differences(trace("predicted"), trace("measured")) == []
    assert waiting(trace("measured")) == [] and alone(trace("predicted"), drawn(1)) == (
        [],
        list(drawn(1).events),
    )
