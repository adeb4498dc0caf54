"""What workers say inside layers: the forecast, and the run's own metric, forget none of it."""

from __future__ import annotations

import json

import pytest
import torch

import outsize
from outsize.models.build import build
from outsize.models.families import parse
from outsize.train.metrics import read_metrics

WIRED = {"ladder": {"ladder_from": 0}, "kraken": {"kraken_ways": 2}}
WORDS = {
    "ladder": ("tensor=2", 0),
    "kraken": ("tensor=2", 2),
    "tensor, beside the products": ("tensor=2", 4),
    "context, tensor beside the products": ("context=2,tensor=2", 4),
}


@pytest.mark.parametrize("name", WORDS)
def test_bytes_are_those_predicted(name: str, home, invoke, tiny_config) -> None:
    mesh, overlap = WORDS[name]
    keys = (f"plan.overlap={overlap}", "train.steps=2", "sample.tokens=0")
    words = ("run.yaml", "--mesh", mesh, *(word for key in keys for word in ("--set", key)))
    if name in WIRED:
        config = {**tiny_config, "vocab_size": 264, "num_hidden_layers": 3, **WIRED[name]}
        outsize.save(build(parse(config), seed=1, dtype=torch.float32), home / "hf")
        words = (*words, "--set", f"model.name={home / 'hf'}")
    shown = invoke("plan", *words, "--json")
    assert shown.exit_code == 0, shown.stderr
    parts = json.loads(shown.stdout)["received"]
    if name.startswith("tensor"):
        # Of two workers each has T x D numbers of a sum from the other: four sums a block, that of
        # the embedding and that of the gradient of the head's input.
        made = json.loads(shown.stdout)["chosen"]
        rows = next((int(n.split()[1]) for n in made if n.startswith("blocks_by_rows ")), 0)
        sums = 4 * (2 - rows) + 2
        assert parts["tensor"]["this_machine"] >= sums * 256 * 64 * 4
        return  # such a run: with a context axis, too
    trained = invoke("train", *words)
    assert trained.exit_code == 0, trained.stderr
    steps = [r for r in read_metrics(home / "run") if "loss" in r]
    assert len(steps) == 2  # the first, and one of those behind it
    for step in steps:
        assert step["workers_bytes_read"] == sum(part["this_machine"] for part in parts.values())


@pytest.mark.parametrize("key", ["plan.overlap=2", "plan.sequence_parallel=true"])
def test_what_is_of_the_tensor_axis_is_refused_without_it(key: str, home, invoke) -> None:
    shown = invoke("train", "run.yaml", "--mesh", "data=2", "--set", key)
    name = key.partition("=")[0]
    assert shown.exit_code != 0
    assert shown.stderr.count("\n") == 1 and f"error: {name} is" in shown.stderr
    assert "mesh.tensor is 1" in shown.stderr
