"""Local attention against a dense softmax over each document, for every path through it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from outsize.models.attention import LocalAttend
from outsize.models.layout import CHUNK_LEAST, chunks, runs
from outsize.models.seams import AttendSpec

LENGTHS = (300, 300, 7, 1, 517)  # two alike, tiny ones, one over two chunks
BOUNDS = (0, 300, 600, 607, 608, 1125)


def dense(q: Tensor, k: Tensor, v: Tensor, bounds: tuple[int, ...], spec: AttendSpec) -> Tensor:
    """Attention as its definition reads, over all S x S scores of each document."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    documents = (slice(*ends) for ends in pairwise(bounds))
    return torch.cat([whole(q[one], k[one], v[one], spec) for one in documents])


def whole(q: Tensor, k: Tensor, v: Tensor, spec: AttendSpec) -> Tensor:
    """The same of one document."""
    query, key = torch.arange(len(q))[:, None], torch.arange(len(q))[None]
    seen = key <= query
    if spec.window is not None:
        seen &= query - key < spec.window
    score = torch.einsum("thk,shk->hts", q, k) * spec.scale
    if spec.softcap is not None:
        score = spec.softcap * torch.tanh(score / spec.softcap)
    weight = score.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hts,shw->thw", weight, v)


def inputs(dtype: torch.dtype, sizes: tuple[int, int], kv_heads: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((1125, 4, sizes[0]), (1125, kv_heads, sizes[0]), (1125, kv_heads, sizes[1]))
    made = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [x.to(dtype).requires_grad_() for x in made]


@pytest.mark.parametrize(
    ("window", "softcap"),
    [(None, None), (None, 2.0), (1, None), (5, 2.0), (250, None), (257, 2.0), (516, None),
     (9999, 2.0)],
)  # fmt: skip
def test_windows_and_caps(window: int | None, softcap: float | None) -> None:
    spec = AttendSpec(0, 0.4, window, softcap)
    compare(inputs(torch.float64, (6, 6)), spec)


@pytest.mark.parametrize(
    ("sizes", "window", "softcap"),
    [((6, 4), None, None), ((6, 4), 40, 2.0), ((4, 6), None, 2.0), ((4, 6), 40, None)],
)
def test_value_size_of_its_own(
    sizes: tuple[int, int], window: int | None, softcap: float | None
) -> None:
    compare(inputs(torch.float64, sizes), AttendSpec(0, 0.4, window, softcap))


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_one_key_head_and_as_many_as_queries(softcap: float | None) -> None:
    for kv_heads in (1, 4):
        compare(inputs(torch.float64, (6, 6), kv_heads), AttendSpec(0, 0.4, 40, softcap))


def compare(tensors: list[Tensor], spec: AttendSpec) -> None:
    """Output and gradients of LocalAttend and of the definition."""
    expected = dense(*tensors, BOUNDS, spec)
    got = LocalAttend()(*tensors, BOUNDS, spec)
    pull = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, tensors, pull)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(torch.autograd.grad(got, tensors, pull), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 40])
def test_half_precision_is_near_float64(window: int | None, softcap: float | None) -> None:
    """bfloat16 keeps 8 bits: outputs of size one within a few of its last ones."""
    spec = AttendSpec(0, 0.4, window, softcap)
    halves = inputs(torch.bfloat16, (8, 8))
    expected = dense(*(x.detach().double() for x in halves), BOUNDS, spec)
    got = LocalAttend()(*halves, BOUNDS, spec)
    assert got.dtype == torch.bfloat16
    assert (got.double() - expected).abs().max() < 0.03
    assert all(g.dtype == torch.bfloat16 for g in torch.autograd.grad(got.sum(), halves))


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operator gives."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return out


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_window_costs_its_width(softcap: float | None) -> None:
    tokens, window = 6000, 32
    q, k, v = (torch.randn(tokens, 1, 4, requires_grad=True) for _ in range(3))
    with Largest() as largest:
        attended = LocalAttend()(q, k, v, (0, tokens), AttendSpec(0, 0.5, window, softcap))
        attended.sum().backward()
    assert largest.elements <= CHUNK_LEAST * (CHUNK_LEAST + window)
    pairs = sum((stop - start) * (stop - low) for start, stop, low in chunks(tokens, window))
    assert pairs <= tokens * (CHUNK_LEAST + window)


def test_capped_scores_exist_a_chunk_at_a_time() -> None:
    tokens = 4096
    q, k, v = (torch.randn(tokens, 1, 4, requires_grad=True) for _ in range(3))
    with Largest() as largest:
        LocalAttend()(q, k, v, (0, tokens), AttendSpec(0, 0.5, None, 2.0)).sum().backward()
    assert largest.elements <= tokens * tokens // 4


def test_runs_group_equal_neighbours() -> None:
    assert list(runs(BOUNDS)) == [(0, 2, 300), (600, 1, 7), (607, 1, 1), (608, 1, 517)]
    assert list(runs((0,))) == []


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 40])
def test_shapes_without_values(window: int | None, softcap: float | None) -> None:
    with FakeTensorMode():
        q, k, v = inputs_like(((1125, 4, 8), (1125, 2, 8), (1125, 2, 6)))
        o = LocalAttend()(q, k, v, BOUNDS, AttendSpec(0, 0.4, window, softcap))
        o.sum().backward()
        assert o.shape == (1125, 4, 6)
        assert q.grad is not None and q.grad.shape == q.shape


def inputs_like(shapes: tuple[tuple[int, ...], ...]) -> Iterator[Tensor]:
    return (torch.empty(shape, requires_grad=True) for shape in shapes)


@pytest.mark.parametrize("window", [None, 40])
def test_key_heads_are_repeated_where_no_kernel_shares_them(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outsize.models.attention._shares_heads", lambda q, mask: False)
    compare(inputs(torch.float64, (6, 6)), AttendSpec(0, 0.4, window))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 40])
def test_on_a_gpu_without_waiting_for_it(
    window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    spec = AttendSpec(0, 0.4, window, softcap)
    host = inputs(dtype, (8, 8))
    there = [x.detach().cuda().requires_grad_() for x in host]
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = LocalAttend()(*there, BOUNDS, spec)
        got.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = dense(*(x.detach().double() for x in host), BOUNDS, spec)
    limit = 1e-4 if dtype == torch.float32 else 0.03
    assert (got.double().cpu() - expected).abs().max() < limit
