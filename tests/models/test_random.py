"""The counter-based generator: slices, distribution, independence, and that it never changes."""

from __future__ import annotations

import hashlib
import math
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.kernels import native
from outsize.kernels.pieces import pieces
from outsize.models.random import fill_normal, normal, plain_normal, uniform

N = 40_000
GOLDEN = ["0x1.9c8197287abf4p-2", "0x1.430ba7266f7bfp+0", "-0x1.a3c0c697ad84ap-1"]
WHOLE = {"uniform": uniform(3, "w", 0, N), "normal": normal(3, "w", 0, N)}
DRAW = {"uniform": uniform, "normal": normal}


@given(st.sampled_from(["uniform", "normal"]), st.integers(0, N), st.integers(0, N))
@settings(max_examples=200, deadline=None)
def test_any_slice_is_the_slice_of_the_whole(kind: str, a: int, b: int) -> None:
    start, stop = sorted((a, b))
    part = DRAW[kind](3, "w", start, stop)
    assert part.tobytes() == WHOLE[kind][start:stop].tobytes()


@given(st.lists(st.integers(0, 5000), max_size=6), st.integers(0, 1 << 40))
@settings(max_examples=50, deadline=None)
def test_the_cuts_do_not_matter_far_from_the_start(cuts: list[int], base: int) -> None:
    edges = [0, *sorted(cuts), 5000]
    parts = [normal(1, "x", base + a, base + b) for a, b in pairwise(edges)]
    assert np.concatenate(parts).tobytes() == normal(1, "x", base, base + 5000).tobytes()


def test_box_muller_of_the_philox_words() -> None:
    """Against the textbook transform, by numpy's own logarithm and sine."""
    key = hashlib.blake2b(b"7\0name", digest_size=16).digest()
    words = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(N)
    u = ((words >> 32).astype(np.float64) + 0.5) / 2**32
    v = ((words & 0xFFFFFFFF).astype(np.float64) + 0.5) / 2**32
    expected = np.sqrt(-2 * np.log(u)) * np.sin(np.pi * (v - 0.5))
    assert np.abs(normal(7, "name", 0, N) - expected).max() < 1e-14


RUNS = ((0, N), (3, 5001), (1 << 40, (1 << 40) + 777), (6, 7), (5, 5))


@pytest.mark.parametrize("run", RUNS)
def test_the_native_pass_gives_the_bits_of_its_twin(run: tuple[int, int]) -> None:
    assert native.library() is not None
    assert normal(3, "w", *run).tobytes() == plain_normal(3, "w", *run).tobytes()


def test_threads_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = fill_normal(torch.empty(100_003), 2, "w", start=1)
    monkeypatch.setattr(native, "threads", lambda: 3)
    assert torch.equal(fill_normal(torch.empty(100_003), 2, "w", start=1), expected)


def test_normal_is_normal() -> None:
    """Moments, the Kolmogorov-Smirnov distance, and no correlation between neighbours."""
    n = 1 << 20
    x = normal(0, "ks", 0, n)
    assert abs(x.mean()) < 4 / math.sqrt(n)
    assert abs((x**2).mean() - 1) < 4 * math.sqrt(2 / n)
    assert abs((x**3).mean()) < 4 * math.sqrt(15 / n)
    assert abs((x**4).mean() - 3) < 4 * math.sqrt(96 / n)
    ordered = torch.from_numpy(np.sort(x))
    below = 0.5 * torch.special.erfc(-ordered / math.sqrt(2)).numpy()
    distance = np.abs(below - (np.arange(n) + 0.5) / n).max()
    assert distance < 1.95 / math.sqrt(n)  # passed by chance alone with probability 0.999
    for lag in (1, 2, 4):
        assert abs((x[lag:] * x[:-lag]).mean()) < 4 / math.sqrt(n)
    assert 4.5 < np.abs(x).max() < 6.8


def test_uniform_is_uniform() -> None:
    n = 1 << 20
    x = np.sort(uniform(0, "ks", 0, n))
    assert x[0] >= 0 and x[-1] < 1
    assert np.abs(x - (np.arange(n) + 0.5) / n).max() < 1.95 / math.sqrt(n)


STREAMS = st.tuples(
    st.integers(-(2**70), 2**70), st.text(st.sampled_from("a.0\0\xe9\u5b57\U0001f642"), max_size=20)
)  # an alphabet of a few letters of every length: that of all takes seconds to make


@given(STREAMS, STREAMS)
@settings(max_examples=50, deadline=None)
def test_streams_differ_by_seed_and_by_name(a: tuple[int, str], b: tuple[int, str]) -> None:
    same = np.array_equal(normal(*a, 0, 16), normal(*b, 0, 16))
    assert same == (a == b)


def test_streams_of_different_names_are_uncorrelated() -> None:
    n = 1 << 18
    x, y, z = normal(0, "a", 0, n), normal(0, "b", 0, n), normal(1, "a", 0, n)
    for u, v in ((x, y), (x, z), (y, z)):
        assert abs((u * v).mean()) < 4 / math.sqrt(n)


def test_values_never_change() -> None:
    """What a seed means is part of every run's record: these bits hold on any machine."""
    found = [value.hex() for value in normal(0, "blocks.0.attention.q.weight", 10**12, 10**12 + 3)]
    assert found == GOLDEN


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_fill_rounds_the_scaled_stream(dtype: torch.dtype) -> None:
    out = torch.empty(3, 700, dtype=dtype)
    assert fill_normal(out, 5, "w", start=11, std=0.02) is out
    expected = torch.from_numpy(plain_normal(5, "w", 11, 11 + 2100) * 0.02).view(3, 700).to(dtype)
    assert torch.equal(out, expected)


def test_fill_of_any_strides_and_of_parameters() -> None:
    expected = torch.empty(1200, 1100, dtype=torch.float64)
    fill_normal(expected, 5, "w")
    turned = torch.nn.Parameter(torch.empty(1100, 1200, dtype=torch.float64).t())
    fill_normal(turned, 5, "w")
    assert torch.equal(turned, expected)
    rows = torch.empty(50, 1100, dtype=torch.float64)
    fill_normal(rows, 5, "w", start=1100 * 900)
    assert torch.equal(rows, expected[900:950])
    scalar, nothing = torch.empty((), dtype=torch.float64), torch.empty(0, 3)
    assert fill_normal(scalar, 5, "w").item() == expected[0, 0]
    assert fill_normal(nothing, 5, "w").numel() == 0


@given(st.lists(st.integers(1, 6), max_size=4), st.integers(1, 40), st.randoms())
@settings(max_examples=100, deadline=None)
def test_pieces_cover_in_order_within_bounds(
    shape: list[int], limit: int, rng: random.Random
) -> None:
    x = torch.arange(math.prod(shape)).view(shape)
    order = list(range(len(shape)))
    rng.shuffle(order)
    y = x.permute(order)
    parts = list(pieces(y, limit))
    assert all(0 < part.numel() <= limit for part in parts)
    assert torch.equal(torch.cat([part.reshape(-1) for part in parts]), y.reshape(-1))
    assert all(
        part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for part in parts
    )
