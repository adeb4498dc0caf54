"""Generation on the device: the CPU's tokens, one wait of the host a token, bytes as foretold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import strict
import torch
from subjects import CONFIGS

import outsize
from outsize.decode.generate import Request, play
from outsize.decode.samplers import Sampling
from outsize.errors import OutsizeError
from outsize.launch.heartbeat import Heartbeat
from outsize.models.build import build
from outsize.models.families import parse
from outsize.runtime.session import Session
from outsize.serve.files import Limits
from outsize.serve.model import Model
from outsize.serve.workers import Asked, run_workers

GLA: dict[str, Any] = {
    "model_type": "gla", "vocab_size": 53, "hidden_size": 24, "intermediate_size": 40,
    "num_hidden_layers": 3, "num_heads": 4, "expand_k": 0.5, "expand_v": 1, "hidden_act": "swish",
    "norm_eps": 1e-2,
}  # fmt: skip
MODELS = {**CONFIGS, "gla": GLA}
REQUESTS = (
    Request((3, 5, 7, 11, 2, 40), 5, Sampling(), scored=True),
    Request((1, 2), 6, Sampling(1.0, None, 0.9, 3), scored=True),
    Request((9,), 4, Sampling(0.7, 5, seed=1), scored=True),
)
OVER = 1.02  # of the allocator's figure: the most that is foretold
SLICE = 3  # tokens of prompts that a step feeds besides the first ones
Tokens = list[tuple[int, int, float]]


@pytest.mark.parametrize(
    "name", ["llama, untied", "gpt2", "gemma2", "mixtral", "deepseek_v3", "gla"]
)
def test_tokens_and_probabilities_are_the_cpus(name: str) -> None:
    model = _model(name)
    expected = _tokens(model)
    for order in strict.ORDERS[:: 7 if name == "llama, untied" else 19]:
        strict.start(*order)
        there = _model(name).to("strict")
        with strict.waits() as waits:
            found = _tokens(there)
        _check(found, expected)
        steps = waits.pop(("blocking copy", _line("outsize/runtime/handlers/sample.py", waits)))
        assert steps == 7, order  # six tokens at most, and the first prompt in two slices
        experts = [where for _, where in waits if "models/experts.py" in where]
        assert len(experts) == len(waits), waits  # how many rows each expert gets


@pytest.mark.parametrize("name", ["llama, untied", "gpt2"])
def test_from_files_within_a_budget(name: str) -> None:
    with _saved(name) as path:
        with outsize.load(path) as whole:
            expected = whole.generate((3, 5, 7, 11), 6)
            memory = int(0.8 * whole.peak(4, 6))
        for order in strict.ORDERS[::9]:
            strict.start(*order)
            with outsize.load(path, device="strict", memory=memory + 40_000) as model:
                model.generate((3, 5), 2)  # fills the pool
                assert model.generate((3, 5, 7, 11), 6) == expected, order


@pytest.mark.fresh
@pytest.mark.parametrize(
    ("mesh", "kept"), [("tensor=2", None), ("pipeline=2", None), ("pipeline=2,tensor=2", 0.9)]
)
def test_workers_with_a_device_each(mesh: str, kept: float | None) -> None:
    """kept: of a worker's bytes those that its budget has; layers are read from files then."""
    with _saved("llama, untied", num_hidden_layers=6) as path:
        with outsize.load(path) as whole:
            expected = whole.generate((3, 5, 7, 11), 6)
            memory = whole.peak(4, 6)
        strict.start("random", seed=5, devices=4)
        limits = None if kept is None else Limits(int(kept * memory / 2))
        told = path.parent / "tokens"

        def go(model: Model, first: bool, pulse: Heartbeat) -> None:
            assert model.home is not None and model.home.model is not None
            found = model.generate((3, 5, 7, 11), 6)
            assert {x.device.type for x in model.parameters()} == {"strict"}
            if first:
                told.write_text(json.dumps(found))

        asked = Asked(mesh, None, {}, limits, device="auto")
        assert run_workers(asked, lambda: path, go) == 0
        assert json.loads(told.read_text()) == list(expected)


@pytest.mark.parametrize("prompt", [3, 40])
def test_bytes_are_the_allocators(prompt: int) -> None:
    wide = {"hidden_size": 96, "intermediate_size": 200, "vocab_size": 900}
    with _saved("llama, untied", **wide) as path:
        strict.start("random", seed=2)
        sampling = Sampling(0.8, 20)
        with outsize.load(path, device="strict") as model:
            whole = _held(model, prompt, sampling)
        with outsize.load(path, device="strict", memory=int(0.8 * whole)) as model:
            assert _held(model, prompt, sampling) <= 0.8 * whole


def test_a_budget_that_is_one_byte_short_is_refused() -> None:
    with _saved("llama, untied") as path:
        strict.start("random", seed=2)
        with (
            outsize.load(path, device="strict", memory=4096) as model,
            pytest.raises(OutsizeError, match="give") as small,
        ):
            model.generate((3, 5, 7), 4)
        least = int(str(small.value).split("give ")[1].split(" ")[0].replace(",", ""))
        with (
            outsize.load(path, device="strict", memory=least - 1) as model,
            pytest.raises(OutsizeError, match="missing"),
        ):
            model.generate((3, 5, 7), 4)
        with outsize.load(path, device="strict", memory=least) as model:
            assert len(model.generate((3, 5, 7), 4)) == 4


def _model(name: str, **changes: Any) -> Model:
    config = parse({**MODELS[name], "initializer_range": 0.3, **changes})
    return Model(build(config, seed=1, dtype=torch.float64))


@contextmanager
def _saved(name: str, **changes: Any) -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        outsize.save(_model(name, **changes), Path(folder) / "model")
        yield Path(folder) / "model"


def _tokens(model: Model) -> Tokens:
    device = model.prologue.tokens.weight.device
    with torch.no_grad(), Session(model) as session:
        return [(i, *one) for i, one in play(REQUESTS, session, device, SLICE)]


def _check(found: Tokens, expected: Tokens) -> None:
    assert [token[:2] for token in found] == [token[:2] for token in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[2] == pytest.approx(theirs[2], rel=1e-10)


def _line(file: str, waits: dict[tuple[str, str], int]) -> str:
    return next(where for _, where in waits if file in where)


def _held(model: Model, prompt: int, sampling: Sampling) -> int:
    """The predicted peak, which is hardly above the allocator's."""
    request = Request((0,) * prompt, 6, sampling)
    foretold = model.peak(prompt, 6, sampling)
    if model.home is None:
        with torch.no_grad(), Session(model) as session:
            session.count()
            list(play([request], session, torch.device("strict", 0)))
    else:
        session, at_once = model.home.ready(request)
        session.count(model.home.buffers)
        list(play([request], session, torch.device("strict", 0), at_once))
    assert session.peak <= foretold <= OVER * session.peak
    return foretold
