"""What a request of generation holds, predicted by its program and counted while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import WorkerGroup
from request_tasks import DRAWN, counted, counted_in_halves, counted_on_mesh, mesh_of
from subjects import config_of

import outsize
from outsize.collectives import Mesh, parse_mesh
from outsize.decode.generate import Request
from outsize.decode.paged import PAGE
from outsize.decode.samplers import Sampling
from outsize.models.build import build
from outsize.models.families import parse
from outsize.serve.forecast import described, forecast

ONE = Mesh()
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "a wide vocabulary": {"vocab_size": 5000},
    "grouped heads, tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "ladder": {"ladder_from": 1},
}


@pytest.fixture
def path(request: pytest.FixtureRequest, tiny_config: dict[str, Any], tmp_path: Path) -> Path:
    config = {
        **tiny_config, "vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 4,
        "max_position_embeddings": 512, **MODELS[request.param],
    }  # fmt: skip
    outsize.save(build(parse(config), seed=1, dtype=torch.float32), tmp_path / "hf")
    return tmp_path / "hf"


@pytest.mark.parametrize(
    ("path", "prompt", "sampling"),
    [
        ("llama", 3, DRAWN), ("a wide vocabulary", 200, Sampling()),
        ("grouped heads, tied", 3, Sampling()), ("ladder", 200, DRAWN),
    ],
    indirect=["path"],
)  # fmt: skip
def test_in_memory_and_from_files(path: Path, prompt: int, sampling: Sampling) -> None:
    request = Request((0,) * prompt, 6, sampling)
    with outsize.load(path) as model:
        within(*counted(model, prompt, sampling))
        whole = model.peak(prompt, 6, sampling)
    assert [whole] == planned(path, request)
    with outsize.load(path, memory=int(0.8 * whole)) as model:
        predicted, found = counted(model, prompt, sampling)
        within(predicted, found)
        assert predicted <= 0.8 * whole and model.home is not None
        assert 0 < model.home.buffers <= whole / 16
    assert [predicted] == planned(path, request, memory=int(0.8 * whole))


def test_latents_are_cached_and_not_what_comes_of_them(tmp_path: Path) -> None:
    """Of a rank of 10 and 6 rotary numbers, where each of four heads has 14 a key and 6 a value;
    the last token drawn is not fed again."""
    config = config_of("deepseek_v3", vocab_size=61)
    outsize.save(build(config, seed=1, dtype=torch.float32), tmp_path / "hf")
    request, tokens = Request((0,) * 100, 6, DRAWN), -(-(100 + 6 - 1) // PAGE) * PAGE
    held = forecast(described(str(tmp_path / "hf")), request, ONE).held
    assert held["cache"] == [len(config.layers) * (10 + 6) * tokens * 4]
    with outsize.load(tmp_path / "hf") as model:
        predicted, found = counted(model, 100, DRAWN)
    within(predicted, found)
    assert held["peak"] == [predicted]


@pytest.fixture(scope="module")
def crew(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerGroup]:
    store = tmp_path_factory.mktemp("crew") / "store"
    crew = WorkerGroup.of(parse_mesh(request.param), str(store))
    yield crew
    crew.end()


@pytest.mark.parametrize(
    ("crew", "path"),
    [
        ("pipeline=2", "llama"), ("tensor=2", "grouped heads, tied"),
        ("pipeline=2,tensor=2", "a wide vocabulary"), ("pipeline=2,tensor=2", "ladder"),
    ],
    indirect=True,
)  # fmt: skip
def test_on_each_worker_of_a_mesh(path: Path, crew: WorkerGroup) -> None:
    """In processes: threads that stand for workers make their sums under one of them."""
    for predicted, found in crew.run(counted_in_halves, path):
        within(predicted, found)
    mesh, workers = crew.run(mesh_of)[0], crew.run(counted_on_mesh, path)
    expected = [planned(path, Request((0,) * n, 6, DRAWN), mesh) for n in (3, 200)]
    for rank, worker in enumerate(workers):
        for (predicted, found), stages in zip(worker, expected, strict=True):
            within(predicted, found)
            most = stages[mesh.index("pipeline", rank)]  # of the first, who draws
            assert predicted <= most
            assert predicted == most or mesh.index("tensor", rank)


def planned(path: Path, request: Request, mesh: Mesh = ONE, memory: int | None = None) -> list[int]:
    """Peaks by stage as `outsize plan` has them, of the directory as of its config alone."""
    known, alone = described(str(path)), path / "config"
    alone.mkdir(exist_ok=True)
    (alone / "config.json").write_bytes((path / "config.json").read_bytes())
    found = [forecast(each, request, mesh, memory) for each in (known, described(str(alone)))]
    assert found[0].held == found[1].held and found[0].read == found[1].read
    return found[0].held["peak"]


def within(predicted: int, found: int) -> None:
    assert found <= predicted <= 1.05 * found + 4096, (found, predicted)
