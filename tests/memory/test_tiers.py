"""Declarations of tiers: what is understood, the exact words where not, and what is opened."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from outsize.errors import OutsizeError
from outsize.hardware import Rate, Tier, host
from outsize.memory.disk import DiskStore
from outsize.memory.store import MemoryStore
from outsize.memory.tiers import (
    SAMPLE,
    TierSpec,
    disk_tier,
    host_tier,
    measured,
    memory_tier,
    open_stores,
    own_rate,
)

GIB = 1 << 30


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "memory", lambda: host.Memory(8 * GIB, 6 * GIB))
    monkeypatch.setattr(host, "disk_free", lambda folder: 100 * GIB)


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    return tmp_path / "a", tmp_path / "b"


def test_what_is_declared(two: tuple[Path, Path]) -> None:
    a, b = two
    assert host_tier("4GiB") == TierSpec("host", "memory", (), 4 * GIB)
    assert disk_tier(f"{a}:20GB") == TierSpec("disk", "disk", (a,), 20 * 10**9)
    assert disk_tier(f"{a},{b}:1.5GiB") == TierSpec("disk", "disk", (a, b), 3 * GIB // 2)
    assert memory_tier("cxl=/mnt/cxl:64GiB") == TierSpec(
        "cxl", "memory", (Path("/mnt/cxl"),), 64 * GIB
    )
    assert memory_tier("far-2=/dev/dax0.0:4096").bytes == 4096
    for spec in (host_tier("4096:pageable"), memory_tier("cxl=/mnt/cxl:4096:pageable")):
        assert (spec.bytes, spec.pageable) == (4096, True)


def test_a_disk_without_a_size_takes_most_of_what_is_free(two: tuple[Path, Path]) -> None:
    a, b = two
    assert disk_tier(str(a)).bytes == 90 * GIB
    assert disk_tier(str(a), near=3).bytes == 30 * GIB, "each worker's part"
    assert disk_tier(f"{a}:7GiB", near=3).bytes == 7 * GIB, "what is said is each worker's"
    assert disk_tier(f"{a},{b}").bytes == 90 * GIB, "two folders of one disk share what is free"


@pytest.fixture
def apart(two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second folder lies on another disk."""
    real = Path.stat

    class Other:
        st_dev = -1
        st_mode = real(two[1]).st_mode

    monkeypatch.setattr(Path, "stat", lambda path, **_: Other if path == two[1] else real(path))


@pytest.mark.usefixtures("apart")
def test_the_fuller_of_two_disks_decides(
    two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = two
    monkeypatch.setattr(host, "disk_free", lambda folder: (10 if folder == b else 100) * GIB)
    assert disk_tier(f"{a},{b}").bytes == 18 * GIB


def test_a_name_may_hold_a_colon(tmp_path: Path) -> None:
    odd = tmp_path / "x:y"
    odd.mkdir()
    assert disk_tier(f"{odd}:2MiB") == TierSpec("disk", "disk", (odd,), 2 << 20)
    assert disk_tier(str(odd)).paths == (odd,)


@pytest.mark.parametrize(
    ("make", "text", "words"),
    [
        (
            host_tier,
            "9GiB",
            "--host-memory 9GiB: 9,663,676,416 bytes, but this process may hold 8,589,934,592"
            " (1,073,741,824 missing); ask for less",
        ),
        (
            host_tier,
            "lots",
            "--host-memory lots: memory size 'lots' is not understood; write it as 512MiB or 2GiB",
        ),
        (host_tier, "0", "tier 'host': 0 bytes, expected more than none"),
        (
            disk_tier,
            "/nowhere:2GiB",
            "--disk /nowhere:2GiB: '/nowhere' is not a folder; make it, or name one that is there,"
            " as DIR:SIZE or DIR,DIR:SIZE",
        ),
        (
            disk_tier,
            "/:20 cakes",
            "--disk /:20 cakes: memory size '20 cakes' is not understood; write it as 512MiB or"
            " 2GiB",
        ),
        (
            disk_tier,
            "/,/tmp/..:1GiB",
            "--disk /,/tmp/..:1GiB: a folder is named twice; name each once",
        ),
        (
            disk_tier,
            ":1GiB",
            "--disk :1GiB: '.' is not a folder; make it, or name one that is there, as DIR:SIZE or"
            " DIR,DIR:SIZE",
        ),
        (
            memory_tier,
            "cxl=/mnt/cxl",
            "--tier cxl=/mnt/cxl: expected NAME=PATH:SIZE, such as cxl=/mnt/cxl:64GiB",
        ),
        (
            memory_tier,
            "/mnt/cxl:1GiB",
            "--tier /mnt/cxl:1GiB: expected NAME=PATH:SIZE, such as cxl=/mnt/cxl:64GiB",
        ),
        (
            memory_tier,
            "disk=/x:1GiB",
            "--tier disk=/x:1GiB: 'disk' is a tier already; choose another name",
        ),
    ],
)
def test_what_is_not_understood(make, text: str, words: str) -> None:
    with pytest.raises(OutsizeError) as error:
        make(text)
    assert str(error.value) == words


def test_stores_are_opened_and_closed(two: tuple[Path, Path]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    specs = [
        TierSpec("host", "memory", (), 1 << 20),
        disk_tier(f"{two[0]},{two[1]}:4MiB"),
        TierSpec("cxl", "memory", (two[0],), 1 << 20),
    ]
    data, out = torch.arange(1000.0), torch.zeros(1000)
    with open_stores(specs) as stores:
        assert [(name, type(store), store.name) for name, store in stores.items()] == [
            ("host", MemoryStore, "host"),
            ("disk", DiskStore, "disk"),
            ("cxl", MemoryStore, "cxl"),
        ]
        places = {name: store.reserve(data.nbytes) for name, store in stores.items()}
        for name, store in stores.items():
            store.write(places[name], data)
            store.read(places[name], out.zero_())
            assert torch.equal(out, data)
        assert len(os.listdir("/proc/self/fd")) > before
    assert len(os.listdir("/proc/self/fd")) == before
    for name, store in stores.items():
        with pytest.raises(OutsizeError, match=f"tier '{name}' is closed"):
            store.read(places[name], out)


def test_what_was_opened_is_closed_when_another_cannot_be(two: tuple[Path, Path]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    specs = [disk_tier(f"{two[0]}:4MiB"), TierSpec("cxl", "memory", (Path("/no/where"),), 4096)]
    with pytest.raises(OutsizeError, match="tier 'cxl'"), open_stores(specs):
        raise AssertionError("opened")
    assert len(os.listdir("/proc/self/fd")) == before
    same = TierSpec("host", "memory", (), 4096)
    with (
        pytest.raises(OutsizeError, match="tier 'host' is declared 2 times; declare it once"),
        open_stores([same, same]),
    ):
        raise AssertionError("opened")


def test_a_tier_in_memory_is_measured_by_using_it(two: tuple[Path, Path]) -> None:
    ticks = iter([0.0, 4.0, 4.0, 9.0, 9.0, 11.0, 11.0, 15.0, 15.0, 18.0, 18.0, 24.0])
    spec = TierSpec("cxl", "memory", (two[0],), GIB)
    tier = measured(spec, "d", lambda: next(ticks))
    note = "copied by one thread"
    assert tier == Tier(
        "cxl",
        GIB,
        read=Rate(SAMPLE / 4, "B/s", "probe", "d", note=note),
        write=Rate(SAMPLE / 2, "B/s", "probe", "d", note=note),
    )
    assert list(two[0].iterdir()) == []


def test_a_tier_in_memory_is_read_and_written_where_it_lies(two: tuple[Path, Path]) -> None:
    ticks = iter([0.0, 4.0, 4.0, 9.0, 9.0, 11.0])
    size = GIB // 12 * 12
    rate = own_rate(TierSpec("cxl", "memory", (two[0],), GIB), "d", lambda: next(ticks))
    assert rate == Rate(min(SAMPLE // 12 * 12, size) / 2, "B/s", "probe", "d", note="triad")
    assert list(two[0].iterdir()) == []


@pytest.mark.parametrize(("disks", "expected"), [(1, (3, 10)), (2, (6, 20))])
def test_striped_folders_are_as_fast_as_the_slowest_times_their_number(
    disks: int,
    expected: tuple[float, float],
    two: tuple[Path, Path],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from outsize.memory import tiers

    def rates(folder: Path, date: str, clock: object) -> tuple[Rate, Rate]:
        read, write = (3.0, 20.0) if folder == two[0] else (5.0, 10.0)
        return Rate(read, "B/s", "probe", date), Rate(write, "B/s", "probe", date)

    monkeypatch.setattr(tiers, "disk_rates", rates)
    if disks == 2:
        request.getfixturevalue("apart")
    tier = measured(disk_tier(f"{two[0]},{two[1]}:4MiB"), "d")
    assert tier.read is not None and tier.write is not None
    assert (tier.name, tier.bytes) == ("disk", 4 << 20)
    assert (tier.read.value, tier.write.value) == expected
