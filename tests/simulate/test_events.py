"""The event simulator, against hand-made cases, a slow reference."""

from __future__ import annotations

import random

import pytest

from outsize.errors import OutsizeError
from outsize.schedule.pipelines import dualpipe, one_f_one_b, zb_h1
from outsize.simulate.coarse import Times, play
from outsize.simulate.events import Node, run


def test_lanes_run_in_order_and_wait_for_what_they_need():
    nodes = [
        Node(0, "compute", 2.0),
        Node(0, "network", 0.5, (0,)),
        Node(1, "network", 0.0, (1,), lag=0.25),
        Node(1, "compute", 1.0, (2,)),
        Node(0, "compute", 3.0),
    ]
    got = run(nodes)
    assert got.starts == (0.0, 2.0, 2.75, 2.75, 2.0)
    assert got.ends == (2.0, 2.5, 2.75, 3.75, 5.0)
    assert got.makespan == 5.0
    assert got.busy == (5.0, 1.0) and got.idle_in_makespan == (0.0, 4.0)
    assert got.idle_in_span == (0.0, 0.0)


def test_links_take_time():
    nodes = [
        Node(0, "compute", 1.0),
        Node(1, "compute", 0.5),
        Node(1, "compute", 2.0, (0,), lag=0.1),
        Node(0, "compute", 1.0, (2,)),
    ]
    got = run(nodes)
    assert got.makespan == pytest.approx(4.1)
    assert got.idle_in_span == pytest.approx((2.1, 0.6))


def test_bytes_are_freed_before_others_are_taken():
    nodes = [
        Node(0, "compute", 1.0, takes=5),
        Node(0, "compute", 1.0, takes=3, gives=8),
        Node(0, "compute", 1.0, takes=6, gives=6),
        Node(1, "compute", 1.0, takes=2),
        Node(1, "fetch", 0.5, takes=7, gives=7),
    ]
    assert run(nodes).peaks == (8, 9)


def test_circles_and_bad_durations_are_refused():
    with pytest.raises(OutsizeError, match="never starts: what it needs waits for it"):
        run([Node(0, "compute", 1.0, (1,)), Node(0, "compute", 1.0)])
    for node in (
        Node(0, "compute", -1.0),
        Node(0, "compute", float("nan")),
        Node(0, "a", 1, (), -1),
    ):
        with pytest.raises(OutsizeError, match="not negative"):
            run([node])
    assert run([]).makespan == 0.0


def test_lanes_that_share_a_worker_slow_each_other_down():
    pair = {frozenset(("compute", "network")): 1.5}
    nodes = [Node(0, "compute", 4.0), Node(0, "network", 2.0), Node(1, "network", 2.0)]
    got = run(nodes, pair)
    # Both until the network has done its 2 s at 1/1.5; by then compute has done 2 s too.
    assert got.ends == pytest.approx((5.0, 3.0, 2.0))
    assert run(nodes, {frozenset(("compute", "disk")): 3.0}).ends == (4.0, 2.0, 2.0)


def graph(count: int, seed: int) -> list[Node]:
    rng = random.Random(seed)
    return [
        Node(
            rng.randrange(4),
            rng.choice(("compute", "network")),
            rng.choice((0.0, 0.5, 1.0, 2.0)),
            tuple(rng.sample(range(i), min(i, rng.randrange(3)))),
            rng.choice((0.0, 0.25)),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_both_ways_to_play_agree_with_a_slow_one(seed):
    """The reference settles nodes again and again until nothing changes."""
    nodes = graph(60, seed)
    starts = [0.0] * len(nodes)
    changed = True
    while changed:
        changed = False
        last: dict[tuple[int, str], float] = {}
        for i, node in enumerate(nodes):
            lane = (node.worker, node.lane)
            ends = [starts[j] + nodes[j].duration + node.lag for j in node.needs]
            start = max([last.get(lane, 0.0), *ends])
            changed = changed or start != starts[i]
            starts[i] = start
            last[lane] = start + node.duration
    assert run(nodes).starts == pytest.approx(starts)
    assert run(nodes, {frozenset(("a", "b")): 2.0}).starts == pytest.approx(starts)


def test_slowdown_loses_what_the_overlap_costs():
    """Two lanes that are busy all the time at a coefficient of 2 gain nothing from overlap."""
    nodes = [Node(0, lane, 1.0) for _ in range(5) for lane in ("compute", "network")]
    assert run(nodes, {frozenset(("compute", "network")): 2.0}).makespan == pytest.approx(10.0)
    both = {frozenset(("compute", "network")): 2.0, frozenset(("compute", "fetch")): 3.0}
    third = [Node(0, lane, took) for lane, took in (("compute", 1), ("network", 9), ("fetch", 9))]
    assert run(third, both).ends[0] == pytest.approx(6.0)


def test_ten_thousand_actions_are_played():
    """benchmarks/planning.py says how long it takes."""
    nodes = graph(10_000, 0)
    got = run(nodes)
    assert got.peaks and got.idle_in_span
    assert got.makespan >= max(got.busy) > 0


def test_transfers_and_slow_stages_count():
    """1F1B with a transfer of c: the longest chain crosses each of the links twice."""
    for devices, transfer in ((2, 0.5), (4, 0.25)):
        got = play(one_f_one_b(devices, 1), Times(1, 1, 1, transfer)).run
        assert got.makespan == pytest.approx(3 * devices + 2 * (devices - 1) * transfer)
    slow = play(one_f_one_b(2, 1), Times(1, 1, 1, stages=(1.0, 3.0))).run
    assert slow.makespan == pytest.approx(3 + 9)
    with pytest.raises(OutsizeError, match="factors of 2 stages; expected 3"):
        play(one_f_one_b(3, 1), Times(1, 1, 1, stages=(1.0, 3.0)))


def test_the_trace_has_what_takes_time_and_the_fullest_workers_memory():
    played = play(zb_h1(3, 4), Times(1, 1, 1))
    trace = played.trace()
    assert trace.span() == played.run.makespan
    assert len(trace.events) == 3 * 4 * 3  # forwards and both gradients; no step of no length
    assert trace.peak() == max(played.run.peaks) * 2**20
    paired = play(dualpipe(2, 4), Times(1, 1, 1)).trace()
    assert {event.lane for event in paired.events} == {"compute", "compute beside"}
    with pytest.raises(OutsizeError, match="expected seconds"):
        Times(1, -1, 1)
