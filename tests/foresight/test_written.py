"""Layouts as plans that run: what is written is what was forecast, and computes what plain PyTorch
does; `outsize rehearse` counts what the forecast of a run does."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from outsize.cli.main import main
from outsize.collectives import parse_mesh
from outsize.errors import OutsizeError
from outsize.foresight.layout import Layout, Resting
from outsize.foresight.memory import memory
from outsize.foresight.named import shape_of
from outsize.foresight.planning.asked import Asked, Conditions, conditions
from outsize.foresight.planning.choose import choose, forecast
from outsize.foresight.planning.drawn import drawn
from outsize.foresight.planning.layouts import STACK
from outsize.foresight.planning.written import mesh_said, plan_of
from outsize.foresight.step import held
from outsize.hardware import catalogue, parse_spec
from outsize.hardware.form import dumps
from outsize.hardware.probe import probe
from outsize.hardware.shared import shared
from outsize.plan.file import read_plan
from outsize.train.rehearsed import rehearsed

SMALL = ("--set", "train.sequence=8", "--set", "train.batch_tokens=64", "--set", "precision=fp32")


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, words)


@pytest.fixture
def machine(tmp_path: Path) -> str:
    """Four workers of a processor, with invented rates."""
    made = catalogue("A100-SXM-80")
    rate = made.devices[0].peak["bf16"]
    device = replace(made.devices[0], kind="cpu", peak={"fp32": rate, "bf16": rate})
    path = tmp_path / "machine.yaml"
    path.write_text(dumps(replace(made, devices=(device,))))
    return f"4 x {path}"


def test_workers_of_a_machine_share_what_it_has(machine: str) -> None:
    one, four = parse_spec(machine.removeprefix("4 x ")), parse_spec(machine)
    assert (one.count, four.count, four.nodes) == (1, 4, 1)
    mine, whole = four.groups[0].device, one.groups[0].device
    assert mine.memory_bytes == pytest.approx(whole.memory_bytes / 4)
    assert mine.peak["fp32"].value == pytest.approx(whole.peak["fp32"].value / 4)


def test_a_plan_that_was_found_verifies(machine: str, tmp_path: Path) -> None:
    required = "pipeline=2,data=2,rows=2,zero=1,recompute=full"
    path = tmp_path / "plan.yaml"
    words = ("plan", "tiny", "--hardware", machine, *SMALL, "--require", required)
    made = invoke(*words, "--out", str(path), "--json")
    best = json.loads(made.output)["plans"][0]
    plan = read_plan(path).plan
    assert plan.mesh == parse_mesh(best["mesh"]) and plan.rows == 8
    assert plan.microbatches == best["microbatches"]
    result = invoke("verify", "--set", f"plan_file={path}", "--steps", "1", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["holds"]


def test_a_plan_of_experts_is_one_that_this_runtime_has(machine: str, tmp_path: Path) -> None:
    """States lie over the workers that have the same experts; a forecast alone knows Megatron's."""
    two, path = machine.replace("4 x", "2 x"), tmp_path / "plan.yaml"
    words = ("plan", "tiny-experts", "--hardware", two, *SMALL, "--require", "expert=2", "--json")
    zeros = {plan["zero"] for plan in json.loads(invoke(*words).output)["plans"]}
    assert zeros == {0, 1, 3}
    made = invoke(*words, "--out", str(path))
    assert {plan["zero"] for plan in json.loads(made.output)["plans"]} == {0}
    assert read_plan(path).plan.mesh == parse_mesh("expert=2")
    result = invoke("verify", "--set", f"plan_file={path}", "--steps", "1", "--json")
    assert result.exit_code == 0 and json.loads(result.output)["holds"]


def test_a_rehearsal_counts_every_action_and_byte(machine: str, tmp_path: Path) -> None:
    """The peaks of whole lists, played, are those that the forecast composes of one microbatch."""
    path = tmp_path / "plan.yaml"
    words = ("plan", "tiny", "--hardware", machine, *SMALL, "--require", "pipeline=2,rows=2")
    invoke(*words, "--out", str(path))
    result = invoke("rehearse", str(path), "--json", "--hardware", "8xH100-SXM")
    made = json.loads(result.output)
    assert result.exit_code == 0 and made["proved"] == 4 and len(made["workers"]) == 2
    assert made["microbatches_played"] == min(made["microbatches"], 4)
    for worker in made["workers"]:
        assert worker["played"] == pytest.approx(worker["foretold"], rel=0.01)
        assert sum(worker["by_kind"].values()) == worker["played"]
    here, apart = (rehearsed(path, None, each).seconds for each in (None, shared(probe(), 4)))
    assert here == apart  # four workers on this machine have a fourth of it each
    said = invoke("rehearse", str(path), "--hardware", "3xH100-SXM")
    assert said.exit_code == 2 and "is for 4 workers; expected 4 devices" in said.output
    said = invoke("rehearse", str(path), "--model", "mini")
    assert said.exit_code == 2 and "mini" in said.output and said.output.count("\n") == 1


def test_stages_cuts_and_shards_are_those_of_the_layout() -> None:
    """Of each worker the first blocks are recomputed; chunks go round the workers."""
    shape = shape_of("llama3-8b")
    lay = Layout(8, 1, 32, 2048, STACK, 2, 2, chunks=2, states=2, sequence_parallel=True, whole=10)
    plan = plan_of(shape, lay)
    assert plan.mesh == parse_mesh("data=2,pipeline=2,tensor=2") == parse_mesh(mesh_said(lay))
    assert plan.pipeline.said == "interleaved:2" and plan.pipeline.cuts == (9, 17, 25)
    again = [stage.first for stage in plan.stages if stage.whole]
    assert again == [*range(1, 17), 17, 18, 25, 26]
    assert (plan.shards.parameters, plan.shards.optimizer) == (1, 2)
    uneven = plan_of(shape_of("bloom-176b"), Layout(12, 1, 12, 2048, STACK, 1, 12))
    assert uneven.pipeline.cuts[0] == 6 and uneven.pipeline.cuts[-1] == 66  # 5, ten of 6, and 5
    with pytest.raises(OutsizeError, match="fp8 is foretold only"):
        plan_of(shape, replace(lay, precision="fp8"))


@pytest.mark.parametrize("required", ["pipeline=4,chunks=1", "pipeline=4,chunks=2", "pipeline=1"])
def test_a_drawn_step_takes_what_the_closed_bound_says(required: str, tmp_path: Path) -> None:
    """Every pass played event by event: as long as the plan, but for waiting on many machines."""
    shape, cluster = shape_of("llama3-8b"), parse_spec("2 x 8 H100-SXM")
    asked = Asked(4096, 64, conditions=Conditions(conditions((required,), "--require")))
    plan = choose(shape, asked, cluster, 1).plans[0]
    trace = drawn(shape, cluster, plan)
    stages, count = plan.layout.pipeline, plan.layout.microbatches
    assert trace.workers == tuple(range(stages))
    passes = [event for event in trace.events if event.kind == "FORWARD"]
    assert len(passes) == stages * count * plan.layout.chunks
    spread = trace.span() / plan.seconds
    assert 0.99 < spread <= 1 + 1e-9
    assert trace.peak() == pytest.approx(plan.memory.tensors)


def test_the_timeline_is_a_page(tmp_path: Path) -> None:
    path = tmp_path / "step.html"
    words = ("plan", "llama3-8b", "--hardware", "8xH100-SXM", "--html", str(path))
    assert invoke(*words).exit_code == 0
    text = path.read_text()
    assert "llama3-8b on 8 x H100-SXM" in text and "FORWARD" in text


def test_what_passes_a_link_is_drawn_beside_the_passes() -> None:
    """Of a model on host memory: weights come for each pass and gradients go with the second; the
    states of an update come and go. No lane has two things at once, and a step is no longer."""
    shape, cluster = shape_of("llama3-8b"), parse_spec("RTX-4090 + 256GiB host 32GB/s")
    fixed = Conditions(conditions(("recompute=full", "rows=2"), "--require"))
    plan = choose(shape, Asked(4096, 16, conditions=fixed), cluster, 1).plans[0]
    lay = replace(plan.layout, resting=Resting("host", "host"))
    plan = forecast(shape, [lay], cluster, [memory(shape, lay)], plan.room)[0]
    trace = drawn(shape, cluster, plan)
    parameters = sum(held(shape, plan.layout))
    each = plan.layout.microbatches
    for lane, width in (("fetch", each * (2 + 2 + 4) + 12 + 4), ("evict", each * 4 + 12 + 2)):
        spans = sorted((e.start, e.end) for e in trace.events if e.lane == lane)
        assert sum(end - start for start, end in spans) == pytest.approx(width * parameters / 32e9)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(spans))
    assert trace.span() == pytest.approx(plan.seconds)
    assert trace.peak() == pytest.approx(plan.memory.tensors)
