"""A model in files on the workers of a mesh, each within a budget, against the model in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from heads import watched
from threads import play

import outsize
from outsize.checkpoint.hub import describe
from outsize.collectives import World, parse_mesh
from outsize.decode.generate import GREEDY, Request, generate
from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.models.families import parse
from outsize.schedule import Kind
from outsize.schedule.residency import moved
from outsize.serve.files import InFiles, Limits
from outsize.serve.forecast import described, forecast
from outsize.serve.load import on_mesh

PROMPT, NEW = [5, 17, 2, 44, 9, 30, 8], 4
GPT2 = {
    "model_type": "gpt2", "vocab_size": 61, "n_embd": 32, "n_layer": 3, "n_head": 4,
    "n_positions": 64, "initializer_range": 0.3,
}  # fmt: skip
REQUEST = Request(tuple(PROMPT), NEW, GREEDY)
CASES = {
    "tied": ("tensor=2", {"tie_word_embeddings": True}),
    "ladder": ("pipeline=2,tensor=2", {"ladder_from": 1, "num_hidden_layers": 2}),
    "fused, transposed, tied, learned positions": ("pipeline=2", GPT2),
}


@pytest.fixture
def config(tiny_config: dict[str, Any]) -> dict[str, Any]:
    return {
        **tiny_config, "vocab_size": 61, "num_hidden_layers": 3, "initializer_range": 0.3
    }  # fmt: skip


def saved(config: dict[str, Any], path: Path) -> Path:
    model = build(parse(config), seed=1, dtype=torch.float64)
    outsize.save(model, path / "hf", max_shard_bytes=20_000)
    return path / "hf"


class Seen:
    """The likeliest token; keeps the log-probabilities."""

    def __init__(self) -> None:
        self.logprobs = list[torch.Tensor]()

    def __call__(self, logits_V: torch.Tensor, index: int) -> int:
        self.logprobs.append(logits_V.log_softmax(-1))
        return int(logits_V.argmax())


def least(path: Path, mesh: str, new: int = NEW) -> int:
    """The smallest budget that serves the request on every worker, as a refusal says."""
    with pytest.raises(OutsizeError) as refused:
        forecast(describe(path), Request(tuple(PROMPT), new, GREEDY), parse_mesh(mesh), 1)
    return int(str(refused.value).split(": give ")[1].split(" bytes")[0].replace(",", ""))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_log_probabilities_are_those_of_one_worker_in_memory(
    case: tuple[str, dict[str, Any]],
    config: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In bytes that were foretold of last tokens, which alone go through the head."""
    mesh, facts = case
    heads = watched(monkeypatch)
    path = saved(facts if "model_type" in facts else {**config, **facts}, tmp_path)
    alone = Seen()
    expected = outsize.load(path).generate(PROMPT, NEW, alone)
    budget = least(path, mesh)

    def work(world: World) -> tuple[Any, ...]:
        with on_mesh(path, world, limits=Limits(budget, tmp_path)) as model:
            home, seen = model.home, Seen()
            assert isinstance(home, InFiles)
            session, _ = home.ready(REQUEST)
            session.count(home.buffers)
            new = generate(model, PROMPT, NEW, seen, (), None, session, 3)
            assert home.outlook is not None and home.pooled is not None
            layout = home.pooled.layout
            actions = layout.schedules[Kind.DECODE].workers[0]
            held = session.peak, home.outlook.share.peak
            fetched = {moved(a).stage for a in actions if a.kind is Kind.FETCH}
            return new, seen.logprobs, held, fetched, layout.read, home.source.stages

    workers = play(parse_mesh(mesh), work)
    for new, logprobs, (peak, predicted), fetched, read, stages in workers:
        assert new == expected and set(heads) == {1}
        for mine, theirs in zip(logprobs, alone.logprobs, strict=bool(logprobs)):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
        assert peak <= predicted <= budget
        assert read == sum(part.bytes for s in fetched for part in stages[s].parts)
    assert any(logprobs for _, logprobs, *_ in workers)
    assert any(read for *_, read, _ in workers), "something passes through a pool"


def test_weights_are_cut_over_the_workers_and_fetches_ride_beside(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """Every worker reads its own rows alone; in a pipeline the lists of all are one program."""
    path = saved(config, tmp_path)
    whole = sum(x.nbytes for x in outsize.load(path).parameters())

    def work(world: World) -> tuple[int, list[Kind]]:
        with on_mesh(path, world, limits=Limits(1 << 23)) as model:
            model.home.ready(REQUEST)
            assert isinstance(model.home, InFiles) and model.home.pooled is not None
            actions = model.home.pooled.layout.schedules[Kind.DECODE].workers[0]
            return model.home.source.bytes_read, [action.kind for action in actions]

    table = 61 * config["hidden_size"] * 8  # of which rows are looked up
    for mesh in ("tensor=2", "pipeline=2"):
        found = play(parse_mesh(mesh), work)
        assert sum(read for read, _ in found) == pytest.approx(whole - table, rel=0.02)
    (_, first), (_, second) = found
    assert first.count(Kind.SEND) == second.count(Kind.RECV) == 1
    assert Kind.FETCH not in first and first[-1] == second[-1] == Kind.SAMPLE


def test_all_workers_are_refused_alike_and_serve_one_request_after_another(
    config: dict[str, Any], tmp_path: Path
) -> None:
    path = saved(config, tmp_path)
    budget, counts = least(path, "pipeline=2", 14) + 5_000, (2, 14, 2)

    def work(world: World) -> list[Any]:
        with on_mesh(path, world, limits=Limits(budget + (world.rank << 20))) as model:
            found = [model.generate(PROMPT, count) for count in counts]
            with pytest.raises(OutsizeError) as refused:  # of one worker alone
                model.peak(len(PROMPT), 90)
            return [*found, str(refused.value), model(torch.tensor(PROMPT))]

    alone = outsize.load(path)
    said = set()
    for *found, refused, logits_TV in play(parse_mesh("pipeline=2"), work):
        assert found == [alone.generate(PROMPT, count) for count in counts]
        expected_TV = alone(torch.tensor(PROMPT)).detach()
        torch.testing.assert_close(logits_TV, expected_TV, rtol=1e-10, atol=1e-10)
        said.add(refused)
    (line,) = said
    assert "bytes missing; the layers at work need" in line and "\n" not in line


def test_a_forecast_needs_no_files_and_more_memory_reads_less(
    config: dict[str, Any], tmp_path: Path
) -> None:
    path, mesh = saved(config, tmp_path), "tensor=2"
    low = least(path, mesh)
    (path / "model.safetensors.index.json").unlink(missing_ok=True)
    for file in path.glob("*.safetensors"):
        file.unlink()
    reads = []
    for more in (0, 30_000, 1 << 23):
        made = forecast(described(str(path)), REQUEST, parse_mesh(mesh), low + more)
        assert made.held["peak"][0] <= low + more and made.seconds.token > 0
        reads.append(made.read)
    assert reads[0] > reads[1] > reads[2] == 0
