"""The attention of attention.cpp against its definition in float64 and PyTorch's own kernel."""

from __future__ import annotations

import platform
import shutil
from itertools import accumulate

import pytest
import torch
from attended import BOUNDS, OTHER_VECTORS, SEGMENT, TILE, dense, errors, made, results, theirs
from torch._subclasses.fake_tensor import FakeTensorMode

from outsize.kernels import attention, building, native
from outsize.memory import Ledger
from outsize.models import flash
from outsize.models.attention import LocalAttend
from outsize.models.seams import AttendSpec

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ on PATH")


@pytest.fixture(autouse=True)
def built():
    """The session's build."""
    assert native.library() is not None


CASES = [
    *(((64, 64), 4, None), ((80, 80), 2, None), ((96, 96), 4, None), ((128, 128), 2, None)),
    *(((64, 64), 1, 250), ((192, 128), 4, None), ((256, 256), 1, None)),
]


@pytest.mark.parametrize(("sizes", "kv_heads", "window"), CASES)
def test_no_further_from_float64_than_the_kernel_of_pytorch(sizes, kv_heads, window):
    tensors, scale = made(sizes, kv_heads), 1.5 * sizes[0] ** -0.5
    exact = results(dense, [x.double() for x in tensors], scale, window)
    mine = errors(results(attention.attend, tensors, scale, window), exact)
    other = errors(results(theirs, tensors, scale, window), exact)
    for a, b in zip(mine, other, strict=True):
        assert a < 7e-7 and a < 1.25 * b, (mine, other)


def off(tensors, window, bounds, scale=0.5) -> float:
    """The largest error of any element of a result, as a part of the result's largest."""
    exact = results(dense, [x.double() for x in tensors], scale, window, bounds)
    got = results(attention.attend, tensors, scale, window, bounds)
    pairs = zip(got, exact, strict=True)
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs)


# A key too few or too many of a window is a part of 1e-3 and more, float32 sums 6e-7 here.
AROUND = [e + d for e in (SEGMENT, SEGMENT + TILE, 330) for d in (-1, 0, 1, 2)]
TILES = [n * TILE + d for n in (1, 2, 3) for d in range(-2, 4)]


def test_every_window_at_the_edges_of_tiles_and_tasks():
    """Of few keys, and around tiles, a task and a document; the second document begins inside a
    tile of the tokens and ends inside one of its own."""
    bounds = (0, 7, 337)
    tensors = [x[:, : min(2, x.shape[1])] for x in made((4, 6), 1, bounds=bounds)]
    wrong = {w: off(tensors, w, bounds) for w in (*range(1, 20), *TILES, *AROUND)}
    assert max(wrong.values()) < 2e-6, {w: e for w, e in wrong.items() if e >= 2e-6}


@pytest.mark.parametrize(
    ("window", "dtype", "most"),
    [(None, torch.float32, 2e-6), (TILE + 1, torch.float32, 2e-6), (None, torch.bfloat16, 2.0**-7)],
)
def test_every_length_around_the_edges_of_tiles_and_tasks(window, dtype, most):
    edges = (*range(1, TILE + 4), *TILES[6:], 2 * SEGMENT - 1, 2 * SEGMENT + 1)
    bounds = tuple(accumulate((*edges, *AROUND), initial=0))
    assert off(made((5, 3), 2, dtype, bounds), window, bounds) < most


def test_every_size_of_heads_and_every_group_of_them():
    """Sizes around a vector and around what a sum in float32 is long (TERMS)."""
    bounds = (0, 3, 70)
    for size in (*range(1, 35), 63, 64, 65, 127, 128, 129, 255, 256):
        for sizes, groups in (((size, 3), 4), ((2, size), 2), ((size, 257 - size), 1)):
            assert off(made(sizes, groups, bounds=bounds), 50, bounds, size**-0.5) < 2e-6, sizes


@pytest.mark.parametrize("window", [None, TILE + 3])
def test_queries_that_begin_anywhere(window):
    """As a chunk of a row, or the part of a worker of the context axis: keys of all tokens, queries
    of those from some place on."""
    bounds = (0, 9, 150)
    q, k, v, pull = made((4, 6), 2, bounds=bounds)
    whole = [x.double() for x in (q, k, v)]
    for first in (*range(1, 12), *range(TILE + 5, TILE + 14), 2 * TILE + 8, 2 * TILE + 9, 149):
        masked = pull.double().index_fill(0, torch.arange(first), 0.0)
        exact = results(dense, [*whole, masked], 0.5, window, bounds)
        own = AttendSpec(0, 0.5, window, first_query=first)
        here = [x.detach().requires_grad_() for x in (q[first:], k, v)]
        output = LocalAttend()(*here, bounds, own)
        got = [output.detach(), *torch.autograd.grad(output, here, pull[first:])]
        expected = [exact[0][first:], exact[1][first:], *exact[2:]]
        assert max(errors(got, expected)) < 1e-6, first


@pytest.mark.parametrize("window", [None, 40])
def test_bfloat16_is_rounded_once(window):
    """Inputs are read as float32, so that only the results lose bits: half a unit, 2^-9, at most;
    the backward reads the rounded output."""
    tensors = made((64, 64), 2, torch.bfloat16)
    exact = results(dense, [x.double() for x in tensors], 0.125, window)
    got = results(attention.attend, tensors, 0.125, window)
    assert all(x.dtype == torch.bfloat16 for x in got)
    assert max(errors(got, exact)) < 2.0**-8 and errors(got, exact)[0] < 2.0**-9


def test_it_serves_the_decoder_and_no_other_path_ran(monkeypatch):
    monkeypatch.setattr(flash, "_Flash", None)
    tensors = made((16, 16), 2)
    got = results(flash.flash, tensors, 0.25, None)
    same = results(attention.attend, tensors, 0.25, None)
    assert all(map(torch.equal, got, same))


@pytest.mark.parametrize(("kv_heads", "bounds"), [(2, BOUNDS), (1, (0, 1800))])
def test_bitwise_the_same_every_time_whatever_the_threads(kv_heads, bounds):
    """Also of one key head and one document, whose tasks could meet."""
    tensors, threads = made((32, 32), kv_heads, bounds=bounds), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        first = results(attention.attend, tensors, 0.125, None, bounds)
        for count in (2, 3, 4, 2, 3, 4):
            torch.set_num_threads(count)
            again = results(attention.attend, tensors, 0.125, None, bounds)
            assert all(map(torch.equal, first, again))
    finally:
        torch.set_num_threads(threads)


def test_a_document_is_alone():
    """Bitwise what it gives by itself; what is no number in another stays there."""
    q, k, v, pull = made((32, 32), 2)
    alone = results(attention.attend, [x[300:600] for x in (q, k, v, pull)], 0.2, None, (0, 300))
    for x in (q, k, v, pull):
        x[:300] = float("nan")
        x[600:] = float("inf")
    together = results(attention.attend, [q, k, v, pull], 0.2, None)
    assert all(torch.equal(a, b[300:600]) for a, b in zip(alone, together, strict=True))
    assert together[0][:300].isnan().all()


def test_a_token_does_not_see_later_ones():
    q, k, v, _ = made((32, 32), 2)
    before = attention.attend(q, k, v, BOUNDS, 0.2, None)
    k[450:600], v[450:600] = 7.0, -3.0
    after = attention.attend(q, k, v, BOUNDS, 0.2, None)
    assert torch.equal(before[:450], after[:450]) and not torch.equal(before, after)


def test_scores_far_apart_stay_numbers():
    """Weights of one and nothing, as in float64."""
    q, k, v, pull = made((64, 64), 2)
    tensors = [q * 300, k * 300, v, pull]
    exact = results(dense, [x.double() for x in tensors], 0.125, None)
    got = results(attention.attend, tensors, 0.125, None)
    assert all(x.isfinite().all() for x in got)
    assert errors(got[:1], exact[:1])[0] < 0.01  # scores of 1e6 are known to 0.1


def test_heads_may_lie_apart():
    q, k, v, pull = made((16, 16), 2)
    plain = results(attention.attend, [q, k, v, pull], 0.3, None)
    both = torch.cat((k, v), -1)  # as latent attention splits them
    apart = [
        q.transpose(0, 1).contiguous().transpose(0, 1), both[..., :16], both[..., 16:],
        pull.transpose(1, 2).contiguous().transpose(1, 2),
    ]  # fmt: skip
    assert not any(x.is_contiguous() for x in apart)
    assert all(map(torch.equal, plain, results(attention.attend, apart, 0.3, None)))
    shared = [q, k[:, :1].expand(-1, 2, -1), v, pull]
    copies = [x.contiguous() for x in shared]
    pairs = (results(attention.attend, x, 0.3, None) for x in (shared, copies))
    assert all(map(torch.equal, *pairs))


def test_what_it_does_not_take():
    q, k, v, _ = made((16, 16), 2)
    assert attention.fits(q, k, v) and attention.fits(*(x.bfloat16() for x in (q, k, v)))
    for other in (
        q.double(), q.half(), q.to("meta"), q.bfloat16(),
        q.transpose(1, 2).contiguous().transpose(1, 2), torch.zeros(1125, 4, 257),
    ):  # fmt: skip
        assert not attention.fits(other, k, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_tensors_allocate_what_real_ones_do(dtype):
    def seen(fake: bool) -> list[tuple[int, int]]:
        with FakeTensorMode() if fake else torch.enable_grad():
            shapes = ((1125, 4, 8), (1125, 2, 8), (1125, 2, 6))
            inputs = [torch.ones(x, dtype=dtype).requires_grad_() for x in shapes]
            ledger = Ledger()
            with ledger:
                output = attention.attend(*inputs, BOUNDS, 0.3, None)
                points = [(ledger.total, ledger.peak)]
                output.sum().backward()
            return [*points, (ledger.total, ledger.peak)]

    assert seen(fake=True) == seen(fake=False)


def test_a_gradient_of_a_gradient_is_refused():
    q, k, v, _ = made((8, 8), 2)
    output = attention.attend(q.requires_grad_(), k, v, BOUNDS, 0.3, None)
    (first,) = torch.autograd.grad(output.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_no_tokens_and_empty_documents():
    for bounds in ((0,), (0, 0)):
        q, k, v, pull = (x[:0] for x in made((8, 8), 2))
        got = results(attention.attend, [q, k, v, pull], 0.3, None, bounds)
        assert [x.shape for x in got] == [(0, 4, 8), (0, 4, 8), (0, 2, 8), (0, 2, 8)]


@pytest.mark.parametrize("flags", OTHER_VECTORS)
def test_other_vectors_give_the_same_numbers(flags, tmp_path, monkeypatch):
    """The narrower vectors of other processors, and those that every one has. They are the source's
    own, so that the compiler need not look for any: -O1 takes half the time."""
    monkeypatch.setattr(building, "_TUNED", {platform.machine(): (*flags, "-O1")})
    only = {**native._LIBRARIES, "passes": building.Library(("attention",))}
    only["training"] = building.Library(("attention",), native._LIBRARIES["training"].flags)
    monkeypatch.setattr(native, "_LIBRARIES", only)
    other = native.load(COMPILER, tmp_path)
    assert other is not None
    monkeypatch.setattr(native, "library", lambda: other)
    for sizes, window in (((80, 64), None), ((64, 72), 100)):
        tensors = made(sizes, 2)
        exact = results(dense, [x.double() for x in tensors], 0.15, window)
        assert max(errors(results(attention.attend, tensors, 0.15, window), exact)) < 7e-7
