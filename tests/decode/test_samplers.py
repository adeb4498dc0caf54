"""Samplers against the logits processors of transformers, and against the law of large numbers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from outsize.decode import samplers
from outsize.decode.samplers import Sampling, drawn, probabilities
from outsize.errors import OutsizeError
from outsize.kernels import native
from outsize.models.random import uniform


def _logits(seed: int, count: int = 200, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 3


def _reference(logits_V: Tensor, temperature: float, top_k: int | None, top_p: float) -> Tensor:
    scores = logits_V[None].double()
    ids = torch.zeros(1, 1, dtype=torch.int64)
    scores = TemperatureLogitsWarper(temperature)(ids, scores)
    if top_k is not None:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(ids, scores)
    return scores[0].softmax(0)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [None, 1, 7, 199, 500])
@pytest.mark.parametrize("top_p", [1e-6, 0.5, 0.9, 0.999, 1.0])
def test_the_same_tokens_with_the_same_probabilities_as_transformers(
    temperature: float, top_k: int | None, top_p: float
) -> None:
    for seed in range(4):
        logits_V = _logits(seed)
        found = probabilities(logits_V, Sampling(temperature, top_k, top_p))
        expected = _reference(logits_V, temperature, top_k, top_p)
        assert torch.equal(found > 0, expected > 0)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


def test_ties_and_masked_tokens_are_treated_as_transformers_does() -> None:
    logits_V = torch.tensor([1.0, 2.0, 2.0, -math.inf, 2.0, 0.0], dtype=torch.float64)
    for top_k in (1, 2, 3, 4, 6):
        found = probabilities(logits_V, Sampling(1.0, top_k))
        expected = _reference(logits_V, 1.0, top_k, 1.0)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)


def test_the_edges_of_top_p() -> None:
    """At exactly 1 - p a token goes; the likeliest stays, however small p is."""
    even_V = torch.zeros(4, dtype=torch.float64)
    for logits_V, top_p in ((even_V, 0.5), (even_V, 0.75), (_logits(0), 1e-20)):
        found = probabilities(logits_V, Sampling(1.0, top_p=top_p))
        expected = _reference(logits_V, 1.0, None, top_p)
        assert int((found > 0).sum()) == int((expected > 0).sum()) > 0


def test_what_rounding_tells_apart_is_alike() -> None:
    """Forty copies of each of five rows, as likely to the last bit or not: the same are kept."""
    even_V = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.5], dtype=torch.float64).repeat(40)
    for sampling in (Sampling(1.0, 60), Sampling(1.0, top_p=0.3), Sampling(0.7, 90, 0.8)):
        expected_V = probabilities(even_V, sampling) > 0
        for seed in range(5):
            found_V = probabilities(even_V + 1e-15 * _logits(seed), sampling) > 0
            assert torch.equal(found_V, expected_V)
    # Of the likeliest row's copies the first so many that have 0.3 of all.
    kept = (probabilities(even_V, Sampling(1.0, top_p=0.3)) > 0).nonzero()[:, 0].tolist()
    share = math.exp(3) / (40 * sum(math.exp(x) for x in (1.0, 2.0, 0.5, 3.0, 1.5)))
    assert kept == list(range(3, 200, 5))[: math.ceil(0.3 / share)]


@pytest.mark.parametrize("drawn", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_draw_have_a_token_too(
    drawn: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never one without probability, though such stand at both ends."""
    monkeypatch.setattr(samplers, "uniform", lambda *_: np.array([drawn]))
    logits_V = torch.tensor([-math.inf, 0.3, -math.inf, 0.2, 0.1, -math.inf])
    assert Sampling(1.0)(logits_V, 0) == (1 if drawn == 0 else 4)


@pytest.mark.skipif(native.library() is None, reason="no compiler on PATH")
def test_one_pass_draws_what_probabilities_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of flat and of peaked logits, alike ones, ones that are ruled out, in both dtypes."""
    none = -math.inf
    rows: list[tuple[Tensor, Sampling]] = []
    for seed, (heat, top_k, top_p, count) in enumerate(
        itertools.product((0.05, 0.8, 30.0), (None, 1, 40, 1 << 20), (1.0, 0.95, 1e-20), (1, 2500))
    ):
        logits_V = _logits(seed, count, torch.float32)
        if seed % 3 == 0:
            logits_V = logits_V.round().masked_fill(_logits(seed + 1, count) < 0, none)
            logits_V[count // 2] = 1.0
        dtype = torch.bfloat16 if seed % 2 else torch.float32
        rows.append((logits_V.to(dtype), Sampling(heat, top_k, top_p, seed)))
    even_V = torch.zeros(4)  # at exactly 1 - p a token goes, and of alike ones the last
    rows += [(even_V, Sampling(1.0, top_p=top_p, seed=seed)) for top_p in (0.5, 0.75)
             for seed in range(8)]  # fmt: skip
    expected = [one(logits_V, 7) for logits_V, one in rows]  # where gradients are recorded
    assert set(expected[-16:-8]) == {0, 1} and set(expected[-8:]) == {0, 1, 2}
    monkeypatch.setattr(samplers, "probabilities", None)
    with torch.no_grad():
        assert [one(logits_V, 7) for logits_V, one in rows] == expected


def test_greedy_takes_the_likeliest_whatever_else_is_asked() -> None:
    for seed in range(5):
        logits_V = _logits(seed)
        for sampling in (Sampling(), Sampling(0, 5, 0.3, seed)):
            assert sampling(logits_V, seed) == int(logits_V.argmax())


def test_tokens_come_as_often_as_their_probability() -> None:
    """Chi-squared over 2000 draws, 19 degrees of freedom: above 51 once in ten thousand."""
    sampling = Sampling(1.3, top_k=24, top_p=0.95, seed=5)
    logits_V, draws = _logits(0, 30), 2000
    expected_V = probabilities(logits_V, sampling) * draws
    counts_V = torch.zeros(30, dtype=torch.float64)
    for index in range(draws):
        counts_V[sampling(logits_V, index)] += 1
    kept_V = expected_V > 0
    assert float(counts_V[~kept_V].sum()) == 0
    distance = ((counts_V - expected_V)[kept_V] ** 2 / expected_V[kept_V]).sum()
    assert 8 <= int(kept_V.sum()) <= 20
    assert float(distance) < 51


def test_a_draw_depends_on_seed_and_index_only() -> None:
    logits_V = _logits(1)
    first = [Sampling(1.0, seed=3)(logits_V, index) for index in range(50)]
    again = [Sampling(1.0, seed=3)(logits_V, index) for index in reversed(range(50))]
    assert first == again[::-1]
    assert first != [Sampling(1.0, seed=4)(logits_V, index) for index in range(50)]
    assert len(set(first)) > 10


def test_a_draw_is_its_own_number_of_the_stream() -> None:
    """So that what a seed gives stays what it was."""
    drawn_N = uniform(7, "sample", 0, 12)
    for index in range(12):
        total_V = _logits(index).softmax(0).cumsum(0)
        expected = int((total_V <= float(drawn_N[index])).sum())
        assert Sampling(1.0, seed=7)(_logits(index), index) == expected


def test_tiny_temperatures_and_huge_logits_do_not_overflow() -> None:
    logits_V = torch.tensor([-3e38, 3e38, 2.9e38])
    assert probabilities(logits_V, Sampling(1e-300)).tolist() == [0.0, 1.0, 0.0]
    assert Sampling(1e-300)(logits_V, 0) == 1


@pytest.mark.parametrize("bad", [[0.0, math.nan], [0.0, math.inf], [-math.inf, -math.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(bad: list[float], temperature: float) -> None:
    with pytest.raises(OutsizeError, match="logits for new token 7 that are not finite"):
        Sampling(temperature)(torch.tensor(bad), 7)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
    ],
)
def test_values_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(OutsizeError, match=f"^{field} is {value}; expected"):
        Sampling(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.5, 2, 0.9, seed=3)])
def test_the_log_probability_is_the_models_whatever_is_drawn_from(sampling):
    logits = torch.tensor([0.3, 2.0, -1.0, 1.5])
    one = drawn(logits, sampling, 4, scored=True)
    expected = torch.log(logits.double().exp() / logits.double().exp().sum())
    assert one.token == sampling(logits, 4)
    assert one.logprob == pytest.approx(float(expected[one.token]), rel=1e-12)
    assert math.isnan(drawn(logits, sampling, 4, scored=False).logprob)


def test_settings_are_checked() -> None:
    wrong: Any
    for wrong, words in (
        ({"temperature": "hot"}, "temperature is 'hot'; expected a finite number"),
        ({"top_k": 2.5}, "top_k is 2.5; expected at least 1"),
        ({"top_p": None}, "top_p is None; expected more than 0"),
        ({"seed": 1.5}, "seed is 1.5; expected a whole number"),
    ):
        with pytest.raises(OutsizeError, match=words):
            Sampling(**wrong)
