"""Plans on unlike devices: stages weigh what their devices compute and hold."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from outsize.cli.main import main
from outsize.foresight.named import shape_of
from outsize.foresight.planning.asked import Asked, Conditions, conditions
from outsize.foresight.planning.choose import choose
from outsize.foresight.planning.uneven import Speeds
from outsize.foresight.planning.unlike import choose_unlike, cut
from outsize.hardware import catalogue, parse_spec
from outsize.hardware.form import dumps
from outsize.plan.file import read_plan
from outsize.plan.text import explain

MIXED = "4xH100-SXM + 4xA100-SXM-80 @ 12.5GB/s"


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, ["plan", *words])


@pytest.mark.parametrize("seed", range(20))
def test_blocks_of_stages_are_those_of_the_least_slowest_beat(seed: int) -> None:
    """Of all ways to share 9 blocks among 4 stages that hold so many each none has a shorter
    beat."""
    draw = random.Random(seed)
    group = parse_spec(MIXED).groups[0]

    def speeds() -> Speeds:
        middle = np.cumsum([draw.uniform(0.1, 2) for _ in range(9)])
        none = np.zeros(9)
        return Speeds(group, middle, middle + draw.uniform(0, 3), none, none, 1.0, none)

    kinds = [speeds(), speeds()]
    stages = [kinds[0], kinds[0], kinds[1], kinds[1]]
    holds = [draw.randrange(2, 7) for _ in stages]
    holds[0] += max(0, 9 - sum(holds))
    takes = [*(stage.middle for stage in stages[:3]), stages[3].last]

    def beat(blocks: tuple[int, ...]) -> float:
        return float(max(of[n - 1] for of, n in zip(takes, blocks, strict=True)))

    every = [
        blocks
        for blocks in itertools.product(*(range(1, held + 1) for held in holds))
        if sum(blocks) == 9
    ]
    found = cut(9, stages, holds)
    assert found in every
    assert beat(found) == min(map(beat, every))


def test_devices_that_differ_in_name_alone_have_the_plan_of_like_ones() -> None:
    """Seconds, bytes and blocks are those that the search over like devices has; a small head, so
    that equal blocks are the best."""
    like = parse_spec("2 x 4 H100-SXM @ 25GB/s")
    group = parse_spec("4xH100-SXM + 4xA100-SXM-80 @ 25GB/s").groups[0]
    other = replace(group, device=replace(group.device, name="H100-SXM other"))
    unlike = replace(like, groups=(group, other))
    shape = replace(shape_of("llama3-8b"), vocab=1024)
    said = "data=2,tensor=1,pipeline=4,context=1,rows=1,zero=1,recompute=none,chunks=1"
    asked = Asked(2048, 64, conditions=Conditions(conditions((said,), "--require")))
    (one,) = choose_unlike(shape, asked, unlike)
    plan = choose(shape, asked, like, 1).plans[0]
    assert one.blocks == (8, 8, 8, 8)
    assert one.seconds == pytest.approx(plan.seconds, rel=1e-9)
    assert max(part.memory.process for part in one.parts) == plan.memory.process
    assert one.mfu == pytest.approx(plan.mfu, rel=1e-9)


def test_faster_devices_take_more_blocks_and_the_plan_says_where(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    words = ("llama3-8b", "--hardware", MIXED, "--set", "train.batch_tokens=256K")
    required = ("--require", "pipeline=4,rows=1")
    whole = ("--tokens", "1G", "--price", "2/h")
    made = json.loads(invoke(*words, *required, *whole, "--json", "--out", str(path)).output)
    hours = 1e9 / made["plans"][0]["tokens_per_s"] / 3600
    assert made["days"] == pytest.approx(hours / 24) and made["money"] == pytest.approx(16 * hours)
    assert made["kwh"] == pytest.approx((4 * 0.7 + 4 * 0.4) * hours)  # of the data sheets
    stages = made["plans"][0]["stages"]
    count = {stage["device"]: stage["blocks"] for stage in stages}
    assert sum(stage["blocks"] for stage in stages) == 32
    assert count["H100-SXM"] > 1.5 * count["A100-SXM-80"]
    assert all(stage["bytes"] <= stage["room"] for stage in stages)
    blocks = [stage["blocks"] for stage in stages]
    assert list(read_plan(path).plan.pipeline.cuts) == [1 + sum(blocks[:i]) for i in (1, 2, 3)]
    said = invoke(*words, *required, *whole).output
    assert "A100-SXM-80" in said and " device-hours; " in said


def machines(folder: Path, **rates: float) -> str:
    """Processors of these FLOP/s, invented, each in a file of its name."""
    made = catalogue("A100-SXM-80")
    for name, value in rates.items():
        rate = replace(made.devices[0].peak["bf16"], value=value)
        memory = replace(made.devices[0].bandwidth, value=value / 10)
        peak = {"fp32": rate, "bf16": rate}
        device = replace(made.devices[0], kind="cpu", peak=peak, bandwidth=memory, cores=0)
        (folder / f"{name}.yaml").write_text(dumps(replace(made, devices=(device,))))
    return " + ".join(str(folder / f"{name}.yaml") for name in rates)


def test_the_same_speed_is_the_plan_of_like_devices() -> None:
    """Seconds, bytes and equal rows."""
    like = parse_spec("2 x 4 H100-SXM @ 25GB/s")
    group = parse_spec("4xH100-SXM + 4xA100-SXM-80 @ 25GB/s").groups[0]
    other = replace(group, device=replace(group.device, name="H100-SXM other"))
    shape = shape_of("llama3-8b")
    said = "data=8,pipeline=1,context=1,rows=2,shards=8,recompute=full,microbatches=4"
    asked = Asked(2048, 64, conditions=Conditions(conditions((said,), "--require")))
    (one,) = choose_unlike(shape, asked, replace(like, groups=(group, other)))
    plan = choose(shape, asked, like, 1).plans[0]
    assert one.shares == () and {part.rows for part in one.parts} == {8}
    assert one.seconds == pytest.approx(plan.seconds, rel=1e-9)
    assert max(part.memory.process for part in one.parts) == plan.memory.process


def test_rows_are_shared_by_speed_and_the_plan_says_so(tmp_path: Path) -> None:
    """Three times the speed, three times the rows: no other shares of eight take less."""
    path, spec = tmp_path / "plan.yaml", machines(tmp_path, slow=1e9, fast=3e9)
    words = ("tiny", "--hardware", spec, "--set", "train.sequence=64", "--set", "precision=fp32")
    required = ("--set", "train.batch_tokens=512", "--require", "pipeline=1,zero=1")
    made = json.loads(invoke(*words, *required, "--json", "--out", str(path)).output)["plans"]
    assert made[0]["row_shares"] == [2, 6] and made[0]["mesh"] == "data=2"
    assert [one["rows"] for one in made[0]["workers"]] == [2, 6]
    plan = read_plan(path).plan
    assert plan.row_shares == (2, 6) and plan.microbatches == made[0]["microbatches"]
    meaning = {what: said for what, _, said in explain(plan)}
    assert meaning["workers"].endswith("takes its share (2, 6) of the 8 rows of a step")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("mixtral-8x7b", "--hardware", MIXED), "without experts"),
        (("llama3-8b", "--hardware", MIXED, "--objective", "memory"), "expected time"),
        (("llama3-8b", "--hardware", MIXED, "--explain"), "--explain is given beside unlike"),
        (("llama3-8b", "--hardware", MIXED, "--require", "pipeline=3"), "divide each kind"),
        (("llama3-405b", "--hardware", "RTX-4090 + L40S"), "2 unlike devices fits"),
    ],
)
def test_what_unlike_devices_are_not_planned_for(words: tuple[str, ...], said: str) -> None:
    result = invoke(*words)
    assert result.exit_code == 2 and result.output.count("\n") == 1, result.output
    assert said in " ".join(result.output.split())
