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


@pytest.mark.parametrize(
    ("option", "key", "value", "wire"),
    [("--ladder", "ladder_from", 0, laddered), ("--kraken", "kraken_ways", 2, krakened)],
)
def test_the_weights_are_the_same_and_the_maths_is_the_wiring(
    invoke, directory, tmp_path, option, key, value, wire
):
    said = invoke("convert", directory, option, value, "--into", tmp_path / "wired")
    assert said.exit_code == 0, said.stderr
    assert f"{key} is {value}; train it on: outsize train --set model.name=" in said.stdout
    plain, wired = outsize.load(directory), outsize.load(tmp_path / "wired")
    assert wired.config == wire(plain.config, value)
    for mine, theirs in zip(wired.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    expected = build(wire(plain.config, value), seed=1, dtype=torch.float64)
    expected.load_state_dict(plain.state_dict())
    ids = torch.arange(12)
    assert torch.equal(wired(ids), expected(ids)) and not torch.equal(wired(ids), plain(ids))


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
