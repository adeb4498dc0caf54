"""benchmarks/gpu.py runs on the CPU, saves what it finds, loses nothing to a case that fails."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outsize.hardware import form
from outsize.hardware.named import catalogue

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import gpu  # noqa: E402
from support.gpu import child, parts, table  # noqa: E402
from support.gpu.generating import read  # noqa: E402
from support.gpu.parts import Case  # noqa: E402
from support.gpu.place import HARDWARE, Place  # noqa: E402

HERE = Path(__file__)
MACHINE = {
    "kind": "cpu", "device": "a CPU", "cores": 2, "torch": "2", "device bytes": 100 << 30,
    "host bytes": 120 << 30, "disk bytes": 60 << 30,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _paths(monkeypatch):
    """Of the processes of cases."""
    folders = (BENCHMARKS, BENCHMARKS.parent, HERE.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))


def found_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "gpu.json").read_text())
    return found["parts"]


# -- cases of this file, run in processes of their own --------------------------------------------


def good(place: Place, value: int) -> dict[str, Any]:
    return {"counts": {"passed": value}, "failed": []}


def fails(place: Place) -> dict[str, Any]:
    raise ValueError("one line\nand another")


def is_killed(place: Place) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def hangs(place: Place) -> dict[str, Any]:
    time.sleep(1000)
    return {}


def test_a_case_that_fails_is_a_line_and_the_others_are_kept(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(HERE.parent)
    cases = [
        Case("good", "test_gpu:good", {"value": 1}),
        Case("fails", "test_gpu:fails"),
        Case("is killed", "test_gpu:is_killed"),
        Case("hangs", "test_gpu:hangs"),
        Case("too large", "test_gpu:good", needs={"host": 121 << 30}),
        Case("too long", "test_gpu:good", seconds=1e9),
        Case("without", "test_gpu:good", without="nobody has it"),
        Case("good again", "test_gpu:good", {"value": 2}),
    ]
    run = child.run
    monkeypatch.setattr(
        child, "run", lambda *given: run(*given[:3], 0.0 if "hangs" in given[0] else 60.0)
    )
    monkeypatch.setattr(gpu, "PARTS", {"tests": lambda *_: cases})
    bench = gpu.Bench(Place("cpu", str(tmp_path)), True, 1000.0, clock=lambda: 0.0)
    bench.part("tests", MACHINE, 1.0)
    outcomes = found_in(tmp_path)["tests"]["cases"]
    assert {name: (each["state"], each["why"]) for name, each in outcomes.items()} == {
        "good": ("done", ""),
        "fails": ("failed", "ValueError: one line and another"),
        "is killed": ("failed", "its process ended (SIGKILL)"),
        "hangs": ("failed", "still running after 0 seconds, and was ended"),
        "too large": ("left out", "needs 121.00 GiB on the host, 120.00 GiB are free"),
        "too long": ("left out", "takes 1000000000 s at least, its part has 995 s left"),
        "without": ("left out", "nobody has it"),
        "good again": ("done", ""),
    }
    assert "1 passed\n2 passed" in (text := (tmp_path / "gpu.md").read_text())
    assert "- fails: failed: ValueError: one line and another" in text


def test_a_dry_run_measures_foretells_and_keeps_what_was_there(tmp_path, capsys, monkeypatch):
    """The planner, a job, and tokens in memory and below it, as on a GPU."""
    (tmp_path / HARDWARE).write_text(form.dumps(catalogue("H200")))
    monkeypatch.setattr(parts, "PLANS", {name: {} for name in ("as picked", "float32")})
    command = ["--dry", "--out", str(tmp_path), "--only"]
    assert gpu.main([*command, "plans"]) == 0
    assert gpu.main([*command, "tokens"]) == 0
    found = found_in(tmp_path)
    assert set(found) == {"plans", "tokens"}
    for name, each in found["plans"]["cases"].items():
        figures = each["figures"]
        assert figures["foretold"] == pytest.approx(figures["peak"], rel=0.02), name
        assert len(figures["losses"]) == 2 and figures["seconds"] == figures["every second"][1]
    written, ours, theirs, two, their_two, less = (
        each["figures"] for each in found["tokens"]["cases"].values()
    )
    assert two["tokens"] == ours["tokens"] == their_two["tokens"]
    place, (device,) = (
        SimpleNamespace(hardware=lambda: catalogue("H200")),
        catalogue("H200").devices,
    )
    part = 40.0 / 2 * 10**9 / device.bandwidth.value  # whatever this machine's clock says of a step
    assert read(place, {"tokens/s": 40.0}, 10**9, 2) == {"of the bandwidth": part}
    assert read(place, {"tokens/s": None}, 10**9, 2) == {"of the bandwidth": None}
    assert "of the bandwidth" in two
    assert ours["tokens"] == theirs["tokens"] == less["tokens"] and len(ours["tokens"]) == 5
    assert less["budget"] < ours["weights"] == less["weights"] <= written["bytes"]
    assert "of the weights" in capsys.readouterr().out


def test_the_minutes_are_shared_and_what_a_part_leaves_goes_on():
    assert sum(parts.SHARES.values()) == pytest.approx(1)
    assert list(parts.SHARES) == list(parts.PARTS) == list(table.TABLES)
    now = [0.0]
    bench = gpu.Bench(Place("cpu", "/nowhere"), True, 100.0, clock=lambda: now[0])
    now[0] = 10.0
    assert bench.left(0.15) == pytest.approx(5) and bench.left(0.2) == pytest.approx(10)


def test_models_that_a_machine_cannot_hold_are_left_out():
    """7B with a float32 master is 121 GB: it fits 200 GiB of host memory; 13B takes what of it the
    host cannot from the disk."""
    large = {**MACHINE, "host bytes": 200 << 30, "disk bytes": 400 << 30}
    seven, _, thirteen, peer = parts.offloaded(large, False)
    assert seven.arguments["master"] and not seven.arguments["disk"]
    assert not thirteen.arguments["master"] and not thirteen.left_out(large, 1e9)
    assert "on the host" in peer.left_out(large, 1e9)
    small = {**MACHINE, "host bytes": 16 << 30, "disk bytes": 20 << 30}
    seven, *_ = parts.offloaded(small, False)
    assert not seven.arguments["master"] and "on the disk" in seven.left_out(small, 1e9)
    smaller = {**MACHINE, "device bytes": 8 << 30}
    assert [each.name for each in parts.steps(smaller, False) if each.left_out(smaller, 1e9)] == [
        f"1.1B, {who}" for who in ("Outsize", "plain loop", "FSDP2", "torch.compile")
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--minutes", "0", "--dry"], "--minutes 0.0: expected more than 0"),
        (["--device", "strict"], "only a dry run has it; pass --dry as well"),
        ([], "PyTorch finds no accelerator here; --dry shows on a CPU that this works"),
        (["--only", "nothing"], "invalid choice: 'nothing'"),
    ],
)
def test_bad_input_is_one_line(arguments, said, capsys, monkeypatch):
    monkeypatch.setattr(gpu.accelerator, "there", lambda: "")
    with pytest.raises(SystemExit):
        gpu.main(arguments)
    assert said in capsys.readouterr().err
