"""Several workers' traces as one: clocks aligned, and what a run brings to its first worker."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from outsize.collectives import Lone, Mesh
from outsize.collectives.threads import play
from outsize.errors import OutsizeError
from outsize.trace import Event, Trace, laid_out, merged
from outsize.trace.gather import clock, gathered, packed, unpacked


def told(starts: list[float], begin: float | None, source="measured", norm: float = 9.0) -> Trace:
    """A worker's own trace: forwards of one second from `starts`, and a NORM that ends at norm."""
    events = [Event(0, "compute", "FORWARD", 0, m, at, at + 1.0) for m, at in enumerate(starts)]
    events.append(Event(0, "compute", "NORM", -1, -1, norm - 0.5, norm))
    return Trace(source, tuple(events), {"model": "tiny"}, begin)


def starts(trace: Trace, worker: int) -> list[float]:
    return [e.start for e in trace.events if e.worker == worker and e.kind == "FORWARD"]


def test_one_clock_says_how_steps_lie_to_each_other() -> None:
    whole = merged([told([0.0, 2.0], 107.5), told([0.25], 107.0), told([0.5], 108.0)])
    assert whole.workers == (0, 1, 2) and whole.meta == {"model": "tiny"}
    assert starts(whole, 0) == [0.5, 2.5] and starts(whole, 1) == [0.25]
    assert starts(whole, 2) == [1.5]
    assert whole.begin == 107.0, "second 0 is where the first step began"


def test_other_machines_are_aligned_where_all_leave_norm() -> None:
    """Truth first: absolute times, which each worker sees through its own machine's clock."""
    draw = random.Random(3)
    machines, ahead = [0, 1, 1, 2, 2, 0], [0.0, 5e4, -700.0]
    left = 50.0  # when the last has come to NORM
    begins, first, traces = [], [], []
    for place, machine in enumerate(machines):
        begin = 40.0 + draw.random()
        late = 0.0 if place in (0, 1, 3) else 1e-4 * draw.random()  # one of each machine is prompt
        first.append([begin + draw.random() for _ in range(3)])
        begins.append(begin)
        own = told(
            [at - begin for at in first[-1]], begin + ahead[machine], norm=left + late - begin
        )
        traces.append(own)
    names = [f"machine {machine}" for machine in machines]
    whole = merged(traces, names)
    for worker, times in enumerate(first):
        assert starts(whole, worker) == pytest.approx([t - min(begins) for t in times], abs=1e-9)


def test_a_worker_that_does_not_know_its_begin_is_aligned_too() -> None:
    whole = merged([told([1.0], 20.0, norm=9.0), told([1.0], None, norm=8.0)])
    assert starts(whole, 1) == [2.0]
    bare = [replace(told([at], None), events=told([at], None).events[:1]) for at in (1.0, 3.0)]
    assert [starts(merged(bare), w) for w in (0, 1)] == [[1.0], [3.0]], "no NORM: as they are"


def test_predicted_traces_start_together() -> None:
    whole = merged([told([0.0], None, "predicted", 5.0), told([1.0], None, "predicted", 9.0)])
    assert starts(whole, 0) == [0.0] and starts(whole, 1) == [1.0]


def test_what_cannot_be_merged() -> None:
    one = told([0.0], 1.0)
    with pytest.raises(OutsizeError, match="none; expected those of one source"):
        merged([])
    with pytest.raises(OutsizeError, match="predicted and measured; expected those of one source"):
        merged([one, told([0.0], 1.0, "predicted")])
    with pytest.raises(OutsizeError, match=r"the one of worker 1 is of workers \[0, 1\]"):
        merged([one, merged([one, one])])


def test_one_predicted_worker_stands_for_several() -> None:
    stages = merged([told([0.0], None, "predicted"), told([1.0, 4.0], None, "predicted")])
    whole = laid_out(stages, [0, 0, 1, 1])
    assert [starts(whole, worker) for worker in range(4)] == [[0.0], [0.0], [1.0, 4.0], [1.0, 4.0]]
    assert len(whole.events) == 2 * len(stages.events)


def test_the_first_worker_gets_everybodys() -> None:
    def own(rank: int) -> Trace:
        live = {"device/parameters": rank}
        trace = told([0.1 * n for n in range(rank * 40)], 100.0 + rank)
        return replace(trace, events=tuple(replace(e, live=live, peak=7) for e in trace.events))

    found = play(Mesh(data=2, tensor=2), lambda world: gathered(world, own(world.rank)))
    assert found[1:] == [None, None, None]
    assert found[0] == merged([own(rank) for rank in range(4)])
    assert found[0].events[-1].live == {"device/parameters": 3}
    assert gathered(Lone(), own(1)) == own(1)


def test_what_is_sent_comes_back_exactly() -> None:
    trace = told([1 / 3], 12345.678901234567)
    back, name = unpacked(packed(trace))
    assert (back, back.begin, name) == (trace, trace.begin, clock())
    assert len(clock()) > 8 and clock() == clock()
