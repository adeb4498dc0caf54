"""Runs whose states rest on tiers: the numbers of a run that has memory for everything, bit for
bit, whatever happens to it."""

from __future__ import annotations

import errno
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from rates import known_hardware
from run_files import DeathError, assert_same_run, files_of

from outsize.errors import OutsizeError
from outsize.hardware import Rate, Tier, catalogue
from outsize.hardware.host import Memory
from outsize.memory import Ledger
from outsize.memory.tiers import TierSpec
from outsize.plan import DEVICE, Rest, from_yaml
from outsize.search import choose, predict
from outsize.train.loop import Loop
from outsize.train.metrics import read_metrics
from outsize.train.tiers import named, with_tiers

ALL = {"parameters": "disk", "gradients": "disk", "optimizer": "disk"}
DRAWN = 200_000  # bytes at most that drawing or reading some thousand numbers takes


@pytest.fixture(autouse=True)
def known_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """To measure the disk anew in each test takes seconds."""
    rate = Rate(1e9, "B/s", "test", "2026-11-21")
    monkeypatch.setattr(
        "outsize.train.tiers.measured", lambda spec, date: Tier(spec.name, spec.bytes, rate, rate)
    )


@pytest.fixture
def spill(tmp_path: Path) -> Path:
    (tmp_path / "spill").mkdir()
    return tmp_path / "spill"


def resting(monkeypatch: pytest.MonkeyPatch, **tiers: str) -> None:
    """Plans have all states on these tiers, and are otherwise alike."""

    def chosen(config, request, hardware):
        plan = choose(config, replace(request, budget=None, tiers=()), hardware).plan
        stages = tuple(replace(stage, rest=Rest(**tiers)) for stage in plan.stages)
        plan = replace(plan, stages=stages, order="layer", microbatch_rows=2, budget=request.budget)
        return predict(config, request, plan, hardware)

    monkeypatch.setattr("outsize.train.setup.choose", chosen)


def plan_of(run: Path):
    return from_yaml((run / "plan.yaml").read_text())


CASES = {
    "parameters": ("float32", {"parameters": "disk"}),
    "all": ("float32", {**ALL, "activations": "disk"}),
    "host": ("bfloat16", {"parameters": "disk", "gradients": "host", "optimizer": "host"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_from_tiers_is_that_of_memory(runs, spill, case, monkeypatch) -> None:
    precision, tiers = CASES[case]
    same = {"precision": precision, "train__steps": 4}
    with monkeypatch.context() as patch:
        resting(patch)
        runs.train(output=runs.home / "whole", **same)
    with monkeypatch.context() as patch:
        resting(patch, **tiers)
        printed = runs.train(memory="64MiB", disk=f"{spill}:64MiB", host_memory="64MiB", **same)
    whole, run = runs.home / "whole", runs.home / "run"
    assert_same_run(whole, run)
    assert (whole / "sample.txt").read_text() == (run / "sample.txt").read_text()
    assert named(plan_of(run)) == set(tiers.values())
    moved = [r["disk_bytes_read"] for r in read_metrics(run) if "loss" in r]
    assert moved[1] == moved[2] > 0 and "moved" in printed
    assert list(spill.iterdir()) == []


GPT2 = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "vocab_size": 272,
    "tie_word_embeddings": True,
}


def test_going_on_with_other_memory_is_bitwise(runs, spill, monkeypatch) -> None:
    """Chosen by the planner; less memory, another disk, and none at all give the same numbers."""
    other = runs.home / "other"
    other.mkdir()
    keys = {"train__save_every": 2, "train__keep": "null", "memory": "1600KiB"}
    runs.train(output=runs.home / "whole", disk=f"{spill}:64MiB", **keys)
    assert "disk" in named(plan_of(runs.home / "whole"))
    cut, ends = runs.home / "cut", [3, 5, 7]
    dying_at(monkeypatch, ends)
    with pytest.raises(DeathError):
        runs.train(output=cut, disk=f"{spill}:64MiB", **keys)
    with pytest.raises(DeathError):
        runs.resume(cut, "memory=1300KiB", f"disk={other}:64MiB")
    assert plan_of(cut) != plan_of(runs.home / "whole")
    with pytest.raises(DeathError):
        runs.resume(cut, "memory=null", "disk=null")
    assert not named(plan_of(cut)) and not ends
    runs.resume(cut)
    assert_same_run(runs.home / "whole", cut)
    assert [*spill.iterdir(), *other.iterdir()] == []


def dying_at(monkeypatch: pytest.MonkeyPatch, ends: list[int]) -> None:
    """Runs die before the first step of the list, which then is the next one."""
    step = Loop._step

    def dying(loop, batch, show):
        if ends and loop.place.step == ends[0]:
            ends.pop(0)
            raise DeathError
        step(loop, batch, show)

    monkeypatch.setattr(Loop, "_step", dying)


def test_fused_transposed_and_tied_weights_come_back(runs, spill, monkeypatch) -> None:
    (runs.home / "gpt2").mkdir()
    (runs.home / "gpt2" / "config.json").write_text(json.dumps(GPT2))
    model = {"model__name": runs.home / "gpt2", "model__weights": "random", "train__steps": 4}
    with monkeypatch.context() as patch:
        resting(patch)
        runs.train(output=runs.home / "whole", **model)
    resting(monkeypatch, **ALL)
    dying_at(monkeypatch, [3])
    with pytest.raises(DeathError):
        runs.train(memory="64MiB", disk=f"{spill}:64MiB", **model)
    runs.resume(runs.home / "run")
    assert_same_run(runs.home / "whole", runs.home / "run")


def test_too_little_to_go_on_is_refused(runs, spill, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        resting(patch, **ALL)
        runs.train(train__steps=2, memory="64MiB", disk=f"{spill}:64MiB")
    before = (runs.home / "run" / "plan.yaml").read_text()
    with pytest.raises(OutsizeError, match=r"\d+ bytes missing; "):
        runs.resume(runs.home / "run", "train.steps=4", "memory=100KiB")
    assert (runs.home / "run" / "plan.yaml").read_text() == before


def test_stored_weights_go_where_they_rest(runs, spill, monkeypatch) -> None:
    runs.train(train__steps=2)
    keys = {"model__name": runs.home / "run" / "step-00000002", "train__steps": 2}
    with monkeypatch.context() as patch:
        resting(patch)
        runs.train(output=runs.home / "whole", **keys)
    with monkeypatch.context() as patch:
        resting(patch, **ALL)
        runs.train(output=runs.home / "cut", memory="64MiB", disk=f"{spill}:64MiB", **keys)
    assert files_of(runs.home / "whole") == files_of(runs.home / "cut")


def test_starting_and_saving_take_no_more_than_a_chunk(runs, spill, monkeypatch) -> None:
    """The pool is the only memory that starting takes; saving, one state of one chunk beside it."""
    import outsize.train.loop as loops
    import outsize.train.run as whole_run

    make, save = whole_run._job, loops.save
    seen: dict[str, int] = {}

    def making(setup, found, ledger, stores, crew):
        job = make(setup, found, ledger, stores, crew)
        seen["start"], seen["pool"] = ledger.peak, job.placement.pool
        seen["chunk"] = max(table.numel for table in job.placement.chunks.tables) * 4
        return job

    def saving(*given):
        with Ledger() as ledger:
            path = save(*given)
        seen["save"] = ledger.peak
        return path

    resting(monkeypatch, **ALL)
    monkeypatch.setattr(whole_run, "_job", making)
    monkeypatch.setattr(loops, "save", saving)
    runs.train(memory="64MiB", disk=f"{spill}:64MiB", train__steps=1)
    assert seen["pool"] <= seen["start"] <= seen["pool"] + DRAWN
    assert 0 < seen["save"] <= seen["chunk"] + 4096
    runs.resume(runs.home / "run", "train.steps=2")
    assert seen["start"] <= seen["pool"] + 4096  # nothing is drawn


@pytest.mark.slow
def test_a_killed_run_leaves_no_spill_file_and_goes_on(runs, spill, monkeypatch) -> None:
    resting(monkeypatch, **ALL)
    keys = {"train__steps": 8, "train__save_every": 4, "train__evaluate_every": 0}
    keys |= {"memory": "64MiB"}
    cut = runs.home / "cut"
    sets = runs.sets(output=cut, disk=f"{spill}:64MiB", threads=1, **keys)
    process = runs.command("train", *(word for s in sets for word in ("--set", s)), hold=6)
    runs.wait_for_hold()
    os.kill(process, signal.SIGKILL)
    assert runs.ended(process)[0] == -signal.SIGKILL
    assert list(spill.iterdir()) == []
    assert "going on from step 4 of 8" in runs.resume(cut)  # bit for bit: above


# -- faults ----------------------------------------------------------------------------------------


def test_an_error_of_the_disk_leaves_the_checkpoint(runs, spill, monkeypatch) -> None:
    import outsize.memory.disk as disks

    keys = {"memory": "64MiB", "disk": f"{spill}:64MiB"}
    resting(monkeypatch, **ALL)
    step, read = Loop._step, disks.read_all

    def failing(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def dying(loop, batch, show):
        monkeypatch.setattr(disks, "read_all", failing if loop.place.step == 4 else read)
        step(loop, batch, show)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_step", dying)
        with pytest.raises(OutsizeError, match=r"Input/output error.*step 3 is saved: outsize"):
            runs.train(**keys)
    monkeypatch.setattr(disks, "read_all", read)
    assert list(spill.iterdir()) == []
    assert "going on from step 3 of 8" in runs.resume(runs.home / "run")


@pytest.mark.parametrize(
    ("disk", "complaint"),
    [
        ("{spill}:64KiB", r"tier 'disk': .* missing; declare a larger tier"),
        ("{spill}/none:1GiB", r"'.*/none' is not a folder; make it"),
        ("/proc:64MiB", r"/proc.*"),
    ],
)
def test_a_disk_that_cannot_serve_is_refused_in_one_line(
    runs, spill, disk, complaint, monkeypatch
) -> None:
    resting(monkeypatch, **ALL)
    with pytest.raises(OutsizeError, match=complaint) as error:
        runs.train(memory="64MiB", disk=disk.format(spill=spill))
    assert "\n" not in str(error.value)
    assert list(spill.iterdir()) == []


def test_a_limit_that_shrinks_ends_the_run_with_a_checkpoint(runs, spill, monkeypatch) -> None:
    import outsize.train.loop as loops

    resting(monkeypatch, **ALL)
    keys = {"memory": "64MiB", "disk": f"{spill}:64MiB", "train__save_every": 0}
    step = Loop._step

    def shrinking(loop, batch, show):
        if loop.place.step == 2:
            monkeypatch.setattr(loops, "memory", lambda: Memory(1 << 20, 1 << 20))
        step(loop, batch, show)

    with monkeypatch.context() as patch:
        patch.setattr(loops, "LOOK_SECONDS", 0.0)
        patch.setattr(Loop, "_step", shrinking)
        with pytest.raises(OutsizeError, match=r"may hold 1.00 MiB now.*step 3 is saved: outsize"):
            runs.train(**keys)


# -- no budget -------------------------------------------------------------------------------------


def test_a_model_that_does_not_fit_in_free_memory_needs_a_disk(runs, spill, monkeypatch) -> None:
    import outsize.train.tiers as tiers

    hardware = replace(known_hardware(), tiers=(Tier(DEVICE, 1_400_000),))
    monkeypatch.setattr("outsize.train.setup.probe", lambda device: hardware)
    monkeypatch.setattr(tiers, "RESERVE", 50_000)
    monkeypatch.setattr(tiers, "staging_bytes", lambda folders: 0)
    with pytest.raises(OutsizeError, match=r"\d+ bytes missing; .* or pass --disk DIR"):
        runs.train()
    runs.train(disk=f"{spill}:64MiB", train__steps=2)
    plan = plan_of(runs.home / "run")
    assert plan.budget is None and "disk" in named(plan)
    records = read_metrics(runs.home / "run")
    assert records[-1]["measured_peak_bytes"] <= int(0.95 * 1_400_000) - 50_000


def test_host_memory_and_the_budget_are_one_ram(runs) -> None:
    with pytest.raises(OutsizeError, match=r"are one RAM here.* bytes missing"):
        runs.train(memory="7GiB", host_memory="1GiB")


def test_every_tier_can_be_said_on_the_command_line(runs, spill, monkeypatch) -> None:
    from click.testing import CliRunner

    from outsize.cli.main import main

    sets = [word for s in runs.sets() for word in ("--set", s)]
    resting(monkeypatch, **ALL)
    words = ["--memory", "64MiB", "--host-memory", "256KiB", "--disk", f"{spill}:64MiB"]
    words += ["--tier", f"cxl={spill}:128KiB", "--explain"]
    found = CliRunner().invoke(main, ["train", *sets, *words])
    assert found.exit_code == 0, found.output
    lines = {line.split()[0]: line.split() for line in found.output.splitlines() if line.split()}
    assert lines["memory"][1:3] == ["64MiB", "--set"]
    assert lines["host_memory"][1:3] == ["256KiB", "--set"]
    assert "--set" in lines["disk"] and "--set" in lines["tiers"]
    assert lines["tiers"][1].startswith("[cxl=/")


def test_workers_beside_a_host_share_its_own_memory(monkeypatch) -> None:
    """And each has a link of its own; other memory is measured by using it, of GPUs alone."""
    rate = Rate(1e9, "B/s", "test", "2026-11-27")
    monkeypatch.setattr("outsize.train.tiers.own_rate", lambda spec, date: rate)
    card = catalogue("H100-SXM")
    card = replace(card, tiers=(*card.tiers, Tier("host", 1, rate, rate, rate)))
    specs = tuple(TierSpec(name, "memory", (), 4096) for name in ("host", "cxl"))
    half = replace(rate, value=0.5e9)
    made = with_tiers(card, specs, 2)
    assert made.tier("host") == Tier("host", 4096, rate, rate, half)
    assert made.tier("cxl").own == half
    assert with_tiers(known_hardware(), specs).tier("cxl").own is None
