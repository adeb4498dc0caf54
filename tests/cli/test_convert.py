"""`outsize convert`: the files of a model wired otherwise, and training it on."""

from __future__ import annotations

import pytest
import torch

import outsize
from outsize.models.build import build
from outsize.models.families import parse
from outsize.techniques.wirings.kraken_ways import krakened
from outsize.techniques.wirings.ladder_from import laddered


@pytest.fixture
def directory(tmp_path, tiny_config):
    model = build(parse({**tiny_config, "vocab_size": 264}), seed=0, dtype=torch.float64)
    outsize.save(model, tmp_path / "hf", max_shard_bytes=20_000)
    return tmp_path / "hf"


def test_a_ladder_has_the_weights_as_they_lie(invoke, directory, tmp_path):
    said = invoke("convert", directory, "--ladder", 0, "--into", tmp_path / "wired")
    assert said.exit_code == 0, said.stderr
    assert "ladder_from is 0; train it on: outsize train --set model.name=" in said.stdout
    plain, wired = outsize.load(directory), outsize.load(tmp_path / "wired")
    assert wired.config == laddered(plain.config, 0)
    for mine, theirs in zip(wired.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    expected = build(laddered(plain.config, 0), seed=1, dtype=torch.float64)
    expected.load_state_dict(plain.state_dict())
    ids = torch.arange(12)
    assert torch.equal(wired(ids), expected(ids)) and not torch.equal(wired(ids), plain(ids))


def test_a_kraken_has_norms_of_its_ways_and_a_conjunction(invoke, directory, tmp_path):
    (directory / "tokenizer.json").write_text("{}")
    said = invoke("convert", directory, "--kraken", 2, "--into", tmp_path / "wired")
    assert said.exit_code == 0, said.stderr
    assert (tmp_path / "wired" / "tokenizer.json").read_text() == "{}"
    plain, wired = outsize.load(directory), outsize.load(tmp_path / "wired")
    assert wired.config == krakened(plain.config, 2)
    theirs, size = dict(plain.named_parameters()), plain.config.hidden
    for name, mine in wired.named_parameters():
        if "conjunction" in name:
            expected = torch.cat([torch.eye(size)] * 2, dim=1).double() / 2
        elif "_norm" in name:
            expected = torch.cat([theirs[name]] * 2)
        else:
            expected = theirs[name] * (2 if name.endswith(("o.weight", "down.weight")) else 1)
        assert torch.equal(mine, expected), name


def test_a_converted_model_is_trained_on_by_the_command_that_is_named(invoke, directory, tmp_path):
    into = tmp_path / "wired"
    assert invoke("convert", directory, "--ladder", 1, "--into", into).exit_code == 0
    sets = {"model.name": into, "train.steps": 2, "train.sequence": 16}
    sets |= {"train.batch_tokens": 32, "output": tmp_path / "run", "data.path": __file__}
    words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    trained = invoke("train", *words)
    assert trained.exit_code == 0, trained.stderr
    made, before = (outsize.load(one) for one in (tmp_path / "run", into))
    assert made.config.wiring == laddered(outsize.load(directory).config, 1).wiring
    assert not torch.equal(made.epilogue.head.weight, before.epilogue.head.weight)


REFUSED = {
    "none": ((), "give one of --ladder LAYER and --kraken WAYS"),
    "both": (("--ladder", 0, "--kraken", 2), "give one of --ladder LAYER and --kraken WAYS"),
    "layers": (("--ladder", 9), "ladder_from is 9; expected 0 to 1, a layer"),
    "ways": (("--kraken", 3), "expected a divisor of the 4 heads"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_one_line_and_nothing_is_written(invoke, directory, tmp_path, case):
    words, said = case
    refused = invoke("convert", directory, *words, "--into", tmp_path / "wired")
    assert refused.exit_code == 2 and not (tmp_path / "wired").exists()
    (line,) = refused.stderr.splitlines()
    assert said in line
    assert invoke("convert", directory, "--ladder", 0, "--into", tmp_path / "one").exit_code == 0
    again = invoke("convert", tmp_path / "one", "--ladder", 1, "--into", tmp_path / "two")
    assert "ladder_from is 0 already; convert a plain model" in again.stderr
