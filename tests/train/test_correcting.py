"""A file of hardware corrected by a run: by its rates the run then takes what it took."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rates import known_machine, rate

from outsize.errors import OutsizeError
from outsize.hardware import Hardware, dumps, read
from outsize.hardware.host import processor
from outsize.plan import to_yaml
from outsize.simulate.rescaled import lanes
from outsize.train import correcting, history
from outsize.train.correcting import Used, correct, corrected
from outsize.train.resolve import values_of
from outsize.train.setup import Setup, set_up, settled

SETS = ("train.sequence=64", "train.batch_tokens=256", "device=cpu", "train.steps=4")


def machine() -> Hardware:
    made = known_machine()
    return replace(made, devices=(replace(made.devices[0], name=processor()),))


def ran(folder: Path, *sets: str) -> Setup:
    """What a run leaves of its values and its plan."""
    values = values_of(None, ("model.name=tiny", f"output={folder}", *SETS, *sets))
    setup = settled(set_up(values))
    folder.mkdir()
    (folder / "run.yaml").write_text(setup.resolved.to_yaml())
    (folder / "plan.yaml").write_text(to_yaml(replace(setup.plan, budget=None)))
    return history.noted(setup, "rates")


@pytest.mark.parametrize("sets", [(), ("mesh=data=2", "workers=2", "plan.zero=3")])
def test_the_file_then_foretells_the_run(sets: tuple[str, ...], tmp_path: Path) -> None:
    """Every lane as measured, and the same again changes nothing."""
    path, folder = tmp_path / "hw.yaml", tmp_path / "run"
    path.write_text(dumps(machine()))
    setup = ran(folder, *sets)
    took = {"compute": 1.7, "network": 0.4}
    measured = {lane: took[lane] * spent for lane, spent in lanes(setup.forecast.trace).items()}
    history.record(setup, [measured] * 3, 9.0, 100)
    said = correct(path, folder)
    assert all(f"{lane} {took[lane]:.2f}" in said for lane in measured)
    made = read(path)
    foretold, _ = correcting._foretold(made, folder)
    # Of several workers, a little is said while they compute, and gathering copies in memory.
    assert foretold == pytest.approx(measured, rel=0.1 if sets else 1e-6)
    assert "corrected by 3 steps of tiny" in made.devices[0].bandwidth.source

    again = correct(path, folder)
    assert sets or "compute 1.00" in again
    assert read(path).devices[0].bandwidth.value == pytest.approx(
        made.devices[0].bandwidth.value, rel=0.01
    )
    after, _ = correcting._foretold(read(path), folder)
    assert after == pytest.approx(measured, rel=0.02)
    assert read(path).devices[0].bandwidth.source.count("corrected") == 1


def test_tiers_follow_the_lanes_that_move_them() -> None:
    found = machine()
    disk = replace(found.tier("disk"), read=rate(4e9, "B/s"), write=rate(2e9, "B/s"))
    found = replace(found, tiers=(*found.tiers[:2], disk))
    made = corrected(found, {"fetch": 2.0, "evict": 0.5}, Used(frozenset({"disk"})), "a run")
    disk = made.tier("disk")
    assert disk.read is not None and disk.write is not None
    assert (disk.read.value, disk.write.value) == (2e9, 4e9)
    assert made.tier("host") == found.tier("host") and made.devices == found.devices


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda made: replace(made, devices=made.devices * 2), "expected one machine's file"),
        (lambda made: replace(made, devices=(replace(made.devices[0], name="other"),)),
         "is of 'other', and this is"),
    ],
)  # fmt: skip
def test_files_of_other_machines_are_refused(change: Any, said: str, tmp_path: Path) -> None:
    (tmp_path / "hw.yaml").write_text(dumps(change(machine())))
    with pytest.raises(OutsizeError, match=said):
        correcting.checked(tmp_path / "hw.yaml")


def test_a_run_of_too_few_steps_leaves_the_file(tmp_path: Path) -> None:
    (tmp_path / "hw.yaml").write_text(dumps(machine()))
    with pytest.raises(OutsizeError, match="fewer than 2 steps by the clock"):
        correct(tmp_path / "hw.yaml", tmp_path / "run")
    assert read(tmp_path / "hw.yaml") == machine()


def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few steps, then the file says by what it was corrected; nothing begins where it is bad."""

    def train(*words: str) -> Result:
        from outsize.cli.main import main

        sets = [word for one in (*SETS, "sample.tokens=0") for word in ("--set", one)]
        return CliRunner().invoke(main, ["train", "run.yaml", *sets, *words])

    monkeypatch.chdir(tmp_path)
    Path("text").mkdir()
    for i in range(8):
        Path("text", f"{i}.txt").write_text(f"line {i} of a text\n" * 60)
    Path("run.yaml").write_text("model: tiny\ndata: {path: text, validation: 0.1}\n")
    Path("hw.yaml").write_text(dumps(machine()))
    none = train("--calibrate", "none.yaml")
    assert none.exit_code == 2 and "none.yaml cannot be read" in none.stderr
    assert not Path("runs").exists()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "corrects one machine's file" in train("--calibrate", "hw.yaml").stderr
    monkeypatch.delenv("RANK")
    made = train("--calibrate", "hw.yaml")
    assert made.exit_code == 0 and "hw.yaml is corrected by" in made.output, made.stderr
    assert ", corrected by " in read("hw.yaml").devices[0].bandwidth.source
