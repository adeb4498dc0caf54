"""Sums beside what is computed, in generation: against the same files on one worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from threads import play
from torch import Tensor

import outsize
from outsize.collectives import Mesh, World, along
from outsize.decode.generate import GREEDY, Request, generate
from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.models.families import parse
from outsize.plan.settings import NONE
from outsize.serve.files import Limits
from outsize.serve.load import on_mesh

PROMPT, NEW = [5, 17, 2, 44, 9, 30, 8], 4
REQUEST = Request(tuple(PROMPT), NEW, GREEDY)
OVERLAP = NONE.having({"overlap": 3})
HIDDEN, LAYERS = 32, 2


class Seen:
    """The likeliest token; keeps the log-probabilities."""

    def __init__(self) -> None:
        self.logprobs = list[Tensor]()

    def __call__(self, logits_V: Tensor, index: int) -> int:
        self.logprobs.append(logits_V.log_softmax(-1))
        return int(logits_V.argmax())


@pytest.mark.parametrize(
    ("wired", "limits"),
    [
        ("plain", None), ("plain", Limits(1 << 23)), ("ladder_from", None),
        ("kraken_ways", Limits(1 << 23)),
    ],
)  # fmt: skip
def test_log_probabilities_are_those_of_one_worker(
    wired: str, limits: Limits | None, tiny_config: dict[str, Any], tmp_path: Path
) -> None:
    """Beside go the sums of a plain model's prompt, and those of every token of a wired one."""
    said = {"ladder_from": {"ladder_from": 0}, "kraken_ways": {"kraken_ways": 2}}.get(wired, {})
    config = {**tiny_config, "vocab_size": 61, "initializer_range": 0.3, **said}
    assert (config["hidden_size"], config["num_hidden_layers"]) == (HIDDEN, LAYERS)
    outsize.save(build(parse(config), seed=1, dtype=torch.float64), tmp_path / "hf")
    alone = Seen()
    expected = outsize.load(tmp_path / "hf").generate(PROMPT, NEW, alone)

    def work(world: World) -> tuple[Any, ...]:
        with on_mesh(tmp_path / "hf", world, limits=limits, settings=OVERLAP) as model:
            assert model.home is not None
            session, at_once = model.home.ready(REQUEST)
            beside, seen = along(world, "tensor", "beside"), Seen()
            before = beside.received["all_reduce"]
            new = generate(model, PROMPT, NEW, seen, (), None, session, at_once)
            return new, seen.logprobs, beside.received["all_reduce"] - before

    sums = {"plain": 2 * LAYERS, "ladder_from": 2 * LAYERS, "kraken_ways": LAYERS}[wired]
    tokens = len(PROMPT) if wired == "plain" else len(PROMPT) + NEW - 1
    for new, logprobs, received in play(Mesh(tensor=2), work):
        assert new == expected and received == sums * tokens * HIDDEN * 8
        for mine, theirs in zip(logprobs, alone.logprobs, strict=bool(logprobs)):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_where_it_does_nothing_it_is_refused(tiny_config: dict[str, Any], tmp_path: Path) -> None:
    outsize.save(build(parse(tiny_config), seed=1), tmp_path / "hf")

    def work(world: World) -> None:
        on_mesh(tmp_path / "hf", world, settings=OVERLAP)

    with pytest.raises(OutsizeError, match=r"plan\.overlap is 3, but mesh\.tensor is 1"):
        play(Mesh(pipeline=2), work)
