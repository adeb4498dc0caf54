"""Blocks recorded once and played with other numbers, by a recording that runs its call again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stepping import LLAMA, stepped
from torch import Tensor

from outsize.decode.graphs import MOST, Graphs
from outsize.decode.paged import PagedCache, PagedPast, Part
from outsize.decode.runs import each_alone
from outsize.models.build import build
from outsize.models.coding import asked
from outsize.models.decoder import Decoder
from outsize.models.families import parse

MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gpt2": {"model_type": "gpt2", "vocab_size": 50, "n_positions": 64, "n_embd": 32, "n_layer": 2,
             "n_head": 2},
    "gemma2": {**LLAMA, "model_type": "gemma2", "head_dim": 24, "sliding_window": 4},
    "windows": {**LLAMA, "model_type": "mistral", "sliding_window": 5},
}  # fmt: skip


class Again:
    """What is recorded runs again for each playing, into the same memory. made: as by a device."""

    count = 0

    def __init__(self, call: Callable[[], Tensor], device: torch.device) -> None:
        type(self).count += 1
        self._call, self.made = call, call().clone()

    def play(self) -> None:
        self.made.copy_(self._call())


def model_of(said: dict[str, Any]) -> Decoder:
    return build(parse(said), seed=1).double()


@pytest.mark.parametrize(
    ("name", "form"),
    [("llama", "int8"), ("gpt2", "as-stored"), ("gemma2", "int8"), ("windows", "as-stored")],
)
def test_what_is_played_is_what_modules_give(name: str, form: str) -> None:
    model, before = model_of(MODELS[name]), Again.count
    graphs, cache = Graphs(model, Again), PagedCache(9, 16, 3, form)
    assert graphs.why == {}
    expected = stepped(model, PagedCache(9, 16, 3, form), each_alone)
    for _ in range(3):  # each kind of step is met, recorded, and played with other numbers
        for mine, theirs in zip(stepped(model, cache, graphs), expected, strict=True):
            assert (mine - theirs).abs().max() <= 1e-10 * theirs.abs().max()
    assert Again.count == before + 2  # of 32 tokens, and of 4


def test_another_cache_is_recorded_anew() -> None:
    model = model_of(LLAMA)
    graphs, expected = Graphs(model, Again), stepped(model, PagedCache(9, 16, 3), each_alone)
    for _ in range(3):
        for mine, theirs in zip(
            stepped(model, PagedCache(9, 16, 3), graphs), expected, strict=True
        ):
            assert torch.allclose(mine, theirs, atol=1e-12)


def test_blocks_that_ask_the_host_are_none() -> None:
    said = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    model = build(parse(said), seed=0)
    assert set(Graphs(model, Again).why.values()) == {"its feed-forward network"}


def test_codes_are_not_recorded() -> None:
    model = build(asked(parse(LLAMA | {"intermediate_size": 192}), "int8:32"), seed=0)
    assert set(Graphs(model, Again).why.values()) == {"its format of weights"}


def test_a_long_step_goes_as_it_is() -> None:
    model, before = model_of(LLAMA), Again.count
    graphs, cache = Graphs(model, Again), PagedCache(9, 16, 1)
    for start in (0, MOST + 1):
        past = PagedPast(cache, (Part(range(9), start, MOST + 1, 0, 0),))
        context = model.context(past.positions(), past.bounds, past=past)
        x_TD = torch.zeros(MOST + 1, 128, dtype=torch.float64)
        assert len(graphs(list(model.blocks), context)) == len(model.blocks)
        for some in graphs(list(model.blocks), context):
            x_TD = some(x_TD)
    assert Again.count == before
