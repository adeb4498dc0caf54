"""`outsize plan MODEL --hardware SPEC`: choices, shapes of models, and what is refused."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from outsize.cli.main import main
from outsize.foresight.layout import Layout
from outsize.foresight.memory import memory, workers
from outsize.foresight.named import from_config, shape_of
from outsize.foresight.planning.asked import Asked, Conditions, Objective, conditions
from outsize.foresight.planning.choose import choose, forecast
from outsize.foresight.planning.layouts import STACK, cells, variants
from outsize.hardware import parse_spec

NODE = "8xH100-SXM"
CONFIG = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "tie_word_embeddings": False,
}  # fmt: skip


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, ["plan", *words])


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama3-8b", 8.03), ("LLAMA3-70B", 70.55), ("deepseek-v3", 671.0), ("gpt3-175b", 174.6),
     ("mixtral-8x7b", 46.7), ("qwen3-30b-a3b", 30.5), ("bloom-176b", 176.2)],
)  # fmt: skip
def test_published_models_have_their_parameters(name: str, billions: float) -> None:
    assert shape_of(name).parameters / 1e9 == pytest.approx(billions, rel=4e-3)


def test_a_bare_config_is_the_published_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    assert shape_of(str(path)) == shape_of(str(tmp_path)) == shape_of("llama3-8b")
    experts = {**CONFIG, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    made = from_config({**experts, "vocab_size": 32000}, "mixtral")
    assert made.parameters == shape_of("mixtral-8x7b").parameters


def test_presets_are_models_too() -> None:
    assert shape_of("llama-1.1b").parameters == pytest.approx(1.1e9, rel=0.02)


@pytest.mark.parametrize("objective", ["time", "memory", "cost"])
def test_the_choice_is_the_best_of_all_that_fit(objective: Objective) -> None:
    """Every layout of every cell forecast alone: none that fits is better than what is chosen,
    whatever a bound has left out."""
    shape, cluster = shape_of("llama3-8b"), parse_spec("4 x 2 A100-SXM-40 @ 10GB/s")
    asked = Asked(2048, 64, objective=objective)
    found = choose(shape, asked, cluster, top=3)
    every = [
        (cell, layout)
        for cell in cells(shape, asked, cluster)
        for layout in variants(shape, asked, cell)
    ]
    ranks = []
    for cell, layout in every:
        held = memory(shape, layout)
        room = cell.cluster.groups[0].device.memory_bytes
        if held.process <= room:
            (plan,) = forecast(shape, [layout], cell.cluster, [held], room)
            ranks.append(plan.rank(objective)[0])
    chosen = [plan.rank(objective)[0] for plan in found.plans]
    assert chosen == sorted(chosen) and all(plan.fits for plan in found.plans)
    kept = [plan.rank(objective)[0] for plan in found.plans if not plan.layout.whole]
    assert chosen[0] <= min(ranks) * (1 + 1e-12)
    assert all(any(one == pytest.approx(rank) for rank in ranks) for one in kept)
    if objective == "time":
        assert found.shut > 0, "a bound left something out"


def test_part_of_the_blocks_is_recomputed_where_all_are_too_slow_and_none_too_large() -> None:
    """As few as fit: with one less it holds too much, and it is faster than all."""
    shape, cluster = shape_of("llama3-8b"), parse_spec(NODE)
    required = conditions(("tensor=1,pipeline=1,context=1,zero=3,rows=2",), "--require")
    asked = Asked(8192, 64, conditions=Conditions(required))
    plans = choose(shape, asked, cluster, 3).plans
    best = plans[0]
    assert 0 < best.layout.whole < shape.layers
    assert best.memory.process <= best.room
    assert memory(shape, replace(best.layout, whole=best.layout.whole - 1)).process > best.room
    whole = next(plan for plan in plans if plan.layout.recompute == "full")
    assert whole.seconds > best.seconds
    every = replace(best.layout, whole=shape.layers)
    assert (
        memory(shape, every).tensors
        == memory(shape, replace(every, whole=0, recompute="full")).tensors
    )


def test_less_memory_or_a_faster_network_change_the_choice_the_right_way() -> None:
    shape = shape_of("llama3-8b")
    slow, fast = (
        choose(shape, Asked(4096, 64), parse_spec(f"2 x 8 H100-SXM @ {rate}GB/s"), 1).plans[0]
        for rate in (5, 50)
    )
    assert fast.seconds < slow.seconds
    tight = Asked(4096, 64, memory=20 * 2**30)
    small = choose(shape, tight, parse_spec("2 x 8 H100-SXM @ 50GB/s"), 1).plans[0]
    assert small.memory.process <= 20 * 2**30 < fast.memory.process
    assert small.seconds > fast.seconds


def test_a_choice_leaves_what_bytes_may_be_off_by_unless_memory_is_said() -> None:
    """Layers are computed again until a twentieth of the device is left; with --memory until the
    bytes that it says are met, which fewer layers do."""
    shape, cluster = shape_of("llama3-70b"), parse_spec("64 x 8 H100-SXM")
    has = cluster.groups[0].device.memory_bytes
    fixed = Conditions(conditions(("data=512", "rows=1", "zero=3"), "--require"))
    asked = Asked(8192, 512, conditions=fixed)
    left, taken = (
        choose(shape, one, cluster, 1).plans[0] for one in (asked, replace(asked, memory=has))
    )
    assert left.memory.process <= 0.95 * has < taken.memory.process <= has
    assert left.layout.whole > taken.layout.whole > 0 and left.seconds > taken.seconds
    said = " ".join(invoke("llama3-8b", "--hardware", NODE).output.split())
    assert "less than 75.15 GiB (3.96 GiB of the device are left)" in said


def test_a_busy_machine_chooses_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour passes between any two looks at the clock, and a processor does little meanwhile."""
    hours = itertools.count(0.0, 3600.0)
    monkeypatch.setattr("time.monotonic", hours.__next__)
    found = choose(shape_of("llama3-8b"), Asked(2048, 64), parse_spec("4 x 2 A100-SXM-40 @ 10GB/s"))
    assert found.finished


def test_json_and_the_cost_of_a_run() -> None:
    """Hours are tokens over tokens a second times devices; money and kWh are theirs."""
    words = ("llama3-8b", "--hardware", NODE, "--set", "train.sequence=8192", "--json")
    made = json.loads(
        invoke(*words, "--tokens", "1G", "--price", "2.50/h", "--watts", "700").output
    )
    best = made["plans"][0]
    hours = 1e9 / best["tokens_per_s"] / 3600 * 8
    assert made["device_hours"] == pytest.approx(hours)
    assert made["days"] == pytest.approx(hours / 8 / 24)
    assert made["money"] == pytest.approx(2.5 * hours)
    assert made["kwh"] == pytest.approx(0.7 * hours)
    assert best["low"] < best["step_seconds"] < best["high"] and best["fits"]
    assert len(made["plans"]) == 5
    seconds = [plan["step_seconds"] for plan in made["plans"]]
    assert seconds == sorted(seconds)


def test_a_mesh_that_is_said_is_kept() -> None:
    words = ("llama3-8b", "--hardware", NODE, "--mesh", "tensor=2,pipeline=2", "--set",
             "plan.zero=1", "--set", "plan.recompute=[block]", "--json")  # fmt: skip
    (best, *_) = json.loads(invoke(*words).output)["plans"]
    assert (best["mesh"], best["zero"], best["recompute"]) == (
        "data=2,pipeline=2,tensor=2", 1, "full",
    )  # fmt: skip


def test_tables_say_what_binds_and_what_is_foretold_only() -> None:
    result = invoke("llama3-8b", "--hardware", NODE, "--set", "precision=fp8")
    said = " ".join(result.output.split())
    assert result.exit_code == 0 and "takes longest" in said and "fits: " in said
    assert "fp8 is foretold only" in said and "libraries" in said


def test_a_model_that_fits_nowhere_says_by_how_much_and_what_would_do() -> None:
    words = ("llama3-8b", "--set", "train.batch_tokens=64K", "--hardware")
    result = invoke(*words, "RTX-4090")
    said = " ".join(result.output.split())
    assert result.exit_code == 2 and len(result.output.splitlines()) == 1
    assert "fits in none of" in said and "GiB beyond 21.23 GiB of a device's 22.35 GiB" in said
    count = int(said.split()[-4])
    assert said.endswith(f"{count} devices would do")
    assert invoke(*words, f"{count}xRTX-4090").exit_code == 0
    assert invoke(*words, f"{count // 2}xRTX-4090").exit_code == 2


def test_what_is_required_and_forbidden_holds_for_every_plan() -> None:
    words = ("llama3-8b", "--hardware", "4 x 8 H100-SXM", "--require", "tensor>=2,pipeline",
             "--forbid", "recompute", "--forbid", "zero<1", "--max-devices", "24",
             "--json")  # fmt: skip
    made = json.loads(invoke(*words).output)
    for plan in made["plans"]:
        mesh = dict(part.split("=") for part in plan["mesh"].split(","))
        assert int(mesh["tensor"]) >= 2 and int(mesh["pipeline"]) >= 2
        assert plan["recompute"] == "none" and plan["zero"] >= 1 and plan["devices"] <= 24


def test_states_are_cut_over_as_many_as_are_required() -> None:
    words = ("llama3-8b", "--hardware", "2 x 8 H100-SXM", "--require", "data=16,zero=3,shards=4")
    (best, *_) = json.loads(invoke(*words, "--json").output)["plans"]
    assert (best["mesh"], best["zero"], best["shards"]) == ("data=16", 3, 4)


def test_objectives_choose_what_they_name() -> None:
    def best(objective: str) -> Any:
        words = ("llama-1.1b", "--hardware", "2 x 8 H100-SXM", "--json", "--price", "2/h")
        return json.loads(invoke(*words, "--objective", objective).output)["plans"][0]

    time, memory_, cost = (best(name) for name in ("time", "memory", "cost"))
    assert time["step_seconds"] < cost["step_seconds"]
    spent = [each["step_seconds"] * each["devices"] for each in (time, cost)]
    assert spent[1] < spent[0]
    assert sum(memory_["bytes"].values()) < sum(time["bytes"].values())


def test_an_explanation_has_a_number_for_every_family_and_a_source_for_every_constant() -> None:
    words = ("llama3-8b", "--hardware", "2 x 8 H100-SXM", "--explain", "--json")
    made = json.loads(invoke(*words, "--set", "train.batch_tokens=512K").output)
    why = made["explain"]
    for family in why["families"]:
        assert family["chosen"] or any(c.isdigit() for c in family["reason"]), family
    gains = {change["what"]: change["gain"] for change in why["changes"]}
    assert set(gains) == {"one machine more", "8 GiB more", "half the sequence", "twice the link"}
    assert gains["one machine more"] > 0.2 and gains["twice the link"] >= 0
    assert gains["8 GiB more"] >= 0
    assert all(each["value"] and each["source"] for each in why["constants"])
    assert made["rows"] * made["sequence"] == 512 << 10
    assert all(each["loses_by"] for each in made["plans"][1:])
    low, high = made["plans"][0]["interval_by_lane"]["matmul"]
    assert low < made["plans"][0]["seconds_by_lane"]["matmul"] < high
    text = invoke("llama-1.1b", "--hardware", "H100-SXM", "--explain", "--top", "2").output
    said = " ".join(text.split())
    assert "why not" in said and "if there were" in said and "reserve: context" in said


def test_stages_between_the_ends_hold_no_vocabulary_and_fewer_microbatches() -> None:
    layout = Layout(8, 1, 64, 2048, STACK, tensor=1, pipeline=8)
    held = list(workers(shape_of("llama3-8b"), layout).values())
    assert max(held, key=lambda one: one.tensors) == memory(shape_of("llama3-8b"), layout)
    live = [one.activations for one in held[:-1]]
    assert live == sorted(live, reverse=True) and live[0] == pytest.approx(live[4] * 2)
    assert held[0].states["weights"] - held[1].states["weights"] == 2 * 128256 * 4096


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("llama3-7b", "--hardware", NODE), "did you mean 'llama3-70b'"),
        (("--hardware", NODE), "no model"),
        (("llama3-8b", "--hardware", "8xH100"), "is not in the catalogue"),
        (("llama3-8b", "--hardware", NODE, "--price", "-2/h"), "expected more than 0 an hour"),
        (("llama3-8b", "--hardware", NODE, "--price", "2.50"), "expected more than 0 an hour"),
        (("llama3-8b", "--hardware", NODE, "--tokens", "1G", "--watts", "-1"), "--watts is -1.0"),
        (("llama3-8b", "--hardware", NODE, "--tokens", "many"), "expected a number"),
        (("llama3-8b", "--hardware", NODE, "--mesh", "tensor=3"), "axes that divide them"),
        (("llama3-8b", "--hardware", NODE, "--objective", "tme"), "did you mean 'time'"),
        (("llama3-8b", "--hardware", NODE, "--objective", "cost"), "without a price"),
        (("llama3-8b", "--hardware", NODE, "--require", "pipelin"), "did you mean 'pipeline'"),
        (("llama3-8b", "--hardware", NODE, "--require", "zero=x"), "is no number"),
        (("llama3-8b", "--hardware", NODE, "--require", "recompute<2"), "recompute=none, part"),
        (("llama3-8b", "--hardware", NODE, "--forbid", "zero 3"), "expected as pipeline=1"),
        (
            ("llama3-8b", "--hardware", NODE, "--require", "tensor=2", "--forbid", "tensor>1"),
            "--require tensor=2 and --forbid tensor>1: no layout has both",
        ),
        (("llama3-8b", "--hardware", NODE, "--require", "tensor=3"), "has --require tensor=3"),
        (("llama3-8b", "--hardware", NODE, "--require", "zero=2"), "has it; expected 0, 1, 3"),
        (
            ("llama3-8b", "--hardware", NODE, "--require", "sequence-parallel=2"),
            "has it; expected 0, 1",
        ),
        (("llama3-8b", "--hardware", NODE, "--seconds", "nan"), "--seconds is nan"),
        (
            ("llama3-8b", "--hardware", NODE, "--max-devices", "2", "--require", "tensor=4"),
            "--require tensor=4 and --max-devices 2",
        ),
        (("llama3-8b", "--hardware", NODE, "--watts", "nan"), "--watts is nan"),
        (("llama3-8b", "--hardware", NODE, "--watts", "inf"), "--watts is inf"),
        (("", "--hardware", NODE), "model '' is unknown"),
        (
            ("llama3-8b", "--hardware", "RTX-4090 + 16GiB host"),
            "devices would do (host: searched too)",
        ),
        (("llama3-8b", "--require", "tensor=2"), "--require goes with --hardware; add that"),
        (("llama3-8b", "--hardware", NODE, "--mesh", "data=2,tensor=2"), "has 4 workers"),
        (("llama3-8b", "--hardware", NODE, "--set", "train.steps=3"), "is no key of a forecast"),
        (("llama3-8b", "--hardware", NODE, "--set", "plan.zero"), "expected plan.zero=VALUE"),
        (("llama3-8b", "--hardware", NODE, "--set", "plan.zero=2"), "forecasts 0, 1 and 3"),
        (("llama3-8b", "--hardware", NODE, "--set", "precision=int3"), "precision 'int3'"),
        (
            ("llama3-8b", "--hardware", NODE, "--set", "precision=fp8", "--out", "p.yaml"),
            "fp8 is foretold only",
        ),
        (("llama3-8b", "--tokens", "1G"), "--tokens goes with --hardware"),
    ],
)
def test_what_is_refused_is_one_line(words: tuple[str, ...], said: str) -> None:
    result = invoke(*words)
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.output.split()) and len(result.output.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "lama"}, "did you mean 'llama'"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"vocab_size": -1}, "vocab_size is -1; expected a count"),
    ],
)
def test_bad_configs(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, **change}))
    result = invoke(str(path), "--hardware", NODE)
    assert result.exit_code == 2 and said in " ".join(result.output.split())


def test_a_run_file_is_no_model_elsewhere(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("model: {name: tiny}")
    text = " ".join(invoke(str(run), "--hardware", NODE).output.split())
    assert "run.yaml: not JSON" in text and "a run's or a plan's model goes by its name" in text
