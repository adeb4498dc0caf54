"""`outsize generate --memory`: the same text, the plan on standard error, refusals in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import outsize
from outsize.models.build import build
from outsize.models.families import parse


@pytest.fixture
def directory(tmp_path: Path, tiny_config: dict[str, Any]) -> Path:
    lively = {**tiny_config, "vocab_size": 264, "num_hidden_layers": 6, "initializer_range": 0.3}
    outsize.save(build(parse(lively), seed=0, dtype=torch.float32), tmp_path / "hf")
    return tmp_path / "hf"


def test_the_text_is_the_same_and_the_plan_is_said(invoke, directory):
    words = ("generate", directory, "--prompt", "ab", "--max-tokens", 12, "--tokenizer", "bytes")
    plain = invoke(*words)
    streamed = invoke(*words, "--memory", "160KiB")
    assert plain.exit_code == streamed.exit_code == 0
    assert streamed.stdout == plain.stdout and plain.stdout.startswith("ab")
    (line,) = streamed.stderr.splitlines()
    assert "of 7 parts stay in a pool of" in line and "s a token" in line
    assert plain.stderr == ""


def test_timing_says_predicted_and_measured(invoke, directory):
    words = ("generate", directory, "--max-tokens", 5, "--tokenizer", "bytes", "--timing")
    (resident,) = invoke(*words).stderr.splitlines()
    _, timing = invoke(*words, "--memory", "160KiB").stderr.splitlines()
    assert "s a token, predicted" in resident and " at most, predicted " in resident
    assert "s a token, predicted" in timing and "in each of 5 steps" in timing
    (said,) = (each.split(" at most, predicted ") for each in timing.split("; ") if "most" in each)
    found, predicted = (float(each.removesuffix(" KiB")) for each in said)
    assert found <= predicted <= min(160, 1.05 * found + 4)


def test_a_budget_that_is_too_small_is_one_line(invoke, directory):
    words = ("generate", directory, "--max-tokens", 5, "--tokenizer", "bytes")
    refused = invoke(*words, "--memory", "30KiB")
    assert refused.exit_code == 2 and refused.stdout == ""
    (line,) = refused.stderr.splitlines()
    assert "bytes missing; the layers at work need" in line
    least = line.split(": give ")[1].split(" bytes")[0].replace(",", "")
    assert invoke(*words, "--memory", least).exit_code == 0
    assert invoke(*words, "--memory", int(least) - 1).exit_code == 2


@pytest.mark.parametrize("option", [("--sparse",), ("--disk", ".")])
def test_options_that_need_memory_say_so(invoke, directory, option):
    refused = invoke("generate", directory, "--tokenizer", "bytes", *option)
    assert refused.exit_code == 2 and "go with --memory" in refused.stderr


def test_a_truncated_file_is_one_line(invoke, directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused = invoke("generate", directory, "--tokenizer", "bytes", "--memory", "1GiB")
    assert refused.exit_code == 2 and "Traceback" not in refused.stderr
    assert f"{file} is truncated in tensor " in refused.stderr
    assert json.loads((directory / "config.json").read_text())["model_type"] == "llama"
