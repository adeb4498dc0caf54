"""Weights that somebody changes under an open engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import ROOM, Told
from decoders import SMALL
from torch import nn

import outsize
from outsize.decode.samplers import Sampling
from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.models.families import parse
from outsize.serve.asks import Ask, Token
from outsize.serve.changed import Watched, begin_anew, watched
from outsize.serve.engine import Engine
from outsize.serve.line import Line
from outsize.serve.model import Model
from outsize.serve.policies import POLICIES

CONFIG = {**SMALL, "model_type": "llama", "max_position_embeddings": 128, "initializer_range": 0.3}
PROMPT = [place % 61 for place in range(70)]  # of which a page is kept


def model_of(dtype: torch.dtype = torch.float32) -> Model:
    return Model(build(parse(CONFIG), seed=3, dtype=dtype))


def moved(x: torch.Tensor) -> torch.Tensor:
    return x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)


def in_place(model: Model) -> None:
    with torch.no_grad():
        for x in model.parameters():
            x.copy_(moved(x))


def behind_the_counter(model: Model) -> None:
    for x in model.parameters():
        x.data.copy_(moved(x))


def other_memory(model: Model) -> None:
    for x in model.parameters():
        x.data = moved(x.data)


def other_tensors(model: Model) -> None:
    model.load_state_dict({k: moved(x) for k, x in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [in_place, behind_the_counter, other_memory, other_tensors])
def test_answers_are_those_of_the_weights_as_they_are(change: Callable[[Model], None]) -> None:
    """Pages of the prompt that are kept from before hold keys and values of other weights."""
    model = model_of(torch.bfloat16 if change is behind_the_counter else torch.float32)
    ask, kept = Ask(tuple(PROMPT), 6, Sampling(), tops=1), len(PROMPT) // ROOM.page * ROOM.page
    room = replace(ROOM, context=80)
    with Engine(model, room, POLICIES.get("mixed"), watched=Watched(model)) as e:
        before = list(e.tokens(ask))
        assert list(e.tokens(ask)) == before and e.line.counts.kept == kept  # nothing has changed
        change(model)
        after = list(e.tokens(ask))
        assert e.line.counts.kept == kept and after != before
        assert list(e.tokens(ask)) == after and e.line.counts.kept == 2 * kept
        scored = e.logprobs(PROMPT)
        change(model)
        assert e.logprobs(PROMPT) != scored
    change(before_it := model_of(model.prologue.tokens.weight.dtype))
    with Engine(before_it, room, POLICIES.get("mixed")) as e:
        assert list(e.tokens(ask)) == after and e.logprobs(PROMPT) == scored


def test_no_text_is_of_two_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has drawn is ended; whose prompt is under way, or waits, is told what he would be by the
    new weights alone; a text that is looked at in slices is refused."""
    model, each, fed = model_of(), [Told() for _ in range(3)], list[object]()
    room = replace(ROOM, budget=8, slots=2, context=80)
    asks = [Ask(tuple(PROMPT[:n]), 9, Sampling(), tops=1) for n in (3, 40, 5)]
    engine = Engine(model, room, POLICIES.get("mixed"), watched=Watched(model))
    feed = engine.steps.feed

    def held(*step: Any) -> None:
        feed(*step)
        fed.append(step)
        if len(fed) == 3:  # the first has three tokens, the second a part of its prompt
            in_place(model)

    monkeypatch.setattr(engine.steps, "feed", held)
    for ask, one in zip(asks, each, strict=True):
        engine.submit(ask, one)
    with engine:
        told = [one.wait() for one in each]
        assert engine.line.pages.left == room.pages and engine.fault is None
    assert each[0].end is not None and "would be of two models" in each[0].end.error
    assert len(told[0]) == 3
    for ask, one in zip(asks[1:], told[1:], strict=True):
        with Engine(model, room, POLICIES.get("mixed")) as alone:
            assert list(alone.tokens(ask)) == one


def test_a_text_in_slices_is_of_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    engine = Engine(model, replace(ROOM, budget=8, context=80), POLICIES.get("mixed"),
                    watched=Watched(model))  # fmt: skip
    look = engine.steps.look

    def held(*step: Any) -> Any:
        in_place(model)
        return look(*step)

    monkeypatch.setattr(engine.steps, "look", held)
    with engine:
        with pytest.raises(OutsizeError, match="were changed while this text was looked at"):
            engine.logprobs(PROMPT)
        monkeypatch.undo()
        assert engine.line.beside == 0 and engine.line.pages.left == engine.room.pages
        assert len(engine.logprobs(PROMPT)) == len(PROMPT) - 1


def test_another_model_is_refused() -> None:
    """Its room and its pages are of the one that it was made for."""
    model = model_of()
    seen = Watched(model)
    model.prologue.tokens.weight = nn.Parameter(torch.zeros(70, 32))
    with pytest.raises(OutsizeError, match=r"has other parameters.*; expected the same"):
        seen.changed(True)
    model.double()
    with pytest.raises(OutsizeError, match=r"has other parameters.*; expected the same"):
        seen.changed(True)
    model.config = replace(model.config, softcap=5.0)  # and nothing else
    with pytest.raises(OutsizeError, match=r"has other parameters.*; expected the same"):
        seen.changed(False)


def test_pages_of_earlier_weights_are_no_others() -> None:
    """Whatever turns texts: of all lengths, no text finds pages of one by other weights."""
    line = Line(ROOM, POLICIES.get("mixed"), True, regime=lambda length: length)
    for length in (41, 40, 40):
        line.add(Ask(tuple(PROMPT[:length]), 1, Sampling()), lambda _: None)
        feeds = line.feeds()
        feeds[0].request.told = [Token(1)]
        line.take(feeds)
        assert line.counts.kept == 0 and not line.requests
        begin_anew(line)


def test_weights_that_are_not_this_workers_alone(tmp_path: Path) -> None:
    """On a mesh a change is refused; what files are read into changes in each step."""
    model = model_of()
    model.away = "mesh"
    seen = Watched(model)
    assert not seen.changed(True)
    with torch.no_grad():
        model.blocks[1].mlp_norm.weight[3] += 1
    with pytest.raises(OutsizeError, match="loaded with mesh were changed under its engine"):
        seen.changed(False)
    outsize.save(model_of(), tmp_path / "hf")
    with outsize.load(tmp_path / "hf", memory="64MiB") as inside:
        assert watched(inside) is None


def test_tensors_of_any_form_are_looked_at() -> None:
    """Turned ones, empty ones, those of inference mode, of several dtypes, scalars."""
    model = model_of()
    with torch.inference_mode():
        model.register_buffer("inferred", torch.zeros(5))
    for name, x in (("turned", torch.zeros(3, 7).t()), ("empty", torch.zeros(0, 3)),
                    ("scalar", torch.zeros(())), ("nan", torch.full((9,), float("nan"))),
                    ("bytes", torch.zeros(70, dtype=torch.uint8))):  # fmt: skip
        model.register_buffer(name, x)
    seen = Watched(model)
    assert not seen.changed(True)
    for name in ("inferred", "turned", "scalar", "nan", "bytes"):
        model.get_buffer(name).data.fill_(1)
        assert not seen.changed(False) and seen.changed(True) and not seen.changed(True)
