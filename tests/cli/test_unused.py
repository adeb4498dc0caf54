"""Arguments that would say nothing are refused, each in one line, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from outsize.cli.main import main

CASES = {
    "train run.yaml --resume runs/a": "run.yaml is given beside --resume runs/a",
    "train --on-damage previous": "--on-damage goes with --resume; add that, or leave",
    "train --workers 2 --workers 3": "--workers is given more than once",
    "generate m --prompt a --prompt b": "--prompt is given more than once",
    "plan tiny --model mini": "tiny is given beside --model mini",
    "verify tiny --random 3": "tiny is given beside --random 3",
    "verify --random 3 --mesh data=2": "--mesh is given beside --random 3",
    "verify --seed 3": "--seed goes with --random",
}


@pytest.mark.parametrize("words", CASES)
def test_what_would_not_be_used_is_refused(words: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, words.split())
    assert result.exit_code == 2 and result.output.count("\n") == 1, result.output
    assert result.output.startswith(f"error: {CASES[words]}")
    assert list(tmp_path.iterdir()) == []


def test_lists_may_be_said_in_several_options(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = "plan tiny --set train.sequence=1 --set train.steps=0"
    result = CliRunner().invoke(main, words.split())
    assert "train.steps: 0; expected at least 1" in result.output


TOO_LARGE = {
    "plan tiny --set train.steps=1e30": "train.steps: 1e+30; expected",
    "plan tiny --set train.steps=1000000000000000": "train.steps: 1000000000000000; expected",
    "plan tiny --set train.steps=1e15": "train.steps: 1",
    "schedule 1f1b --devices 8 --microbatches 1000000": "microbatches is 1000000 of 8 devices",
    "schedule interleaved --devices 4 --microbatches 9000 --chunks 99": "expected at most 500,000",
    "plan deep": "num_hidden_layers = 1000000000; expected at most 100000",
    "generate deep": "num_hidden_layers = 1000000000; expected at most 100000",
}


@pytest.mark.parametrize("words", TOO_LARGE)
def test_what_is_too_large_is_refused_at_once(words: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep").mkdir()
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 10**9}
    config |= {"num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 257}
    config |= {"rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 64}
    (tmp_path / "deep" / "config.json").write_text(json.dumps(config))
    result = CliRunner().invoke(main, words.split())
    assert result.exit_code == 2 and TOO_LARGE[words] in result.output, result.output
    assert result.output.count("\n") == 1


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
def test_one_chunk_is_right_for_a_schedule_of_one_chunk(name: str) -> None:
    words = ["schedule", name, "--devices", "2", "--microbatches", "4", "--json"]
    plain, said = (CliRunner().invoke(main, [*words, *more]) for more in ([], ["--chunks", "1"]))
    assert plain.exit_code == said.exit_code == 0 and plain.output == said.output
    assert "--chunks" not in CliRunner().invoke(main, [*words, "--chunks", "2"]).stdout
    assert CliRunner().invoke(main, [*words, "--chunks", "2"]).exit_code == 2
