"""An adapter's base that streams is read in its own files: no byte of it is copied or changed, and
the numbers are those of a base in memory."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from run_files import files_of
from subjects import CONFIGS

import outsize
from outsize.checkpoint.shards import fingerprint
from outsize.errors import OutsizeError
from outsize.hardware import Rate, Tier
from outsize.models.build import build
from outsize.models.coding import asked
from outsize.models.families import parse
from outsize.plan import Rest
from outsize.search import choose, predict
from outsize.train.loop import Loop
from outsize.train.metrics import read_metrics

SIZES = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
ADAPTER = {
    "adapt__lora__rank": 4, "train__steps": 4, "sample__tokens": 0, "threads": 1,
    "train__evaluate_every": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def known_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = Rate(1e9, "B/s", "test", "2026-11-21")
    monkeypatch.setattr(
        "outsize.train.tiers.measured", lambda spec, date: Tier(spec.name, spec.bytes, rate, rate)
    )


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outsize.train.opening.calibrated", lambda setup, *_: setup)


@pytest.fixture
def spill(tmp_path: Path) -> Path:
    (tmp_path / "spill").mkdir()
    return tmp_path / "spill"


def base_of(folder: Path, dtype: str, weights: str | None = None, family: str = "llama") -> Path:
    """The directory of a random model."""
    said = SIZES if family == "llama" else {"vocab_size": 320}
    config = asked(parse({**CONFIGS[family], **said}), weights)
    outsize.save(build(config, seed=3, dtype=getattr(torch, dtype)), folder / "base")
    return folder / "base"


def on_disk(monkeypatch: pytest.MonkeyPatch, parameters: str = "disk") -> None:
    """Plans have parameters on a tier, and are otherwise alike."""

    def chosen(config, request, hardware):
        plan = choose(config, replace(request, budget=None, tiers=()), hardware).plan
        stages = tuple(replace(stage, rest=Rest(parameters)) for stage in plan.stages)
        plan = replace(plan, stages=stages, budget=request.budget)
        return predict(config, request, plan, hardware)

    monkeypatch.setattr("outsize.train.setup.choose", chosen)


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


CASES = {  # codes in the base's files, and those that are asked for; precision of the run
    "as they are": ("nf4:16", None, "bfloat16"),
    "widened": (None, None, "float32"),
    "made once": (None, "int4:16", "float32"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_base_that_streams_in_place_is_one_in_memory(
    runs, spill, untimed, case, monkeypatch
) -> None:
    weights, made, precision = CASES[case]
    base = base_of(runs.home, "bfloat16", weights)
    before, keys = content(base), {**ADAPTER, "model__name": base, "precision": precision}
    keys |= {} if made is None else {"weights": made}
    with monkeypatch.context() as patch:
        on_disk(patch, "device")
        printed = runs.train(output=runs.home / "whole", **keys)
        assert "stay in the files" not in printed
    on_disk(monkeypatch)
    printed = runs.train(memory="64MiB", disk=f"{spill}:64KiB", **keys)  # less than the base
    size = sum(p.nbytes for p in outsize.load(base, weights=made).parameters())
    where = f"the files of {base}"
    where = where if made is None else f"{runs.home / 'run' / 'base'}, made of {where} once"
    assert f"base: {outsize.memory.format_bytes(size)} stay in {where}, read there" in printed
    assert files_of(runs.home / "whole") == files_of(runs.home / "run")
    assert content(base) == before
    steps = [record for record in read_metrics(runs.home / "run") if "loss" in record]
    whole = [record for record in read_metrics(runs.home / "whole") if "loss" in record]
    assert [one["loss"] for one in steps] == [one["loss"] for one in whole]
    assert all(one["disk_bytes_read"] == one["disk_bytes_written"] == 0 for one in steps)
    assert sum(one["files_bytes_read"] for one in steps) >= size
    (known,) = [r for r in read_metrics(runs.home / "run") if "measured_peak_bytes" in r]
    assert 0.95 <= known["measured_peak_bytes"] / known["predicted_peak_bytes"] <= 1.0
    saved = runs.home / "run" / "step-00000004"
    assert {p.name for p in saved.glob("*.safetensors")} == {
        "adapter_model.safetensors", "optimizer.safetensors"
    }  # fmt: skip
    assert f'"{fingerprint(base)}"' in (saved / "manifest.json").read_text()
    kept = runs.home / "run" / "base"
    assert kept.is_dir() == (made is not None)
    if made is not None:
        before = content(kept)
        assert "is made of" not in runs.resume(runs.home / "run", "train.steps=5")
        assert content(kept) == before
        (base / "outsize.json").unlink()
        with pytest.raises(OutsizeError, match="holds other weights than those that the adapter"):
            spoil(base)
            runs.resume(runs.home / "run", "train.steps=6")


def test_a_run_in_place_goes_on_bit_for_bit_and_not_beside_other_files(
    runs, spill, monkeypatch
) -> None:
    """Files that are replaced are read on as they were opened; what is saved would be beside
    others."""
    on_disk(monkeypatch)
    base = base_of(runs.home, "bfloat16", "int4:16")
    keys = {**ADAPTER, "model__name": base, "disk": f"{spill}:64MiB", "memory": "64MiB"}
    runs.train(output=runs.home / "whole", **keys)
    before, step = (base / "model.safetensors").read_bytes(), Loop._step

    def ends_where(spoilt: str, said: str) -> None:
        def changing(loop, batch, show):
            step(loop, batch, show)
            if loop.place.step == 4:
                spoil(base, replaced=spoilt == "replaced")

        with monkeypatch.context() as patch:
            patch.setattr(Loop, "_step", changing)
            with pytest.raises(OutsizeError, match=said):
                runs.train(**keys)
        assert (runs.home / "run" / "latest").read_text().strip() == "step-00000003"

    ends_where("replaced", "base has changed since the run began, which reads")
    shutil.rmtree(runs.home / "run")
    (base / "model.safetensors").write_bytes(before)
    ends_where("written", "has been written since it was opened")
    run = runs.home / "run"
    with pytest.raises(OutsizeError, match="holds other weights than those that the adapter"):
        runs.resume(run)
    (base / "model.safetensors").write_bytes(before)
    runs.resume(run)
    assert files_of(runs.home / "whole") == files_of(run)


def spoil(base: Path, replaced: bool = False) -> None:
    """Turn a bit of a file, or of another one in its place."""
    path = base / "model.safetensors"
    found = bytearray(path.read_bytes())
    found[-1] ^= 1
    if replaced:
        path.unlink()
    path.write_bytes(found)


def test_damaged_files_are_refused_before_the_first_step(runs, spill, monkeypatch) -> None:
    on_disk(monkeypatch)
    base = base_of(runs.home, "bfloat16")
    spoil(base)
    with pytest.raises(OutsizeError, match=r"base/model\.safetensors: tensor '.*' is damaged"):
        runs.train(model__name=base, disk=f"{spill}:64MiB", memory="64MiB", **ADAPTER)


def test_what_lies_otherwise_in_the_files_is_copied(runs, spill, untimed, monkeypatch) -> None:
    """GPT-2's matrices are transposed there, and float32 is no bfloat16."""
    on_disk(monkeypatch)
    base = base_of(runs.home, "float32", family="gpt2")
    keys = {**ADAPTER, "model__name": base, "train__steps": 1, "train__sequence": 16}
    keys |= {"adapt__lora__targets": ["mlp"]}
    runs.train(memory="64MiB", disk=f"{spill}:64MiB", **keys)
    ((first, *_),) = [[r for r in read_metrics(runs.home / "run") if "loss" in r]]
    assert first["disk_bytes_read"] > 0 and first["files_bytes_read"] > 0
