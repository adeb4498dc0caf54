"""Attention in float64, attention64.cpp and PyTorch's kernel behind it, against its definition."""

from __future__ import annotations

import platform
import shutil
from itertools import accumulate

import pytest
import torch
from attended import BOUNDS, OTHER_VECTORS, TILE, dense, errors, made, results, theirs
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from outsize.kernels import attention, building, native
from outsize.memory import Ledger
from outsize.models import flash
from outsize.models.attention import LocalAttend
from outsize.models.seams import AttendSpec

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ on PATH")
WIDE = torch.float64
CLOSE = 1e-13  # a key too many or too few is a part of 1e-3 and more


@pytest.fixture(autouse=True)
def built():
    """The session's build."""
    assert native.library() is not None


def off(attend, tensors, window, bounds=BOUNDS, scale=0.5) -> float:
    """The largest error of a result in its norm."""
    exact = results(dense, tensors, scale, window, bounds)
    return max(errors(results(attend, tensors, scale, window, bounds), exact))


@pytest.mark.parametrize(
    ("attend", "sizes", "kv_heads", "window"),
    [
        (attention.attend, (64, 64), 2, None), (attention.attend, (80, 80), 1, 250),
        (attention.attend, (24, 16), 4, None), (attention.attend, (256, 256), 1, None),
        (theirs, (80, 80), 1, 250), (theirs, (24, 16), 4, None),
    ],
)  # fmt: skip
def test_attention_as_it_is_defined(attend, sizes, kv_heads, window):
    tensors = made(sizes, kv_heads, WIDE)
    assert off(attend, tensors, window, scale=1.5 * sizes[0] ** -0.5) < CLOSE


def test_every_window_and_length_at_the_edges_of_tiles():
    bounds = (0, 7, 7 + 2 * TILE + 9)
    tensors = [x[:, : min(2, x.shape[1])] for x in made((4, 6), 1, WIDE, bounds)]
    wrong = {w: off(attention.attend, tensors, w, bounds) for w in range(2, 2 * TILE + 12)}
    assert max(wrong.values()) < CLOSE, wrong
    bounds = tuple(accumulate((*range(1, 20), *range(TILE - 9, TILE + 10)), initial=0))
    for window in (None, TILE + 1):
        assert off(attention.attend, made((5, 3), 2, WIDE, bounds), window, bounds) < CLOSE


def test_every_size_of_heads_and_every_group_of_them():
    bounds = (0, 3, 70)
    for size in (*range(1, 19), 255, 256):
        for sizes, groups in (((size, 3), 4), ((2, size), 2), ((size, 257 - size), 1)):
            tensors = made(sizes, groups, WIDE, bounds)
            assert off(attention.attend, tensors, 50, bounds, size**-0.5) < CLOSE, sizes


@pytest.mark.parametrize("window", [None, TILE + 3])
def test_queries_that_begin_anywhere(window):
    bounds = (0, 9, 150)
    q, k, v, pull = made((4, 6), 2, WIDE, bounds)
    for first in (1, 8, 9, 10, TILE + 8, TILE + 9, TILE + 10, 2 * TILE + 9, 149):
        masked = pull.index_fill(0, torch.arange(first), 0.0)
        exact = results(dense, [q, k, v, masked], 0.5, window, bounds)
        here = [x.detach().requires_grad_() for x in (q[first:], k, v)]
        output = LocalAttend()(*here, bounds, AttendSpec(0, 0.5, window, first_query=first))
        got = [output.detach(), *torch.autograd.grad(output, here, pull[first:])]
        expected = [exact[0][first:], exact[1][first:], *exact[2:]]
        assert max(errors(got, expected)) < CLOSE, first


def test_scores_far_apart_stay_numbers():
    q, k, v, pull = made((64, 64), 2, WIDE)
    assert off(attention.attend, [q * 300, k * 300, v, pull], None, scale=0.125) < 1e-9


def test_it_serves_what_caps_no_scores_and_no_other_path_ran(monkeypatch):
    monkeypatch.setattr(flash, "_Flash", None)
    tensors = made((16, 16), 2, WIDE)
    pairs = (results(run, tensors, 0.25, None) for run in (flash.flash, attention.attend))
    assert all(map(torch.equal, *pairs))
    q, k, v, _ = tensors
    assert attention.fits(q, k, v) and not attention.fits(q, k, v, 30.0)
    assert not attention.fits(q.to("meta"), k, v)


def test_bitwise_the_same_whatever_the_threads_and_whatever_lies_beside_it():
    tensors, threads = made((32, 32), 2, WIDE), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        first = results(attention.attend, tensors, 0.125, 70)
        for count in (2, 3, 4):
            torch.set_num_threads(count)
            assert all(map(torch.equal, first, results(attention.attend, tensors, 0.125, 70)))
    finally:
        torch.set_num_threads(threads)
    alone = results(attention.attend, [x[300:600] for x in tensors], 0.125, 70, (0, 300))
    for x in tensors:
        x[:300] = float("nan")
        x[600:] = float("inf")
    together = results(attention.attend, tensors, 0.125, 70)
    assert all(torch.equal(a, b[300:600]) for a, b in zip(alone, together, strict=True))
    assert all(torch.equal(a[300:600], b) for a, b in zip(first, alone, strict=True))


@pytest.mark.parametrize("attend", [attention.attend, theirs])
def test_fake_tensors_allocate_what_real_ones_do_however_documents_lie(attend):
    """PyTorch's kernel with one long document more than with many short ones, ours the same."""

    def seen(fake: bool, bounds: tuple[int, ...]) -> list[tuple[int, int]]:
        with FakeTensorMode() if fake else torch.enable_grad():
            shapes = ((512, 4, 8), (512, 2, 8), (512, 2, 6))
            inputs: list[Tensor] = [torch.ones(x, dtype=WIDE).requires_grad_() for x in shapes]
            ledger = Ledger()
            with ledger:
                output = attend(*inputs, bounds, 0.3, None)
                points = [(ledger.total, ledger.peak)]
                output.sum().backward()
            return [*points, (ledger.total, ledger.peak)]

    long, short = (0, 512), (0, 3, 64, 128, 192, 512)
    assert seen(True, long) == seen(False, long) and seen(True, short) == seen(False, short)
    for a, b in zip(seen(True, long), seen(True, short), strict=True):
        assert b[0] == a[0] and b[1] <= a[1]
        assert attend is theirs or a == b


@pytest.mark.parametrize("flags", OTHER_VECTORS)
def test_other_vectors_give_the_same_numbers(flags, tmp_path, monkeypatch):
    monkeypatch.setattr(building, "_TUNED", {platform.machine(): (*flags, "-O1")})
    only = {**native._LIBRARIES, "passes": building.Library(("normal",))}  # which is not called
    monkeypatch.setattr(native, "_LIBRARIES", only)
    other = native.load(COMPILER, tmp_path)
    assert other is not None
    monkeypatch.setattr(native, "library", lambda: other)
    for sizes, window in (((80, 64), None), ((13, 72), 100)):
        assert off(attention.attend, made(sizes, 2, WIDE), window, scale=0.15) < CLOSE
