"""The probe with a timer that gives the times, so that every rate is known beforehand."""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rates import known_machine

from outsize import accelerator
from outsize.errors import OutsizeError
from outsize.hardware import Hardware, Rate, host, measure
from outsize.hardware import probe as package_probe
from outsize.hardware.disk import OPERATION, ROUNDS, THREADS, disk_rates, preallocate, unnamed
from outsize.hardware.form import dumps, loads
from outsize.hardware.handing import BLOCKS
from outsize.hardware.hardware import Tier
from outsize.hardware.probe import keep, probe

CPU = torch.device("cpu")


class Clockwork:
    """Every call takes the same time; counts calls, and runs the work when asked."""

    def __init__(self, seconds: float = 1e-3, run: bool = False) -> None:
        self.seconds, self.run, self.calls = seconds, run, 0

    def __call__(self, work: Callable[[], object], device: torch.device) -> float:
        self.calls += 1
        if self.run:
            work()
        return self.seconds


@pytest.fixture(autouse=True)
def _idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "busy", lambda: False)


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small shape and no large arrays, for tests that are not about what is measured."""
    rate = Rate(1e9, "B/s", "probe", "d")
    monkeypatch.setattr(measure, "CPU_SHAPES", ((8, 8, 8),))
    monkeypatch.setattr(measure, "bandwidth", lambda *_: rate)
    monkeypatch.setattr(measure, "COPIED", 4096)


def take(tmp_path: Path, **more: Any) -> Hardware:
    return probe("cpu", cache=tmp_path / "cache", directory=tmp_path, **more)


def test_rates_follow_from_the_times(tmp_path: Path) -> None:
    hardware = take(tmp_path, timer=Clockwork(1e-3, run=True))
    (device,) = hardware.devices
    shapes = {(m.tokens, m.d_in, m.d_out) for m in device.measured.matmul if m.dtype == "bf16"}
    assert shapes == set(measure.CPU_SHAPES)
    for entry in device.measured.matmul:
        assert entry.rate.value == pytest.approx(entry.flops / 1e-3)
    assert device.peak["fp32"].value == pytest.approx(2 * 512 * 384 * 14336 / 1e-3)
    assert device.bandwidth.value == pytest.approx(3 * 4 * 2**24 / 1e-3)
    assert device.measured.overhead is not None
    assert device.measured.overhead.value == pytest.approx(1e-3 / measure.TINY_CALLS)
    assert device.measured.handed is not None  # a block has 15 operators and 27 in its gradients
    assert 30 < 1e-3 / device.measured.handed.value / BLOCKS < 60
    both = {(a.dtype, a.direction): a.rate.value for a in device.measured.attention}
    assert both["fp32", "forward"] == pytest.approx(2 * 512**2 * 64 * 6 / 1e-3)
    assert both["bf16", "backward"] == pytest.approx(5 * 512**2 * 64 * 6 / 1e-3)
    assert [tier.name for tier in hardware.tiers] == ["device", "host", "disk"]
    host_tier = hardware.tier("host")
    assert host_tier.read is not None and host_tier.read == host_tier.write
    assert host_tier.read.value == pytest.approx(2**27 / 1e-3)
    assert loads(dumps(hardware)) == hardware


def test_work_is_done_in_the_shape_and_dtype_it_names() -> None:
    done: list[tuple[tuple[int, ...], torch.dtype]] = []

    def timer(work: Callable[[], object], device: torch.device) -> float:
        result = work()
        assert isinstance(result, torch.Tensor)
        done.append((tuple(result.shape), result.dtype))
        return 1e-3

    found = list(measure.matmuls(CPU, True, timer, "d"))
    assert done == [((m.tokens, m.d_out), measure.DTYPES[m.dtype]) for m in found]


def test_memory_is_copied_from_one_buffer_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[tuple[int, int, int]] = []
    monkeypatch.setattr(ctypes, "memmove", lambda *span: moved.append(span))
    assert measure.copy(Clockwork(0.5, run=True), "d").value == 2 * measure.COPIED
    ((to, source, count),) = moved
    assert abs(to - source) >= count == measure.COPIED


def test_a_slow_dtype_leaves_out_its_long_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 50 MFLOP/s what is longer than a tenth of a second by the shape before it."""
    monkeypatch.setattr(measure, "CPU_SHAPES", ((8, 8, 8), (64, 64, 64), (128, 128, 128),
                                                (256, 256, 256), (300, 300, 300)))  # fmt: skip

    def timer(work: Callable[[], object], device: torch.device) -> float:
        result = work()
        assert isinstance(result, torch.Tensor)
        return 1e-5 + 2 * len(result) ** 3 / 5e7

    found = list(measure.matmuls(CPU, True, timer, "d"))
    assert [m.tokens for m in found if m.dtype == "fp32"] == [8, 64, 128]
    monkeypatch.setattr(measure, "LARGE", (128, 128, 128))
    found = list(measure.matmuls(CPU, False, timer, "d"))
    assert len(found) == 2 * 6, "a thorough probe takes them all"


def test_calls_that_others_hold_up_leave_out_no_shape() -> None:
    """On a machine whose cores are taken the smallest call takes as long as any."""
    found = list(measure.matmuls(CPU, True, Clockwork(0.05), "d"))
    assert len(found) == 2 * len(measure.CPU_SHAPES)


@pytest.mark.usefixtures("light")
def test_rates_are_kept_and_memory_is_asked_for_afresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = Clockwork()
    first = take(tmp_path, timer=timer)
    calls = timer.calls
    monkeypatch.setattr(host, "memory", lambda: host.Memory(12345, 678))
    second = take(tmp_path, timer=timer)
    assert timer.calls == calls
    assert second.devices[0].measured == first.devices[0].measured
    assert second.devices[0].memory_bytes == 12345
    assert second.tier("device").bytes == second.tier("host").bytes == 678


@pytest.mark.usefixtures("light")
def test_another_thread_count_is_another_machine(tmp_path: Path) -> None:
    timer = Clockwork()
    take(tmp_path, timer=timer)
    calls = timer.calls
    torch.set_num_threads(2)
    take(tmp_path, timer=timer)
    assert timer.calls == 2 * calls
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("damage", ["", "{", "[]", "other", "cut", "field", "\xff"])
def test_a_damaged_cache_is_ignored_and_mended(damage: str, tmp_path: Path) -> None:
    timer = Clockwork()
    first = take(tmp_path, timer=timer)
    calls = timer.calls
    (file,) = (tmp_path / "cache").iterdir()
    text = file.read_text()
    other = json.dumps({**json.loads(text), "key": {"processor": "another"}})
    damaged = {
        "cut": text[: len(text) // 2],
        "other": other,
        "field": text.replace('"FLOP/s"', '"furlongs"', 1),
    }
    file.write_text(damaged.get(damage, damage), encoding="latin-1")
    assert take(tmp_path, timer=timer).devices[0].peak == first.devices[0].peak
    assert timer.calls == 2 * calls
    assert json.loads(file.read_text()) == json.loads(text)


@pytest.mark.usefixtures("light")
def test_a_busy_machine_is_measured_but_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "busy", lambda: True)
    take(tmp_path, timer=Clockwork())
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("light")
def test_a_cache_that_cannot_be_written_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    assert take(tmp_path, timer=Clockwork()).source == "probe"


def test_rates_kept_by_hand_are_taken_instead(tmp_path: Path) -> None:
    known, timer = known_machine(), Clockwork()
    keep(known, cache=tmp_path / "cache")
    found = take(tmp_path, timer=timer)
    assert timer.calls == 0 and found.devices[0].peak == known.devices[0].peak
    assert found.tier("host").read == known.tier("host").read
    assert found.tier("host").bytes > 0
    cxl = replace(known, tiers=(*known.tiers, Tier("cxl", 1)))
    with pytest.raises(OutsizeError, match="1 devices and the tiers device, host, disk, cxl; exp"):
        keep(cxl, cache=tmp_path)


def test_a_thorough_probe_measures_the_disk(tmp_path: Path) -> None:
    ticks = iter([0.0, 4.0, 4.0, 6.0, 6.0, 8.0, 8.0, 12.0])  # the better of two rounds counts
    assert ROUNDS == 2
    read, write = disk_rates(tmp_path, "d", 2 * OPERATION, lambda: next(ticks))
    assert (read.value, write.value) == (OPERATION, OPERATION)
    assert f"{THREADS} operations of 2 MiB" in read.note
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OutsizeError, match="cannot measure the disk"):
        disk_rates(tmp_path / "none", "d")


@pytest.mark.parametrize("direct", [True, False])
def test_the_disk_is_read_past_the_page_cache(
    direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    dropped: list[tuple[int, int]] = []
    real = os.open

    def watched(name: str, flags: int, *rest: Any, **more: Any) -> int:
        opened.append(flags)
        if flags & os.O_DIRECT and not direct:
            raise OSError(22, "Invalid argument")
        return real(name, flags & ~os.O_DIRECT, *rest, **more)

    def advised(handle: int, offset: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        dropped.append((offset, size))

    monkeypatch.setattr(os, "open", watched)
    monkeypatch.setattr(os, "posix_fadvise", advised)
    read, write = disk_rates(tmp_path, "d", 2 * OPERATION)
    assert bool(opened[-1] & os.O_DIRECT) == direct
    assert ("no direct I/O" in read.note) == ("no direct I/O" in write.note) == (not direct)
    pieces = {(0, OPERATION), (OPERATION, OPERATION)}
    assert (pieces <= set(dropped)) == (not direct)


def test_every_byte_is_moved_by_whole_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[tuple[str, int, int]] = []

    def watch(name: str) -> None:
        real = getattr(os, name)

        def call(handle: int, buffers: list[memoryview], offset: int) -> int:
            moved.append((name, offset, len(buffers[0])))
            return int(real(handle, buffers, offset))

        monkeypatch.setattr(os, name, call)

    watch("pwritev")
    watch("preadv")
    disk_rates(tmp_path, "d", 3 * OPERATION)
    wanted = [(name, n * OPERATION, OPERATION) for name in ("preadv", "pwritev") for n in range(3)]
    assert sorted(moved) == sorted(wanted * ROUNDS)


def test_files_without_a_name_where_the_system_has_no_call_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def older(name: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE and Path(name).is_dir():
            raise OSError(95, "Operation not supported")
        return real(name, flags, *rest, **more)

    def sparse(handle: int, start: int, size: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "open", older)
    monkeypatch.setattr(os, "posix_fallocate", sparse)
    handle = unnamed(tmp_path)
    preallocate(handle, 100, 23)
    assert list(tmp_path.iterdir()) == []
    assert os.fstat(handle).st_size == 123
    os.close(handle)
    with pytest.raises(FileNotFoundError):
        unnamed(tmp_path / "none")


def test_the_global_random_state_stays(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    take(tmp_path, timer=Clockwork(run=True))
    assert torch.equal(torch.get_rng_state(), before)


def test_tiny_work_is_repeated_often(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    assert measure.best_of(lambda: calls.append(1), CPU) > 0
    assert 2 <= len(calls) <= 1 + measure.MOST_REPEATS
    times = iter([1e-3, *[3e-6] * measure.MOST_REPEATS])
    monkeypatch.setattr(measure, "_host_seconds", lambda *_: next(times))
    assert measure.best_of(lambda: None, CPU) == 3e-6 and not list(times)


def test_slow_work_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([5.0, 4.0])
    monkeypatch.setattr(measure, "_host_seconds", lambda *_: next(times))
    assert measure.best_of(lambda: None, CPU) == 4.0


@pytest.mark.parametrize(("cores", "seconds"), [(2.0, 0.25), (1.0, 0.375), (0.5, 0.75)])
def test_no_work_counts_for_less_than_its_processor_time_over_what_is_granted(
    monkeypatch: pytest.MonkeyPatch, cores: float, seconds: float
) -> None:
    """A call that two threads spend 0.25 s on, and 0.375 s of processor time: a quota of half a
    core lets it go on for 0.75 s."""
    wall, spent = iter([0.0, 0.25] * 9), iter([0.0, 0.375] * 9)
    monkeypatch.setattr(time, "perf_counter", lambda: next(wall))
    monkeypatch.setattr(time, "process_time", lambda: next(spent))
    monkeypatch.setattr(host, "granted", lambda: cores)
    assert measure.best_of(lambda: None, CPU) == seconds


@pytest.mark.usefixtures("light")
def test_a_probe_says_what_a_quota_leaves_of_its_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And keeps the rates of one quota apart from those of another."""
    timer = Clockwork()
    whole = take(tmp_path, timer=timer).devices[0]
    calls = timer.calls
    assert whole.granted == 0.0
    monkeypatch.setattr(host, "granted", lambda *_: 0.5)
    held = take(tmp_path, timer=timer)
    assert (held.devices[0].granted, held.devices[0].cores) == (0.5, 1)
    assert timer.calls == 2 * calls and loads(dumps(held)) == held


@pytest.mark.parametrize(
    ("there", "said"),
    [("", "finds none here; use 'cpu' or 'auto'"), ("xpu", "finds only 'xpu' here")],
)
def test_devices_that_are_not_there(there: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "there", lambda: there)
    for name in ("abacus", "cuda"):
        with pytest.raises(OutsizeError, match=f"device is '{name}', and PyTorch {said}"):
            probe(name)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_real_gpu(tmp_path: Path) -> None:
    hardware = probe("cuda", cache=tmp_path)
    (device,) = hardware.devices
    assert device.kind == "gpu" and hardware.tier("host").own is not None
    assert device.peak["bf16"].value > device.peak["fp32"].value / 2 > 0
    assert [tier.name for tier in hardware.tiers] == ["device", "host", "disk"]
    assert hardware.tier("device").bytes <= device.memory_bytes
    assert probe("cuda", cache=tmp_path).devices[0].measured == device.measured


def test_the_package_does_not_import_torch_by_itself() -> None:
    import subprocess
    import sys

    code = "import sys, outsize.hardware; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert package_probe.__name__ == "outsize.hardware.probe"
