"""Measured collectives: seconds between the sizes of a table, the link that explains it, and what
is hidden beside computing; a processor's rates that part of its cores measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rates import known_hardware, rate

from outsize.foresight.links import Ranks
from outsize.foresight.links import seconds as priced
from outsize.foresight.step import together
from outsize.hardware import Link, Slowed, Talked, parse_spec
from outsize.hardware.cluster import of_machine
from outsize.hardware.shared import shared
from outsize.hardware.talking import link_of, norm, seconds, slowed
from outsize.simulate.events import Node, run

B, WAIT, WORKERS = 2e9, 1e-5, 4
SIZES = (1 << 10, 1 << 16, 1 << 22)


def ring(passes: int, size: float, workers: int = WORKERS) -> float:
    """What a ring of that bandwidth and latency takes."""
    return passes * ((workers - 1) * WAIT + size * (workers - 1) / workers / B)


TABLE = tuple(
    Talked(name, size, WORKERS, WORKERS, rate(ring(passes, size), "s"))
    for name, passes in (("all_reduce", 2), ("all_gather", 1))
    for size in SIZES
)


def test_the_link_of_a_table_of_rings_is_their_own() -> None:
    link = link_of(TABLE, "workers", "devices")
    assert link.bandwidth.value == pytest.approx(B, rel=0.02)
    assert link.latency is not None and link.latency.value == pytest.approx(WAIT, rel=0.02)


@pytest.mark.parametrize("size", [*SIZES, 1 << 14, 1 << 20, 1 << 30])
def test_seconds_are_those_of_a_ring_at_and_between_its_sizes(size: int) -> None:
    found = seconds(TABLE, "all_reduce", size, WORKERS, WORKERS)
    assert found is not None
    assert found == pytest.approx(ring(2, size), rel=0.02 if size > max(SIZES) else 1e-12)


def test_groups_that_were_not_measured_have_none() -> None:
    assert seconds(TABLE, "all_to_all", 1e6, WORKERS, WORKERS) is None
    assert seconds(TABLE, "all_reduce", 1e6, WORKERS, 2) is None
    assert seconds(TABLE, "all_reduce", 1, WORKERS, WORKERS) == ring(2, min(SIZES))


@pytest.mark.parametrize("calls", [1, 8])
def test_a_forecast_takes_what_was_measured_where_it_was(calls: int) -> None:
    """Of four workers, as measured in so many calls; of two, by the link."""
    made = replace(known_hardware(), links=(link_of(TABLE, "workers", "devices"),), talked=TABLE)
    device = replace(made.devices[0], count=WORKERS)
    (group,) = of_machine(replace(made, devices=(device,))).groups
    found = priced("all_reduce", calls * SIZES[1], Ranks(WORKERS, WORKERS), group, calls)
    assert found == pytest.approx(calls * ring(2, SIZES[1]))
    bare = replace(group, levels=(replace(group.levels[0], talked=()),))
    two = Ranks(2, 2)
    assert priced("all_reduce", 1e6, two, group) == priced("all_reduce", 1e6, two, bare)


@pytest.mark.parametrize("factor", [1.0, 1.5, 1.9, 3.0])
@pytest.mark.parametrize("alone", [(1.0, 1.0), (1.0, 0.4), (0.3, 2.0)])
def test_the_slowdown_of_two_lanes_is_found_again(factor: float, alone) -> None:
    """Played by the event simulator with a coefficient; `slowed` sees the ends alone."""
    both = [Node(0, "compute", alone[0]), Node(0, "network", alone[1])]
    played = run(both, {frozenset({"compute", "network"}): factor})
    found = slowed(alone, (played.ends[0], played.ends[1]), "d")
    assert (found.computing, found.talking) == pytest.approx((factor, factor))
    if alone == (1.0, 1.0) and 1.2 < factor < 2:  # the norm gives what both take together
        assert together(1.0, 1.0, norm(found)) == pytest.approx(max(played.ends))


def test_a_norm_stays_between_nothing_and_everything_hidden() -> None:
    assert norm(Slowed(1.0, 1.0, "d")) == 8.0
    assert norm(Slowed(2.0, 2.0, "d")) == norm(Slowed(1.4, 9.0, "d")) == 1.0


def test_several_machines_in_a_file_are_a_cluster_with_their_links() -> None:
    far = tuple(replace(one, inside=2) for one in TABLE)
    links = (
        Link("workers", "devices", rate(3e9, "B/s"), rate(1e-6, "s")),
        Link("network", "nodes", rate(1e9, "B/s"), rate(1e-5, "s"), 2),
    )
    device = replace(known_hardware().devices[0], count=2)
    made = replace(
        known_hardware(), devices=(device,), links=links, talked=far, rates=((0, 1e9), (2e9, 0))
    )
    cluster = of_machine(made)
    assert (cluster.count, cluster.nodes) == (4, 2) and cluster.rates == made.rates
    inner, outer = cluster.groups[0].levels
    assert (inner.bandwidth.value, outer.bandwidth.value) == (3e9, 1e9)
    assert (inner.talked, outer.talked) == ((), far)


@pytest.mark.parametrize(
    ("cores", "threads", "workers", "part"), [(2, 1, 2, 1.0), (2, 1, 3, 2 / 3), (2, 2, 2, 0.5)]
)
def test_workers_have_cores_that_the_rates_did_not_use(cores, threads, workers, part) -> None:
    """Rates of one thread are of one core: two workers on two cores have as much each."""
    whole = known_hardware()
    device = replace(whole.devices[0], cores=cores, threads=threads)
    mine = shared(replace(whole, devices=(device,)), workers).devices[0]
    assert mine.peak["fp32"].value == pytest.approx(part * device.peak["fp32"].value)
    assert mine.memory_bytes == device.memory_bytes // workers


def test_machines_of_a_file_are_not_workers_of_one(tmp_path) -> None:
    from outsize.errors import OutsizeError
    from outsize.hardware import dumps

    network = Link("network", "nodes", rate(1e9, "B/s"), None, 3)
    (tmp_path / "hw.yaml").write_text(dumps(replace(known_hardware(), links=(network,))))
    assert parse_spec(str(tmp_path / "hw.yaml")).nodes == 3
    with pytest.raises(OutsizeError, match="3 machines in it; expected one"):
        parse_spec(f"2 x {tmp_path / 'hw.yaml'}")
