"""What `load` gives is one nn.Module, whatever its memory and its workers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from threads import play
from torch import nn

import outsize
from outsize.collectives import World, parse_mesh
from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.models.families import parse
from outsize.serve.load import on_mesh

IDS = torch.tensor([[5, 17, 2, 44], [9, 30, 8, 1]])


@pytest.fixture
def path(tiny_config: dict[str, Any], tmp_path: Path) -> Path:
    config = {**tiny_config, "vocab_size": 61, "num_hidden_layers": 4, "initializer_range": 0.3}
    outsize.save(build(parse(config), seed=1, dtype=torch.float64), tmp_path / "hf")
    return tmp_path / "hf"


@pytest.mark.parametrize("mesh", ["pipeline=2", "tensor=2"])
def test_logits_on_every_worker_of_a_mesh(path: Path, mesh: str) -> None:
    with torch.no_grad():
        expected = outsize.load(path)(IDS)

    def work(world: World) -> tuple[torch.Tensor, list[int]]:
        with on_mesh(path, world) as model:
            assert isinstance(model, outsize.Model) and isinstance(model, nn.Module)
            return model(IDS), list(model.generate([5, 17], 4))

    for logits, tokens in play(parse_mesh(mesh), work):
        assert torch.allclose(logits, expected, rtol=0, atol=1e-10)
        assert tokens == outsize.generate(outsize.load(path), [5, 17], 4)


def test_one_in_memory_trains_is_copied_and_saved(path: Path, tmp_path: Path) -> None:
    model = outsize.load(path)
    outsize.generate(model, [5, 17], 4)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.epilogue.head.weight.zero_()
    assert not torch.equal(model(IDS), other(IDS)) and model(IDS).requires_grad
    outsize.save(model, tmp_path / "copy")
    assert set(outsize.load(tmp_path / "copy").state_dict()) == set(model.state_dict())


def test_one_from_files_is_not_trained_or_saved(path: Path, tmp_path: Path) -> None:
    with outsize.load(path, memory="1GiB") as model:
        model.generate([5, 17], 4)
        for use in (
            lambda: outsize.save(model, tmp_path / "copy"),
            lambda: outsize.prepare(model, optimizer="adamw"),
            lambda: outsize.merge(model),
        ):
            with pytest.raises(OutsizeError, match="loaded with memory, and its weights are not"):
                use()
