"""`outsize plan MODEL --hardware SPEC`: choices, shapes of models, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from outsize.cli.main import main
from outsize.foresight.described import Asked, choose, layouts
from outsize.foresight.memory import memory
from outsize.foresight.named import from_config, shape_of
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


def test_the_choice_is_the_fastest_of_all_that_fit() -> None:
    """Every layout forecast alone: none that fits is faster than what is chosen."""
    shape, cluster = shape_of("llama3-8b"), parse_spec(NODE)
    asked = Asked(8192, 64)
    found = choose(shape, asked, cluster, top=1000)
    seconds = [plan.seconds for plan in found.plans]
    assert seconds == sorted(seconds) and len(seconds) == found.fitting
    made = list(layouts(shape, asked, cluster))
    room = cluster.groups[0].device.memory_bytes
    assert found.counted == len(made)
    assert found.fitting == sum(memory(shape, lay).process <= room for lay in made)
    for lay in made[::40]:
        alone = Asked(
            8192, 64, mesh=(lay.tensor, lay.pipeline, 1, 1), rows=lay.rows, chunks=lay.chunks,
            recompute=lay.recompute, zero=3 if lay.shards > 1 else int(lay.states > 1),
        )  # fmt: skip
        (plan,) = choose(shape, alone, cluster).plans
        assert plan.seconds >= seconds[0] or not plan.fits


def test_less_memory_or_a_faster_network_change_the_choice_the_right_way() -> None:
    shape = shape_of("llama3-70b")
    slow, fast = (
        choose(shape, Asked(4096, 256), parse_spec(f"8 x 8 H100-SXM @ {rate}GB/s"), 1).plans[0]
        for rate in (5, 50)
    )
    assert fast.seconds < slow.seconds
    tight = Asked(4096, 256, memory=40 * 2**30)
    small = choose(shape, tight, parse_spec("8 x 8 H100-SXM @ 50GB/s"), 1).plans[0]
    assert small.memory.process <= 40 * 2**30 and small.seconds >= fast.seconds


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
    assert "fp8 is foretold only" in said and "driver" in said


def test_a_model_that_fits_nowhere_says_by_how_much() -> None:
    result = invoke("llama3-8b", "--hardware", "RTX-4090", "--set", "train.batch_tokens=64K")
    assert result.exit_code == 0
    assert "0 of" in result.output and "does not fit: " in " ".join(result.output.split())


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
        (("llama3-8b", "--hardware", NODE, "--mesh", "data=2,tensor=2"), "has 4 workers"),
        (("llama3-8b", "--hardware", NODE, "--set", "train.steps=3"), "beside --hardware"),
        (("llama3-8b", "--hardware", NODE, "--set", "plan.zero=2"), "forecasts 0, 1 and 3"),
        (("llama3-8b", "--hardware", NODE, "--set", "precision=int3"), "precision 'int3'"),
        (("llama3-8b", "--hardware", NODE, "--out", "p.yaml"), "--out is given beside --hardware"),
        (("llama3-8b", "--tokens", "1G"), "--tokens is given beside no --hardware"),
        (("llama3-8b", "--hardware", "2 x 8 H100-SXM + 8xA100-SXM-80"), "unlike devices"),
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
