"""`outsize score`: tables, conventions, figures and bars."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from outsize.cli.main import main
from outsize.errors import OutsizeError
from outsize.foresight import fitted as fitting
from outsize.foresight.constants import Model, batch_of, tags_of
from outsize.foresight.conventions import causal
from outsize.foresight.fit import slopes
from outsize.foresight.measured import seconds_of
from outsize.foresight.named import shape_of
from outsize.foresight.runs import COLUMNS, data, read_runs, shipped
from outsize.foresight.score import bars, rank_correlation, report
from outsize.foresight.shape import read_shape

sys.path.append(str(Path(__file__).parents[2] / "tools"))

import accuracy

TEXT = data("published_training.csv")


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, ["score", *words])


def rows_of(*names: str, every: int = 1) -> list[dict[str, str]]:
    """Rows of the shipped table whose source has one of these names in it."""
    found = [r for r in csv.DictReader(io.StringIO(TEXT)) if any(n in r["source"] for n in names)]
    return found[::every]


def table(path: Path, rows: list[dict[str, str]], columns: Any = COLUMNS) -> str:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def test_conventions_give_the_step_times_that_their_papers_print() -> None:
    """Table 1 of Narayanan et al.: 138, 138 and 140 TFLOP/s a device are 3.70, 14.45 and 16.06 s
    (the table's notes); MegaScale's MFU of 53.0% is its 40.0 s; llm-foundry's MFU its tokens."""
    found = {
        (run.model, run.metric, run.source.name, run.layout.devices): seconds_of(run)
        for run in shipped()
        if run.layout is not None
    }
    paper = "Megatron-LM 2021"
    for model, devices, expected in (("3.6B", 64, 3.70), ("39B", 512, 14.45), ("76B", 1024, 16.06)):
        made = found[f"GPT-{model}", "hfu_tflops_per_gpu", paper, devices]
        assert made == pytest.approx(expected, rel=2e-3)
    assert found["GPT-175B", "mfu_pct", "MegaScale", 12288] == pytest.approx(6.34, rel=0.03)
    # Llama 3's MFU is PaLM's, scores without a mask: 38% at 131,072 tokens, 16M of them a step.
    scores = 12 * 126 * 16384 * 131072
    expected = 2**24 * (6 * 405.9e9 + scores) / (0.38 * 989e12 * 16384)
    made = found["Llama3.1-405B", "mfu_pct", "Llama 3", 16384]
    assert made == pytest.approx(expected, rel=2e-3)
    pairs: dict[tuple[Any, ...], list[float]] = {}
    for run in shipped():
        if run.model.startswith("MPT") and run.layout is not None and not run.layout.narrow:
            pairs.setdefault((run.shape, run.layout, run.device), []).append(seconds_of(run) or 0.0)
    assert len(pairs) > 50
    assert all(max(pair) == pytest.approx(min(pair), rel=3e-3) for pair in pairs.values())


@pytest.mark.parametrize("source", ["Megatron-Bridge", "BLOOM"])
def test_two_figures_of_one_run_are_the_same_seconds(source: str) -> None:
    """A rate of operations by its publication's count, and tokens or seconds, row behind row, but
    for neighbours that are two trials: GPT-OSS before May 2026, LoRA, DeepSeek-V3 with a further
    layer, BigScience's older formula."""
    runs = [run for run in shipped() if run.source.name == source and seconds_of(run) is not None]
    off = [
        (seconds_of(rate) or 0.0) / (seconds_of(plain) or 1.0)
        for one, other in itertools.pairwise(runs)
        if (one.model, one.device, one.layout) == (other.model, other.device, other.layout)
        for rate, plain in ((one, other), (other, one))
        if "flops" in rate.metric and "flops" not in plain.metric and abs(one.line - other.line) < 2
    ]
    assert len(off) > 60
    assert sum(abs(each - 1) < 0.03 for each in off) > 0.9 * len(off)


@pytest.mark.parametrize(
    ("model", "billions"), [("Nano", 31.6), ("Lightning", 31.6), ("Super", 120.7)]
)
def test_layers_of_one_part_each_do_what_their_publication_counts(
    model: str, billions: float
) -> None:
    """Megatron-Bridge prints TFLOP/s and tokens/s of the same runs of Nemotron 3: their quotient is
    its count of operations, the number of parameters is on the model's card."""
    rates: dict[tuple[object, ...], dict[str, float]] = {}
    counted = set()
    for run in shipped():
        if model not in run.model or run.layout is None or run.shape is None:
            continue
        assert run.shape.parameters / 1e9 == pytest.approx(billions, rel=2e-3)
        rows = (run.table, run.device, run.layout.precision)
        rates.setdefault(rows, {})[run.metric] = run.value or 0.0
        counted.add(causal(run.shape, 1.0, run.layout.sequence, False))
    found = [1e12 * r["tflops_per_gpu"] / r["tokens_per_s_per_gpu"] for r in rates.values()]
    assert len(counted) == 1
    assert np.median(found) == pytest.approx(counted.pop(), rel=3e-3)


@pytest.mark.parametrize("listed", [False, True])
def test_a_config_says_what_each_layer_is(tmp_path: Path, listed: bool) -> None:
    expected = shape_of("nemotron-3-super-120b-a12b")
    words = {"M": "mamba", "*": "attention", "E": "moe"}
    pattern = (
        {"layers_block_type": [words[letter] for letter in expected.pattern]}
        if listed
        else {"hybrid_override_pattern": expected.pattern}
    )
    values = {
        "model_type": "nemotron_h", "num_hidden_layers": 88, "hidden_size": 4096,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 131072,
        "intermediate_size": 2688, "mamba_num_heads": 128, "mamba_head_dim": 64,
        "ssm_state_size": 128, "n_groups": 8, "n_routed_experts": 512, "n_shared_experts": 1,
        "num_experts_per_tok": 22, "moe_intermediate_size": 2688, "moe_latent_size": 1024,
        "moe_shared_expert_intermediate_size": 5376, **pattern,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    found = shape_of(str(path))
    assert replace(found, inner=0, predicted=1) == expected
    assert found.parameters == expected.parameters
    path.write_text(json.dumps({k: v for k, v in values.items() if k not in pattern}))
    with pytest.raises(OutsizeError, match="'hybrid_override_pattern' is missing"):
        shape_of(str(path))
    path.write_text(json.dumps({k: v for k, v in values.items() if k != "ssm_state_size"}))
    with pytest.raises(OutsizeError, match="needs mamba_num_heads, mamba_head_dim, ssm_state_size"):
        shape_of(str(path))


def test_a_pattern_that_does_not_fit_its_model_is_refused() -> None:
    said = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 96}
    recurrent = {"heads": 4, "head": 16, "state": 8}
    for more, message in (
        ({"pattern": "*-*"}, "a pattern of 3 letters for 2 layers"),
        ({"pattern": "*?"}, "'?' is no part of a layer"),
        ({"pattern": "*M"}, "'M' without a recurrent state given"),
        ({"pattern": "ME", "recurrent": recurrent}, "'E' without experts given"),
    ):
        with pytest.raises(OutsizeError, match=re.escape(message)):
            read_shape({**said, **more}, "a model")
    plain = read_shape({**said, "inner": 128}, "a model")
    parts = read_shape({**said, "inner": 128, "layers": 4, "pattern": "*-*-"}, "a model")
    assert parts.parameters == plain.parameters
    assert parts.scores(32) == plain.scores(32)


def test_blank_measured_columns_give_the_same_forecasts(tmp_path: Path) -> None:
    rows = rows_of("Aleph", "SimuMax", every=20)
    full = json.loads(invoke(table(tmp_path / "a.csv", rows), "--each-source-out", "--json").output)
    for row in rows:
        row["measured_metric"] = row["measured_value"] = ""
    path = table(tmp_path / "b.csv", rows)
    blank = json.loads(invoke(path, "--each-source-out", "--json").output)
    assert full["forecasts"] == blank["forecasts"] and len(full["forecasts"]) == len(rows)
    assert full["mape"] is not None and blank["mape"] is None
    printed = invoke(path, "--each-source-out")
    assert printed.exit_code == 0 and printed.output.count(" s ") >= len(rows)


def test_json_has_the_names_of_the_issue_by_source_too(tmp_path: Path) -> None:
    result = invoke(table(tmp_path / "a.csv", rows_of("SimuMax", "ORNL")), "--json")
    made = json.loads(result.output)
    names = {"mape", "rank", "regret", "oom_precision", "oom_recall", "memory_mape", "rows"}
    assert names <= set(made) and names <= set(made["sources"]["SimuMax"])
    assert made["sources"]["SimuMax"]["rows"] == 86 and made["rows"] == 86
    assert [each["source"] for each in made["unforecast"]] == ["Frontier"]
    first = made["forecasts"][0]
    assert first["low"] < first["step_seconds"] < first["high"] and first["fits"] is True


def test_a_bar_that_is_missed_is_exit_code_1(tmp_path: Path) -> None:
    rows = rows_of("MegaScale")
    good = invoke(table(tmp_path / "a.csv", rows), "--json")
    for row in rows:
        if row["measured_metric"] == "step_time_s":
            row["measured_value"] = str(3 * float(row["measured_value"]))
    bad = invoke(table(tmp_path / "b.csv", rows))
    assert (good.exit_code, bad.exit_code) == (0, 1)
    assert "missed: step time, MegaScale: 0." in bad.output


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"measured_metric": "minutes"}, "line 2: measured_metric 'minutes' is unknown"),
        ({"measured_metric": "step_time"}, "did you mean 'step_time_s'"),
        ({"measured_value": "fast"}, "line 2: measured_value is 'fast'; expected a number"),
        ({"layers": "12.5"}, "line 2: layers is '12.5'; expected a count"),
    ],
)
def test_bad_tables_name_line_and_column(tmp_path: Path, change: Any, said: str) -> None:
    row = {**rows_of("SimuMax")[0], **change}
    result = invoke(table(tmp_path / "a.csv", [row]))
    assert result.exit_code == 2 and said in " ".join(result.output.split())
    assert len(result.output.splitlines()) == 1


def test_a_missing_column(tmp_path: Path) -> None:
    columns = [name for name in COLUMNS if name != "micro_batch"]
    result = invoke(table(tmp_path / "a.csv", rows_of("SimuMax"), columns))
    assert result.exit_code == 2 and "line 1: column 'micro_batch' is missing" in result.output


def test_rows_with_fewer_cells_or_more() -> None:
    header, row = TEXT.splitlines()[:2]
    with pytest.raises(OutsizeError, match="line 3: column 'tp' is missing, as all behind it"):
        read_runs("\n".join([header, row, ",".join(["x"] * 10)]), "t")
    with pytest.raises(OutsizeError, match="line 2: more cells than the 24 columns"):
        read_runs(f"{header}\n{row},1,2\n", "t")


def test_rows_that_cannot_be_forecast_say_why() -> None:
    header = ",".join(COLUMNS)
    row = ",".join(
        {"source": "x", "model": "mystery", "gpus": "8", "gpu_type": "Abacus"}.get(name, "")
        for name in COLUMNS
    )
    (run,) = read_runs(f"{header}\n{row}\n", "t")
    assert run.missing == "device 'Abacus' is not in the catalogue"
    row = row.replace("Abacus", "H100").replace("mystery", "llama3-70b")
    said = {"layers": "80", "hidden": "8192", "vocab": "128256", "seq": "8192", "precision": "int3"}
    more = zip(COLUMNS, row.split(","), strict=True)
    row = ",".join(said.get(name, cell) for name, cell in more)
    (run,) = read_runs(f"{header}\n{row}\n", "t")
    assert run.missing == "precision 'int3' is not known"
    with pytest.raises(OutsizeError, match="column 'source' is missing"):
        read_runs("", "t")


def test_rank_correlation_is_spearmans() -> None:
    """A closed form without ties, 1 - 6 sum d^2 / n (n^2 - 1), and a pair of ties by hand."""
    assert rank_correlation([1, 2, 3, 4], [2, 1, 4, 3]) == pytest.approx(1 - 6 * 4 / (4 * 15))
    assert rank_correlation([1, 1, 2], [1, 1, 2]) == pytest.approx(1.0)
    assert rank_correlation([1, 1, 1], [1, 2, 3]) == 0.0


def test_the_shipped_constants_are_those_of_the_shipped_table() -> None:
    """Fitted once more, without one publication: the digits of the file."""
    runs = [run for run in shipped() if not run.missing and seconds_of(run) is not None]
    made = [fitting.terms_of(run) for run in runs]
    found = fitting.without("SimuMax", runs, made, fitting.fitted().values)
    kept = fitting.fitted("SimuMax").values
    assert found.keys() == kept.keys()
    off = np.array([abs(found[name] - kept[name]) for name in found])
    assert off.max() < 5e-3


def test_an_interval_has_nine_of_ten_rows_of_publications_of_one_voice_each() -> None:
    """All of the hundred rows of one and 6 / 7 of another's: the first mean of both over 0.9."""
    errors = {"own": np.ones(5), "large": np.arange(100) / 1000, "small": np.arange(7) / 7}
    assert fitting.reach_of(errors, "own") == pytest.approx(5 / 7)


def test_slopes_by_lane_are_those_by_constant() -> None:
    runs = [run for run in shipped() if not run.missing and seconds_of(run)][::100]
    batch = batch_of([fitting.terms_of(run) for run in runs], [tags_of(run) for run in runs])
    model = Model.of(batch)
    at = model.centre + 0.1
    found = slopes(model, batch, at)
    moved = 1e-4 * np.eye(len(at))
    high, low = (
        np.array([np.log(model.seconds(batch, at + sign * each).total) for each in moved]).T
        for sign in (1, -1)
    )
    assert np.allclose(found, (high - low) / 2e-4, atol=2e-5) and (abs(found).max(0) > 0).sum() > 30


def test_constants_without_a_publication_do_not_know_its_stack() -> None:
    assert "stack simumax" not in fitting.fitted("SimuMax").values
    assert "stack simumax" in fitting.fitted("").values
    assert fitting.fitted("nobody") == fitting.fitted("")


def test_every_bar_is_a_figure_of_the_whole_table() -> None:
    """And of unknown devices: fp4 on GB200 is of one publication, so that its interval is wider
    than any other's had to be."""
    made = report(shipped(), each_out=True)
    said = [bar.what for bar in bars(made)]
    assert {"rank within sweeps", "regret within sweeps", "memory"} <= set(said)
    assert "step time, BigScience V100" not in said  # rank alone counts
    rows = (row for row in made.rows if "Bridge" in row.run.source.name)
    widths = {row.known: row.high / row.low for row in rows}
    assert widths[False] > widths[True] > 1


def test_the_page_is_what_its_script_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert accuracy.main(["--check"]) == 0, capsys.readouterr().out


def test_halves_of_the_models_are_two_and_whole() -> None:
    found = {fitting.half(run) for run in shipped()}
    assert found == set(fitting.HALVES)
    one, other = (fitting.fitted(name).values for name in fitting.HALVES)
    assert one != other != fitting.fitted().values
    by_model: dict[tuple[str, str], set[str]] = {}
    for run in shipped():
        by_model.setdefault((run.source.name, run.model), set()).add(fitting.half(run))
    assert all(len(halves) == 1 for halves in by_model.values())


def test_interleaved_runs_of_torchtitan_have_two_chunks() -> None:
    runs = [run for run in shipped() if run.source.name == "torchtitan" and run.layout is not None]
    chunks = {run.layout.chunks for run in runs if run.layout is not None}
    assert chunks == {1, 2}


def test_local_batches_of_torchtitan_are_cut_into_as_many_microbatches_as_stages() -> None:
    found = {
        (run.layout.rows, run.layout.microbatches)
        for run in shipped()
        if run.source.name == "torchtitan" and run.layout is not None and run.layout.pipeline == 8
    }
    assert found == {(4, 8), (1, 8)}  # of 32 rows, and of 8


def test_a_shape_that_is_not_said_follows_from_its_parameters() -> None:
    run = next(run for run in shipped() if run.model == "GPT-18B" and not run.missing)
    shape, layout = run.shape, run.layout
    assert shape is not None and layout is not None and "shape" in layout.assumed
    assert shape.parameters == pytest.approx(18e9, rel=0.05)
