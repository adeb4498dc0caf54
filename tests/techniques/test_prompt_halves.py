"""Prompts in halves over a tensor axis, against the same files on one worker; when they are taken,
and what they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from many import Kept
from subjects import CONFIGS
from tensor_split import filled
from threads import play
from torch import Tensor

import outsize
from outsize.collectives import Mesh, World, along, parse_mesh
from outsize.decode.generate import GREEDY, Request, generate
from outsize.plan.settings import NONE
from outsize.serve import meshed
from outsize.serve.load import on_mesh
from outsize.serve.prompts import Weighed, foretold

TOKENS, NEW = 300, 3
SLICE = 140  # tokens of a step but one: two in halves, and 18 that are too few
WIDE = {
    "vocab_size": 61, "max_position_embeddings": 512, "initializer_range": 0.3,
    "num_hidden_layers": 2,
}  # fmt: skip
PLAIN = {**CONFIGS["llama"], **WIDE}
SUBJECTS: dict[str, dict[str, Any]] = {
    "llama": PLAIN,
    "biases, learned positions": {
        "model_type": "gpt2", "vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4,
        "n_positions": 512, "initializer_range": 0.3,
    },
    "branches side by side": {
        "model_type": "gpt_neox", "hidden_size": 32, "intermediate_size": 48,
        "num_attention_heads": 4, **WIDE,
    },
    "norms around, windows, caps": {**CONFIGS["gemma2"], **WIDE, "sliding_window": 50},
    "experts": {**CONFIGS["mixtral"], **WIDE},
}  # fmt: skip


class Seen:
    """The likeliest token; keeps the log-probabilities."""

    def __init__(self) -> None:
        self.logprobs = list[Tensor]()

    def __call__(self, logits_V: Tensor, index: int) -> int:
        self.logprobs.append(logits_V.log_softmax(-1))
        return int(logits_V.argmax())


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine's clocks say."""
    monkeypatch.setattr(meshed, "weighed", lambda way, *_: Weighed(2.0, 1.0, way.meaning))


def saved(config: dict[str, Any], folder: Path) -> Path:
    outsize.save(filled(config), folder / "hf")
    return folder / "hf"


CASES = [
    (name, "pipeline=2,tensor=2" if name == "llama" else "tensor=2") for name in SUBJECTS
]  # fmt: skip


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_log_probabilities_are_those_of_one_worker(
    name: str, mesh: str, taken: None, tmp_path: Path
) -> None:
    path, prompt = saved(SUBJECTS[name], tmp_path), [7 * i % 61 for i in range(TOKENS)]
    alone, one = Seen(), outsize.load(path)
    expected = generate(one, prompt, NEW, alone)

    def work(world: World) -> tuple[Any, ...]:
        with on_mesh(path, world) as model:
            assert model.home is not None
            session, _ = model.home.ready(Request(tuple(prompt), NEW, GREEDY))
            assert "prompts in halves" in str(model.home) and "1 s instead of 2" in str(model.home)
            beside, seen = along(world, "tensor", "beside"), Seen()
            before = beside.received["all_reduce"]
            new = generate(model, prompt, NEW, seen, (), None, session, SLICE)
            return new, seen.logprobs, beside.received["all_reduce"] - before

    workers = play(parse_mesh(mesh), work)
    layers, hidden = len(one.config.layers), one.config.hidden
    summed = sum(received for _, _, received in workers) / parse_mesh(mesh)["tensor"]
    assert summed == 2 * layers * 2 * (1 + SLICE) * hidden * 8, "of what is in halves alone"
    for new, logprobs, _ in workers:
        assert new == expected
        for mine, theirs in zip(logprobs, alone.logprobs, strict=bool(logprobs)):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_a_step_of_several_sequences_is_cut_anywhere() -> None:
    cache = Kept(3, 20)
    cache.extend([0, 2], [4, 1])
    whole = cache.extend([0, 1, 2], [5, 3, 6], [1, 0, 2])
    for middle in range(1, 14):
        parts = whole.cut(middle)
        fed = [part.positions().tolist() for part in parts]
        assert fed[0] + fed[1] == whole.positions().tolist() and len(fed[0]) == middle
        for part in parts:
            of = {one.slot: one.stop + one.ahead for one in whole.parts}
            assert part.lengths == tuple(of[one.slot] for one in part.parts)


def test_they_are_taken_where_they_are_foretold_to_be_quicker() -> None:
    """Sums are hidden as far as there is something to compute."""
    few = foretold(3.0, 2.0, 2.5, "")
    assert (few.at_once, few.beside, few.gains) == (5.0, 3.0, True)
    many = foretold(1.0, 4.0, 4.5, "").times(2)
    assert (many.at_once, many.beside, many.gains) == (10.0, 9.0, True)
    assert not foretold(1.0, 0.04, 0.05, "").gains, "less than a forecast errs by"


@pytest.mark.parametrize("said", [{"overlap": 0}, {"overlap": 2}])
def test_who_says_how_sums_are_taken_has_them_so(
    said: dict[str, int], taken: None, tmp_path: Path
) -> None:
    path, request = saved(PLAIN, tmp_path), Request((0,) * TOKENS, NEW, GREEDY)

    def work(world: World) -> tuple[Any, str]:
        with on_mesh(path, world, settings=NONE.having(said)) as model:
            assert model.home is not None
            return model.home.ready(request)[0].steps.prompts, str(model.home)

    for prompts, line in play(Mesh(tensor=2), work):
        assert prompts is None and "halves" not in line
