"""What a request of generation holds, predicted by its program and counted while it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from threads import play

import outsize
from outsize.collectives import World, parse_mesh
from outsize.decode.samplers import Sampling
from outsize.memory.ledger import Ledger
from outsize.models.build import build
from outsize.models.families import parse
from outsize.serve.meshed import on_mesh
from outsize.serve.model import Model

DRAWN = Sampling(0.9, 20, 0.9, seed=3)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "a wide vocabulary": {"vocab_size": 5000},
    "grouped heads, tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "ladder": {"ladder_from": 2},
}


@pytest.fixture(params=MODELS.values(), ids=MODELS)
def path(request: pytest.FixtureRequest, tiny_config: dict[str, Any], tmp_path: Path) -> Path:
    config = {
        **tiny_config, "vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 4,
        "max_position_embeddings": 512, **request.param,
    }  # fmt: skip
    outsize.save(build(parse(config), seed=1, dtype=torch.float32), tmp_path / "hf")
    return tmp_path / "hf"


def counted(model: Model, prompt: int, sampling: Sampling) -> tuple[int, int]:
    """Bytes predicted, and counted."""
    predicted = model.peak(prompt, 6, sampling)
    with Ledger() as ledger:
        for parameter in model.parameters():
            ledger.see(parameter)
        model.generate([7 * i % 61 for i in range(prompt)], 6, sampling)
    return predicted, ledger.peak + (0 if model.home is None else model.home.buffers)


@pytest.mark.parametrize(("prompt", "sampling"), [(3, DRAWN), (200, Sampling())])
def test_in_memory_and_from_files(path: Path, prompt: int, sampling: Sampling) -> None:
    with outsize.load(path) as model:
        within(*counted(model, prompt, sampling))
        whole = model.peak(prompt, 6, sampling)
    with outsize.load(path, memory=int(0.8 * whole)) as model:
        predicted, found = counted(model, prompt, sampling)
        within(predicted, found)
        assert predicted <= 0.8 * whole and model.home is not None
        assert 0 < model.home.buffers <= whole / 16


# With few tokens to choose from: threads that stand for workers see one another's logits.
@pytest.mark.parametrize("path", [{}, MODELS["grouped heads, tied"]], indirect=True)
@pytest.mark.parametrize("mesh", ["pipeline=2", "tensor=2", "pipeline=2,tensor=2"])
def test_on_each_worker_of_a_mesh(path: Path, mesh: str) -> None:
    def work(world: World) -> list[tuple[int, int]]:
        with on_mesh(path, world) as model:
            return [counted(model, prompt, DRAWN) for prompt in (3, 200)]

    for worker in play(parse_mesh(mesh), work):
        for each in worker:
            within(*each)


def within(predicted: int, found: int) -> None:
    assert found <= predicted <= 1.05 * found + 4096, (found, predicted)
