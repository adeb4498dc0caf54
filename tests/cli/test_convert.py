"""`outsize convert`: the files of a model wired otherwise or pruned, and training it on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from subjects import CONFIGS, config_of
from verifying import fill

import outsize
from outsize.memory import Ledger, format_bytes
from outsize.models.build import build
from outsize.models.families import parse
from outsize.techniques.wirings.kraken_ways import krakened
from outsize.techniques.wirings.ladder_from import laddered

DEEP = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 12}


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


def twin(x, how):
    """x (..., d_in), float64, each matrix pruned: of a stable order of magnitudes the first go."""
    stay, colon, of = how.partition(":")
    out = []
    for matrix in x.reshape(-1, *x.shape[-2:]):
        rows = matrix.reshape(-1, int(of)) if colon else matrix.reshape(1, -1)
        gone = int(of) - int(stay) if colon else round(float(how) * rows.shape[1])
        rows = rows.copy()
        for row in rows:
            row[np.argsort(np.abs(row), kind="stable")[:gone]] = 0
        out.append(rows.reshape(matrix.shape))
    return np.stack(out).reshape(x.shape)


@pytest.mark.parametrize(
    ("family", "how", "dtype"),
    [("llama", "0.37", "float64"), ("gpt2", "1:4", "float32"), ("mixtral", "0.5", "bfloat16")],
)
def test_pruned_are_the_smallest_of_each_matrix_of_the_blocks(invoke, tmp_path, family, how, dtype):
    """Weights of few values: where magnitudes are equal, those that come first go."""
    model = build(config_of(family), seed=0, dtype=getattr(torch, dtype))
    with torch.no_grad():
        for name, p in model.named_parameters():
            fill(name, p)
            p.copy_((p * 16).round() / 16)
    outsize.save(model, tmp_path / "hf", max_shard_bytes=9_000)
    said = invoke("convert", tmp_path / "hf", "--prune", how, "--into", tmp_path / "new")
    assert said.exit_code == 0, said.stderr
    zeros = weights = 0
    for name, found in outsize.load(tmp_path / "new").named_parameters():
        before = model.get_parameter(name)
        assert found.dtype == before.dtype
        values = before.detach().double().numpy()
        if name.startswith("blocks.") and before.dim() > 1 and "router" not in name:
            values = twin(values, how)
            zeros, weights = zeros + np.sum(values == 0), weights + values.size
        assert np.array_equal(found.detach().double().numpy(), values), name
    assert f"{zeros:,} of {weights:,} weights of the blocks' matrices are zero" in said.stdout
    assert zeros >= 0.36 * weights


def test_codes_are_those_of_a_model_in_memory_and_made_of_one_tensor_at_a_time(invoke, tmp_path):
    plain = tmp_path / "plain"
    config = parse({**CONFIGS["llama"], **DEEP})
    outsize.save(build(config, seed=3, dtype=torch.bfloat16), plain)
    outsize.save(outsize.load(plain, weights="nf4:16"), tmp_path / "whole")
    with Ledger() as ledger:
        said = invoke("convert", plain, "--weights", "nf4:16", "--into", tmp_path / "codes")
    made = {path.name: path.read_bytes() for path in (tmp_path / "codes").iterdir()}
    assert made == {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    size = sum(p.nbytes for p in outsize.load(tmp_path / "codes").parameters())
    assert said.stdout.strip().endswith(f"nf4:16, {format_bytes(size)}")
    assert ledger.peak < size / 2


def test_codes_and_adapters_are_not_pruned(invoke, directory, tmp_path):
    coded = invoke("convert", directory, "--weights", "int4:16", "--into", tmp_path / "codes")
    assert coded.exit_code == 0, coded.stderr
    outsize.save(outsize.adapt(outsize.load(directory), "lora", rank=2), tmp_path / "adapter")
    for name, words in (("codes", "holds int4"), ("adapter", "holds an adapter")):
        refused = invoke("convert", tmp_path / name, "--prune", 0.5, "--into", tmp_path / "new")
        assert refused.exit_code == 2 and words in refused.stderr
        assert not (tmp_path / "new").exists()


REFUSED = {
    "none": ((), "give one of --ladder LAYER, --kraken WAYS, --factored RATIO, --weights FORMAT"),
    "both": (("--ladder", 0, "--prune", 0.5), "give one of --ladder LAYER, --kraken WAYS"),
    "layers": (("--ladder", 9), "ladder_from is 9; expected 0 to 1, a layer"),
    "ways": (("--kraken", 3), "expected a divisor of the 4 heads"),
    "all": (("--prune", "1.0"), "--prune 1.0: expected a share of each matrix above 0 and below 1"),
    "share": (("--prune", "half"), "--prune half: expected a share"),
    "of": (("--prune", "4:4"), "--prune 4:4: expected a share"),
    "groups": (("--prune", "2:5"), "groups of 5 do not divide the 32 inputs of blocks."),
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
