"""`outsize probe`: what is measured has every entry, is written, and is read by `outsize plan`."""

from __future__ import annotations

import json
import os
from itertools import product
from pathlib import Path

import pytest
from clocks import Ticks
from forked import forked
from torchrun import free_port

from outsize.hardware import disk, dumps, measure, parse_spec, read
from outsize.hardware.hardware import Rate
from outsize.launch import probing

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
SMALL = (4096, 16384)
MESSAGE, TICK = 4096, 2**-9  # bytes; seconds
PLAN = ("plan", "tiny", "--set", "train.sequence=64", "--set", "train.batch_tokens=1024", "--json")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little of everything; workers are forked from this process."""
    rate = Rate(1e9, "B/s", "probe", "2026-11-26")
    monkeypatch.setattr(measure, "CPU_SHAPES", ((8, 8, 8),))
    monkeypatch.setattr(measure, "bandwidth", lambda *_: rate)
    monkeypatch.setattr(measure, "COPIED", 4096)
    monkeypatch.setattr(disk, "disk_rates", lambda *_: (rate, rate))
    monkeypatch.setattr(probing, "SIZES", SMALL)
    for name, value in (("MESSAGE", MESSAGE), ("WINDOW", 1e-3), ("SQUARE", 16), ("SUMMED", 4096)):
        monkeypatch.setattr(probing, name, value)
    monkeypatch.setattr(probing, "time", Ticks(TICK))


def test_this_machine_alone(invoke, home) -> None:
    result = invoke("probe", "--out", "hw.yaml", "--device", "cpu")
    assert result.exit_code == 0 and "a call" in result.output, result.output
    made = read("hw.yaml")
    assert dumps(made) == Path("hw.yaml").read_text()
    assert made.talked == () and made.rates == () and made.slowed is None
    assert (made.devices[0].threads, made.devices[0].measured.matmul[0].tokens) == (1, 8)
    assert made.tier("disk").read is not None
    assert invoke(*PLAN, "--hardware", "2 x hw.yaml").exit_code == 0


@pytest.mark.parametrize("machines", [1, 2])
def test_workers_of_torchrun(machines: int, invoke, home) -> None:
    """Two workers of one machine, or of each of two: every group's operations, a matrix, and what
    computing and talking cost each other; what is planned for uses the links that were measured."""
    port, pids = free_port(), []
    for rank in range(2 * machines):
        place = {"RANK": str(rank), "WORLD_SIZE": str(2 * machines), "LOCAL_RANK": str(rank % 2)}
        place |= {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": str(rank // 2)}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        folder = home / str(rank)
        folder.mkdir()
        words = ("--pairs", "--device", "cpu", "--out", home / "hw.yaml")
        pids.append(forked(folder, place, "probe", *words))
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [0] * len(pids), "".join((home / str(r) / "err").read_text() for r in range(2))
    assert "all_to_all" in (home / "0" / "out").read_text()
    assert (home / "1" / "out").read_text() == ""

    made = read("hw.yaml")
    assert dumps(made) == Path("hw.yaml").read_text()
    groups = [(2, 2)] if machines == 1 else [(4, 2), (2, 2), (2, 1)]
    found = {(one.operation, one.bytes, one.workers, one.inside) for one in made.talked}
    sends = {("send", size, 2, one) for size in SMALL for one in range(3 - machines, 3)}
    assert found == {(*each, *group) for each, group in product(product(OPERATIONS, SMALL), groups)
                     } | sends  # fmt: skip
    assert len(found) == len(made.talked)
    assert all(one.seconds.value == TICK for one in made.talked)
    assert made.rates == ((0.0, MESSAGE / TICK), (MESSAGE / TICK, 0.0))
    assert made.slowed is not None and (made.slowed.computing, made.slowed.talking) == (1, 1)
    assert made.machines == machines

    spec = "hw.yaml" if machines == 2 else "2 x hw.yaml"
    cluster = parse_spec(spec)
    assert cluster.count == 2 * machines and cluster.nodes == 2 and cluster.rates == made.rates
    said = json.loads(invoke(*PLAN, "--hardware", spec).output)
    assert said["devices"] == 2 * machines and said["plans"][0]["machines"] in ([0, 1], [1, 0])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--pairs",), "--pairs measures rates between workers, and there is one; expected"),
        (("--out", "none/hw.yaml"), "--out none/hw.yaml: its folder is not there; make it"),
        (("--device", "tpu"), "tpu"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, said: str, invoke, home) -> None:
    result = invoke("probe", *words)
    assert result.exit_code == 2 and said in result.stderr and result.stderr.count("\n") == 1
