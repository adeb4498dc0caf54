"""`outsize verify DIR --generate`: each way to hold a model's weights, and faults that one run of
generation, and nothing in training, meets."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

import outsize
from outsize.cli.main import main
from outsize.decode import samplers
from outsize.decode.paged import PagedPast
from outsize.errors import OutsizeError
from outsize.kernels import native
from outsize.models.build import build
from outsize.models.families import parse
from outsize.verify import handed

LLAMA = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "initializer_range": 0.3, "tie_word_embeddings": True, "max_position_embeddings": 64,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4,
    "n_positions": 40, "initializer_range": 0.3,
}  # fmt: skip
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": 5, "tie_word_embeddings": False}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
CASES = {
    "in memory": (MISTRAL, "float32", ()),
    "in files": (MIXTRAL, "float32", ("--memory", "8MiB")),
    "on a mesh, learned positions": (GPT2, "bfloat16", ("--mesh", "pipeline=2,tensor=2")),
    "rewired, in files on a mesh": (
        LLAMA | {"ladder_from": 0}, "bfloat16", ("--mesh", "tensor=2", "--memory", "8MiB"),
    ),
    "prompts in halves": (MISTRAL, "float64", ("--mesh", "tensor=2", "--overlap", "2")),
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    """A directory of a model of a config, in a dtype."""

    def saved(config, dtype):
        found = build(parse(config), seed=1, dtype=getattr(torch, dtype))
        outsize.save(found, tmp_path / "hf")
        return tmp_path / "hf"

    return saved


def judged(directory, *words):
    """The exit code, and the verdict."""
    words = ("verify", str(directory), "--generate", "5", *words, "--json")
    result = CliRunner().invoke(main, words)
    if not isinstance(result.exception, SystemExit | None):
        raise result.exception
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_their_probabilities_are_the_plain_loops(model, name):
    config, dtype, words = CASES[name]
    code, found = judged(model(config, dtype), *words)
    assert code == 0 and found["holds"], found
    assert [row["drawn"] for row in found["rows"]] == ["greedy", "drawn", "greedy"]
    assert all(0 < row["logprob"] < 1e-13 for row in found["rows"])
    assert (found["bounds"] is None) == (dtype == "float64")
    assert (found["handed"]["left"] == "") == ("ladder_from" not in config)


def test_it_is_said_in_words(model):
    directory = model(MISTRAL, "float32")
    shown = CliRunner().invoke(main, ["verify", str(directory), "--generate", "5"])
    assert shown.exit_code == 0
    for said in ("float64: holds", "float32: holds", "transformers: has the same logits"):
        assert said in shown.output


def test_a_position_that_is_one_off_in_the_cache(model, monkeypatch):
    plain = PagedPast.positions
    monkeypatch.setattr(
        PagedPast,
        "positions",
        lambda past, device: plain(past, device) + (plain(past, device) > 2),
    )
    code, found = judged(model(MISTRAL, "float64"))
    assert code == 1 and max(row["logprob"] for row in found["rows"]) > 1e-3


def test_tokens_that_are_drawn_with_anothers_number(model, monkeypatch):
    """Probabilities are right, and so are greedy tokens."""
    plain = samplers.drawn
    monkeypatch.setattr(
        "outsize.runtime.handlers.sample.drawn",
        lambda logits_V, sampler, index, scored: plain(logits_V, sampler, index + 1, scored),
    )
    code, found = judged(model(MISTRAL, "float64"))
    greedy, drawn, _ = found["rows"]
    assert code == 1 and greedy["differs"] is None and drawn["differs"] is not None
    assert drawn["logprob"] < 1e-13


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_worker_that_goes_its_own_way(model, monkeypatch, dtype):
    """In float64, or in the dtype of the files alone."""
    from outsize.serve.model import Model

    plain = Model.scored

    def scored(self, request):
        found = plain(self, request)
        own = str(self.prologue.tokens.weight.dtype) == f"torch.{dtype}"
        if self.home.world.rank == 1 and own:
            found.tokens[-1] += 1
        return found

    monkeypatch.setattr(Model, "scored", scored)
    code, found = judged(model(MISTRAL, dtype), "--mesh", "tensor=2")
    assert (
        code == 1
        and found["differ"] == [1]
        and all(row["differs"] is None for row in found["rows"])
    )


def test_what_is_wrong_below_float64_alone(model, monkeypatch):
    if native.library() is None:
        pytest.skip("no compiler here")
    from outsize.models.norm import Norm

    plain = Norm.forward

    def forward(self, x):
        y = plain(self, x)
        return y if x.dtype == torch.float64 else y * 1.001

    monkeypatch.setattr(Norm, "forward", forward)
    code, found = judged(model(MISTRAL, "float32"))
    assert code == 1 and all(row["logprob"] < 1e-13 for row in found["rows"])
    assert found["over"]


def test_what_other_programs_have_of_a_directory(model, monkeypatch):
    directory = model(MISTRAL, "float32")
    path = directory / "config.json"
    said = path.read_text()
    path.write_text(said.replace('"float32"', '"bfloat16"'))
    code, found = judged(directory)
    assert code == 1 and found["handed"]["said"] == "bfloat16" != found["handed"]["stored"]
    path.write_text(said)
    plain = handed.logits_of
    monkeypatch.setattr(handed, "logits_of", lambda *given: plain(*given) * 1.001)
    code, found = judged(directory)
    assert code == 1 and found["handed"]["logits"] == pytest.approx(1e-3, rel=0.01)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--generate", "35"), "learned 40 positions; expected at most 34"),
        (("--generate", "4", "--zero", "1"), "--zero"),
        (("--memory", "8MiB"), "--memory"),
        (("--generate", "4", "--overlap", "2"), "overlap"),
    ],
)
def test_what_is_refused(model, words, said):
    result = CliRunner().invoke(main, ["verify", str(model(GPT2, "float32")), *words])
    assert isinstance(result.exception, OutsizeError) or result.exit_code == 2
    assert said in str(result.exception) + result.output


def test_no_directory_is_refused():
    result = CliRunner().invoke(main, ["verify", "--generate", "4"])
    assert "no directory" in str(result.exception) + result.output
