"""A model on the workers of a mesh against the same files on one: tokens, and whose bytes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import watched
from threads import play
from torch import Tensor
from torchrun import free_port

import outsize
from outsize.checkpoint import adapters, hub
from outsize.collectives import Mesh, World, parse_mesh
from outsize.errors import OutsizeError
from outsize.models.build import build, segments
from outsize.models.families import parse
from outsize.serve.load import on_mesh
from outsize.serve.meshed import turns_of

PROMPT = [5, 17, 2, 44, 9, 30, 8]
DRAWN: dict[str, Any] = {"temperature": 0.9, "top_k": 20, "seed": 3}
GPT2 = {
    "model_type": "gpt2", "vocab_size": 61, "n_embd": 32, "n_layer": 4, "n_head": 4,
    "n_positions": 64, "initializer_range": 0.3,
}  # fmt: skip


@pytest.fixture
def config(tiny_config: dict[str, Any]) -> dict[str, Any]:
    return {
        **tiny_config, "vocab_size": 61, "num_hidden_layers": 4, "initializer_range": 0.3
    }  # fmt: skip


def saved(config: dict[str, Any], path: Path, dtype: torch.dtype = torch.float64) -> Path:
    outsize.save(build(parse(config), seed=1, dtype=dtype), path / "hf", max_shard_bytes=20_000)
    return path / "hf"


def owned(x: Tensor) -> int:
    """Bytes of memory that a parameter has."""
    return x.untyped_storage().nbytes()


MESHES = ["pipeline=6", "tensor=2", "pipeline=2,tensor=2"]
MODELS = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "ladder": {"ladder_from": 1},
    "fused, transposed, tied, learned positions": GPT2,
}


PAIRS = [
    (MESHES[0], "llama"),
    *((MESHES[1], name) for name in ("llama", [*MODELS][-1])),
    *((MESHES[2], name) for name in ("tied", "ladder")),
]


@pytest.mark.parametrize(("mesh", "name"), PAIRS)
def test_the_tokens_are_those_of_one_worker(
    mesh: str,
    name: str,
    config: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And of a prompt's tokens the last alone goes through the head."""
    facts = MODELS[name]
    path = saved(facts if "model_type" in facts else {**config, **facts}, tmp_path)
    alone, heads = outsize.load(path), watched(monkeypatch)
    expected = [outsize.generate(alone, PROMPT, 10, **kind) for kind in ({}, DRAWN)]
    assert len(set(expected[1])) > 4

    def work(world: World) -> tuple[list[Any], int, int]:
        with on_mesh(path, world) as model:
            found = [outsize.generate(model, PROMPT, 10, **kind) for kind in ({}, DRAWN)]
            here = {id(p): p for p in model.parameters() if owned(p) > p.itemsize}
            turn = world.mesh.index("pipeline", world.rank)
            return found, sum(map(owned, here.values())), model.home.division.weights[turn]

    workers = play(outsize.collectives.parse_mesh(mesh), work)
    total = sum(map(owned, alone.parameters()))
    for found, bytes_here, predicted in workers:
        assert found == expected and set(heads) == {1}
        assert bytes_here == pytest.approx(predicted, rel=0.02)  # 61 rows do not halve
        if "pipeline=6" not in mesh and not alone.config.tied:
            assert bytes_here < 1.05 * total / len(workers)


def test_workers_of_torchrun_load_and_generate(config: dict[str, Any], tmp_path: Path) -> None:
    path = saved(config, tmp_path)
    port, pids = free_port(), []
    for rank in range(2):
        pids.append(os.fork())
        if pids[-1] == 0:
            place = {"RANK": str(rank), "WORLD_SIZE": "2"}
            os.environ |= place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            try:
                with outsize.load(path, mesh="pipeline=2") as model:
                    new = [outsize.generate(model, PROMPT, count) for count in (6, 3)]
                (tmp_path / f"{rank}.json").write_text(json.dumps(new))
            finally:
                os._exit(0)
    for pid in pids:
        os.waitpid(pid, 0)
    alone = outsize.load(path, mesh=Mesh())
    expected = [outsize.generate(alone, PROMPT, count) for count in (6, 3)]
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)] == [
        expected
    ] * 2
    with pytest.raises(OutsizeError, match="RANK is ''; expected a number, as torchrun sets it"):
        outsize.load(path, mesh="tensor=2")


REFUSED_BESIDE = {
    "weights": ({"weights": "random"}, "weights = 'random' with mesh; expected 'required'"),
    "disk": ({"disk": "."}, "disk and sparse go with memory; pass memory="),
}


@pytest.mark.parametrize("case", REFUSED_BESIDE.values(), ids=REFUSED_BESIDE)
def test_what_does_not_go_with_a_mesh_is_refused(
    case: tuple[dict[str, str], str], config: dict[str, Any], tmp_path: Path
) -> None:
    other, said = case
    with pytest.raises(OutsizeError, match=said):
        outsize.load(saved(config, tmp_path), mesh="pipeline=2", **other)


def test_parts_of_other_workers_have_no_numbers(config: dict[str, Any], tmp_path: Path) -> None:
    path = saved(config, tmp_path)
    whole = dict(hub.load(path).named_parameters())

    def work(world: World) -> list[str]:
        model = on_mesh(path, world)
        mine = []
        for name, x in model.named_parameters():
            if owned(x) > x.itemsize:
                assert torch.equal(x, whole[name])
                mine.append(name)
            else:
                assert x.shape == whole[name].shape and x.dtype == torch.float64
                assert x.isnan().all()
        return mine

    first, second = play(Mesh(pipeline=2), work)
    table = segments(hub.load(path))
    assert first == [name for _, names in table[:3] for name in names]
    assert second == [name for _, names in table[3:] for name in names]


def test_stages_are_cut_by_bytes() -> None:
    """A wide vocabulary counts: least largest sums, found by hand."""
    assert turns_of([4, 2, 2, 2, 4], 2) in ([0, 0, 0, 1, 1], [0, 0, 1, 1, 1])
    assert turns_of([12, 2, 2, 2, 2, 12], 3) == [0, 1, 1, 1, 1, 2]
    assert turns_of([1, 5, 5, 5, 5, 9], 3) == [0, 0, 0, 1, 1, 2]
    assert turns_of([1, 1, 1], 3) == [0, 1, 2] and turns_of([1, 1, 1], 1) == [0, 0, 0]


def test_another_dtype_and_what_is_said(config: dict[str, Any], tmp_path: Path) -> None:
    path = saved(config, tmp_path)
    alone = outsize.generate(outsize.load(path, torch.float32), PROMPT, 5)

    def work(world: World) -> tuple[Any, str]:
        with on_mesh(path, world, torch.float32) as model:
            said: list[str] = []
            return model.generate(PROMPT, 5, on_ready=said.append), said[0]

    (found, said), _ = play(Mesh(pipeline=2), work)
    assert found == alone
    weights, peaks = said.split(", predicted ")
    assert weights == (
        "weights 160.38 KiB on pipeline=2; a worker of each stage holds 80.12 KiB, 80.25 KiB of"
        " weights"
    )
    peaks, seconds = peaks.split(" at most, ")
    assert peaks.count("KiB") == 2
    assert seconds.endswith(" s a token") and float(seconds.split()[0]) > 0


@pytest.mark.parametrize("mesh", [Mesh(pipeline=2), Mesh(tensor=2)])
def test_a_head_that_is_not_the_embedding_is_refused(
    mesh: Mesh, config: dict[str, Any], tmp_path: Path
) -> None:
    path = saved(config, tmp_path)
    told = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**told, "tie_word_embeddings": True}))
    with pytest.raises(OutsizeError, match=r"'lm_head.weight' is not the token embedding"):
        play(mesh, lambda world: on_mesh(path, world))


REFUSED = {
    "context": (
        Mesh(context=2),
        "mesh: context is 2, but a prompt has nothing to split over that axis; expected pipeline"
        " and tensor, for instance pipeline=2",
    ),
    "data": (
        Mesh(data=2, pipeline=2),
        "mesh: data is 2, but a prompt has nothing to split over that axis; expected pipeline and"
        " tensor, for instance pipeline=2",
    ),
    "too many stages": (
        Mesh(pipeline=7),
        "mesh: pipeline is 7, but the model has 6 segments (prologue, 4 blocks, epilogue) and a"
        " worker needs one at least; the nearest that works is pipeline=6",
    ),
    "heads": (Mesh(tensor=3), "do not divide evenly over 3 workers; the nearest that works is"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_a_mesh_that_cannot_be_is_one_line(
    case: tuple[Mesh, str], config: dict[str, Any], tmp_path: Path
) -> None:
    path, (mesh, expected) = saved(config, tmp_path), case
    with pytest.raises(OutsizeError) as refused:
        play(mesh, lambda world: on_mesh(path, world))
    assert expected in str(refused.value) and "\n" not in str(refused.value)


def test_adapters_are_taken_up_by_each_workers_part(config: dict[str, Any], tmp_path: Path) -> None:
    """To 1e-10 of a plain decoder that has taken them up, in float64."""
    facts = {"tie_word_embeddings": True, "num_hidden_layers": 2}
    path, named = saved({**config, **facts}, tmp_path), list[tuple[Path, float]]()
    for seed, weight in ((1, 1.0), (2, -0.5)):
        made = outsize.adapt(outsize.load(path), "lora", rank=2)
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, x in made.named_parameters():
                if ".beside." in name:
                    x.copy_(0.3 * torch.randn(x.shape, dtype=x.dtype, generator=draw))
        outsize.save(made, tmp_path / f"adapter{seed}", adapter_only=True)
        named.append((tmp_path / f"adapter{seed}", weight))
    alone, bare = adapters.load(path, adapters=named), outsize.load(path)
    ids = torch.tensor(PROMPT)
    right = alone(ids)

    def work(world: World) -> tuple[list[int], Tensor]:
        with on_mesh(path, world, adapters=named) as model:
            return model.generate(PROMPT, 4), model(ids)

    assert not torch.allclose(right, bare(ids), atol=1e-2)
    for tokens, logits in play(parse_mesh("pipeline=2,tensor=2"), work):
        torch.testing.assert_close(logits, right, rtol=1e-10, atol=1e-10)
        assert tokens == outsize.generate(alone, PROMPT, 4)
