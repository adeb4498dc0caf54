"""`outsize generate --memory`: the same text, the plan on standard error, refusals in one line."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import outsize
from outsize.memory.stored import Operation, StoredFiles
from outsize.models.build import build
from outsize.models.families import parse
from outsize.runtime import session
from outsize.serve import forecast
from outsize.simulate import tokens


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


def test_plan_predicts_what_timing_does(invoke, directory, monkeypatch):
    """Clocks that tick as often as they are asked, or as bytes are read, tell both the same."""
    ticks, now = itertools.count(), [0]
    plain = StoredFiles.read

    def read(self: StoredFiles, wanted: Iterable[Operation], out: torch.Tensor) -> None:
        wanted = list(wanted)
        now[0] += sum(copy.bytes for each in wanted for copy in each.copies)
        plain(self, wanted, out)

    monkeypatch.setattr(StoredFiles, "read", read)
    monkeypatch.setattr(tokens, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    for module in (session, forecast):
        clock = SimpleNamespace(perf_counter=lambda: now[0] / 1000)
        monkeypatch.setattr(module, "time", clock)
    drawn = ("--max-tokens", 5, "--temperature", 0.5, "--top-k", 7)
    words = (directory, *drawn, "--tokenizer", "bytes", "--prompt", "abc" * 40, "--timing")
    for places in ((), ("--memory", "320KiB")):
        timing = invoke("generate", *words, *places).stderr.splitlines()[-1]
        planned = invoke("plan", directory, *drawn, "--prompt-tokens", 121, *places)
        assert planned.stderr == "", planned.stderr
        planned = planned.stdout
        prompt, token, *_, peak = planned.splitlines()[-1].removeprefix("predicted: ").split("; ")
        assert prompt.split()[1] == timing.split("predicted ")[1].split(";")[0] != "0"
        assert token.split()[0] == timing.split("predicted ")[2].split(";")[0] != "0"
        assert peak.removesuffix(" at most") == timing.split("predicted ")[3].split(";")[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--max-tokens", 5), "--max-tokens goes with --prompt-tokens"),
        (("--prompt-tokens", 5, "--set", "train.steps=3"), "--set is given beside --prompt-tokens"),
        (
            ("--prompt-tokens", 5, "--memory", "1KiB", "--mesh", "tensor=2"),
            "the layers at work need",
        ),
        (("--prompt-tokens", 5, "--mesh", "data=2"), "a prompt has nothing to split"),
        (("--prompt-tokens", 5, "--memory", "30KiB"), "the layers at work need"),
    ],
)
def test_what_cannot_be_planned_is_one_line(invoke, directory, words, said):
    refused = invoke("plan", directory, *words)
    assert refused.exit_code == 2 and refused.stdout == ""
    (line,) = refused.stderr.splitlines()
    assert said in line


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
