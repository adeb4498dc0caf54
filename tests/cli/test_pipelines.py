"""`outsize plan` and `outsize train` with a pipeline: what is predicted, orders of a plan's own,
and what is refused. Going on with other workers: tests/cli/test_vocabulary_pipeline.py."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml
from forked import forked
from torchrun import free_port

from outsize.schedule.csv import to_csv
from outsize.schedule.pipelines import Shape, make
from outsize.train.metrics import read_metrics

EXACT = ("--set", "precision=float64", "--set", "train.save_every=0")
FLAT = ("--set", "learning_rate.shape=constant", "--set", "train.evaluate_every=2")
PIPED = ("--mesh", "pipeline=2")


def planned(invoke, *words: object) -> dict:
    shown = invoke("plan", "run.yaml", "--set", "precision=float32", *words, "--json")
    assert shown.exit_code == 0, shown.stderr
    return json.loads(shown.stdout)


def least_of(invoke, *words: object) -> int:
    """The least budget that works, as a refusal names it."""
    refused = invoke("plan", "run.yaml", "--set", "precision=float32", *words, "--memory", "20KiB")
    assert refused.exit_code == 2
    found = re.search(r"needs [^(]*\((\d+) bytes", refused.stderr)
    assert found is not None, refused.stderr
    return int(found[1])


def test_plan_predicts_every_worker(home, invoke):
    alone = planned(invoke)
    assert alone["workers"] == []
    made = planned(invoke, "--mesh", "pipeline=4")
    assert [worker["stages"] for worker in made["workers"]] == [[0], [1], [2], [3]]
    assert made["peak"] == max(worker["peak"] for worker in made["workers"])
    held = [worker["static"]["parameters"] for worker in made["workers"]]
    assert sum(held) == alone["static"]["parameters"]
    crossed = 4 * 64 * 64 * 4  # rows, tokens, hidden numbers, bytes
    heard = [worker["received"]["stages"]["this_machine"] for worker in made["workers"]]
    assert heard == [crossed, 2 * crossed, 2 * crossed, crossed]
    shown = invoke("plan", "run.yaml", "--mesh", "pipeline=4,data=1")
    for said in ("always there", "from others", "1f1b", "pipeline=4; each takes all rows", "cuts"):
        assert said in shown.stdout, said


def test_cuts_make_room_within_a_budget(home, invoke):
    wide = ("--set", "model.vocabulary=4096", "--set", "data.tokenizer=bytes", *PIPED)
    free = planned(invoke, *wide)
    peaks = [worker["peak"] for worker in free["workers"]]
    least = least_of(invoke, *wide)
    assert least < 0.91 * max(peaks)
    made = planned(invoke, *wide, "--memory", least)
    assert max(worker["peak"] for worker in made["workers"]) <= least
    cuts = [[worker["stages"] for worker in plan["workers"]] for plan in (free, made)]
    assert cuts[0] != cuts[1]


def numbers(run: Path) -> dict[tuple[int, str], float]:
    names = ("loss", "gradient_norm", "tokens", "validation_loss", "lr")
    return {(r["step"], n): r[n] for r in read_metrics(run) for n in names if n in r}


def assert_same(run: Path, other: Path) -> None:
    mine, theirs = numbers(run), numbers(other)
    assert mine == pytest.approx(theirs, rel=1e-10)
    assert (run / "sample.txt").read_text() == (other / "sample.txt").read_text()


def test_torchrun_starts_a_pipeline(home, invoke):
    """As on many machines. A run under torchrun itself: tests/accelerator/test_torchrun.py."""
    words = ["run.yaml", "--set", "precision=float64", "--set", "sample.tokens=0"]
    port, pids = str(free_port()), []
    for rank in ("0", "1"):
        place = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        (home / rank).mkdir()
        pids.append(forked(home / rank, place, "train", *words, *PIPED))
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [0, 0], (home / "0" / "err").read_text()[-2000:]
    assert invoke("train", *words, "--set", "output=one").exit_code == 0
    assert numbers(home / "run") == pytest.approx(numbers(home / "one"), rel=1e-10)
    crossed = 4 * 64 * 64 * 8  # rows, tokens, hidden numbers, bytes
    heard = [r["workers_bytes_read"] for r in read_metrics(home / "run") if "loss" in r]
    assert heard[-1] == crossed


SETS = {
    "too many workers": (
        "pipeline=8", ["train.batch_tokens=1024"],
        "1f1b cuts the model into 8 stages, and it has 4 segments (prologue, 2 blocks, epilogue); a"
        " stage without blocks cannot run: expected mesh.pipeline 4 at most",
    ),
    "too many stages": (
        "pipeline=4", ["plan.pipeline=interleaved:2"],
        "interleaved:2 cuts the model into 8 stages, and it has 4 segments (prologue, 2 blocks,"
        " epilogue); a stage without blocks cannot run: expected mesh.pipeline 2 at most",
    ),
    "too few rows": (
        "pipeline=4,data=2", [],
        "a step has 4 rows, which makes 2 microbatches at most to each of 2 places of the data"
        " axis, and a pipeline needs as many as it has workers; set train.batch_tokens to 512, or"
        " mesh.pipeline to 2",
    ),
    "too large microbatches": (
        "pipeline=2", ["plan.microbatch_rows=4"],
        "plan.microbatch_rows is 4, which makes 1 microbatch; a pipeline of 2 workers needs as many"
        " at least: set it to 2, or leave it out",
    ),
    "too few microbatches": (
        "pipeline=4", ["plan.pipeline=dualpipe"],
        "DualPipe: microbatches is 4; expected at least 8; the nearest is 8",
    ),
    "an odd number": (
        "pipeline=3", ["plan.pipeline=chimera"],
        "Chimera: devices is 3; expected an even number; the nearest is 4",
    ),
    "no such schedule": ("pipeline=2", ["plan.pipeline=1f2b"], "did you mean '1f1b'?"),
    "no such schedule, unused": ("data=1", ["plan.pipeline=1f2b"], "did you mean '1f1b'?"),
    "no such number": (
        "pipeline=2", ["plan.pipeline=interleaved:x"], "expected a number behind the colon",
    ),
    "a number too many": ("pipeline=2", ["plan.pipeline=1f1b:2"], "it has no such choice"),
    "other maths": (
        "pipeline=3", ["plan.pipeline=skip-pipe"],
        "which changes the maths (each microbatch skips 0 of 3 stages): name partial-pipeline under"
        " plan.approximate",
    ),
    "a loss of each group": (
        "pipeline=2", ["plan.approximate=[local-learning]"], "one worker would work at a time",
    ),
    "chunks and weight gradients apart": (
        "pipeline=2", ["plan.pipeline=zb-h1", "plan.sequence_chunk=64"],
        "they would hold every chunk; set it to 0, or plan.pipeline to 1f1b",
    ),
    "too little memory": (
        "pipeline=2", ["memory=200KiB"], "bytes missing; the smallest plan needs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SETS.values(), ids=SETS)
def test_what_a_pipeline_cannot_do_is_one_line(case, home, invoke):
    mesh, sets, expected = case
    words = [word for one in sets for word in ("--set", one)]
    shown = invoke("plan", "run.yaml", "--mesh", mesh, *words)
    assert shown.exit_code == 2 and not (home / "run").exists()
    assert shown.stderr.count("\n") == 1 and shown.stderr.startswith("error: ")
    assert expected in shown.stderr


def test_train_refuses_before_anything_is_written(home, invoke):
    shown = invoke("train", "run.yaml", "--mesh", "pipeline=8", "--set", "train.batch_tokens=1024")
    assert shown.exit_code == 2 and not (home / "run").exists()
    assert shown.stderr.count("\n") == 1 and "mesh.pipeline 4 at most" in shown.stderr


def test_orders_of_a_plan_run_are_repeated_and_gone_on_with(home, invoke):
    """Which ones are found depends on the machine, so that the plan's are put in by hand."""
    words = ("run.yaml", *EXACT, *FLAT, *PIPED, "--set", "plan.pipeline=auto")
    shown = invoke("plan", *words, "--out", "auto.yaml")
    assert shown.exit_code == 0, shown.stderr
    assert "orders of this plan's own" in " ".join(shown.stdout.split())
    file = yaml.safe_load((home / "auto.yaml").read_text())
    orders = to_csv(make("zb-h2", Shape(2, 4))).split()
    line = {**file["plan"]["pipeline"], "schedule": "auto", "cuts": [2], "orders": orders}
    file["plan"] |= {"pipeline": line, "microbatch_rows": 1}
    (home / "auto.yaml").write_text(yaml.safe_dump(file))

    half = ("--set", "train.steps=2", "--set", "output=auto")
    flat = ("run.yaml", *EXACT, *FLAT)
    for words in (
        ("train", *flat, *half, "--plan", "auto.yaml"),
        ("train", "--resume", "auto", *PIPED, "--set", "train.steps=3"),
        ("train", *flat, "--set", "train.steps=3", "--set", "output=alone"),
    ):
        result = invoke(*words)
        assert result.exit_code == 0, result.stderr
    assert_same(home / "auto", home / "alone")
    run = yaml.safe_load((home / "auto" / "plan.yaml").read_text())
    assert run["pipeline"] == line and run["mesh"]["pipeline"] == 2

    records = read_metrics(home / "auto")
    for last in (r for r in records if "measured_peak_bytes_1" in r):
        for worker in range(2):
            peak = last[f"measured_peak_bytes_{worker}"]
            assert peak <= last[f"predicted_peak_bytes_{worker}"] <= 1.05 * peak
        assert last["measured_peak_bytes"] <= last["predicted_peak_bytes"]
