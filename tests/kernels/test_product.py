"""Products by oneDNN against float64 and against MKL, and when they are taken."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from outsize.kernels import product
from outsize.kernels.linear import add_product

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN"
)


@pytest.fixture(params=[True, False])
def preferred(request, monkeypatch) -> bool:
    monkeypatch.setattr(product, "_preferred", lambda: request.param)
    monkeypatch.setattr(product, "LEAST", 1)
    with torch.no_grad():
        yield request.param


def near(got, exact) -> bool:
    return float((got.double() - exact).norm() / exact.norm()) < 1e-6


@needs_onednn
@pytest.mark.parametrize("shape", [(1, 3, 2), (64, 96, 33), (130, 384, 257)])
def test_every_form_is_float64s(preferred, shape):
    M, I, N = shape  # noqa: E741
    a, b, bias, total = torch.randn(M, I), torch.randn(I, N), torch.randn(N), torch.randn(M, N)
    exact = a.double() @ b.double()
    for left, right in ((a, b), (a.t().contiguous().t(), b.t().contiguous().t())):
        assert near(product.product(left, right), exact)
        assert near(product.linear(left, right.t(), bias), exact + bias.double())
        out, sum_ = torch.empty(M, N), total.clone()
        product.put_product(left, right, out)
        product.add_product(sum_, left, right)
        assert near(out, exact) and near(sum_, exact + total.double())
    deep = product.linear(a.view(1, M, I), b.t(), bias)
    assert deep.shape == (1, M, N) and near(deep[0], exact + bias.double())


@needs_onednn
@pytest.mark.parametrize("shape", [(4099, 3, 300), (300, 3, 4099), (4500, 2, 1)])
def test_results_of_more_than_one_part(preferred, shape):
    """More rows, or columns, than are put at once, and than 4,096 tokens."""
    M, I, N = shape  # noqa: E741
    a, b, out = torch.randn(M, I), torch.randn(I, N), torch.full((M, N), float("nan"))
    assert M * N > product.PART or N == 1
    product.put_product(a, b, out)
    total = a @ b
    product.add_product(total, a, b)
    assert near(out, a.double() @ b.double()) and near(total, 2 * (a.double() @ b.double()))


@needs_onednn
def test_the_same_every_time(preferred):
    a, b = torch.randn(700, 300), torch.randn(300, 200)
    assert torch.equal(product.product(a, b), product.product(a, b))


@needs_onednn
def test_shapes_without_values(preferred):
    with FakeTensorMode():
        x, w = torch.empty(4, 6, 8), torch.empty(5, 8)
        assert product.linear(x, w, torch.empty(5)).shape == (4, 6, 5)
        assert product.product(x, torch.empty(8, 3)).shape == (4, 6, 3)


def test_what_stays_with_pytorch(monkeypatch):
    monkeypatch.setattr(product, "_preferred", lambda: True)
    big, small = torch.randn(256, 256), torch.randn(8, 8)
    with torch.no_grad():
        assert product._fits(big, big, 256) and not product._fits(small, small, 8)
        assert not product._fits(big.double(), big.double(), 256)
        assert not product._fits(big.bfloat16(), big.bfloat16(), 256)
    assert not product._fits(big, big, 256), "autograd would not see it"


@pytest.mark.parametrize("turned", [False, True])
def test_products_of_bfloat16_are_of_tiles_in_float32(monkeypatch, turned):
    """Where the processor has none of its own: rounded once, so that they are PyTorch's own of
    float32, rounded; with several tiles either way, the last of each smaller."""
    monkeypatch.setattr(product, "_imitated", lambda: True)
    monkeypatch.setattr(product, "LEAST", 1)
    monkeypatch.setattr(product, "ROWS", 50)
    monkeypatch.setattr(product, "WIDE", 96 * 20)
    a, b, bias, total = (
        torch.randn(*n).bfloat16() for n in ((130, 96), (96, 70), (70,), (130, 70))
    )
    if turned:
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
    exact, half = a.double() @ b.double(), 2.0**-8 + 1e-5  # a last place of bfloat16, halved
    with torch.no_grad():
        out, narrow, wide = torch.empty(130, 70).bfloat16(), total.clone(), total.float()
        product.put_product(a, b, out)
        add_product(narrow, a, b)
        add_product(wide, a, b)
        found = {
            "product": (product.product(a, b), exact),
            "linear": (product.linear(a.view(2, 65, 96), b.t(), bias).view(130, 70), exact + bias),
            "put": (out, exact),
            "narrow": (narrow, exact + total),
        }
    for name, (got, right) in found.items():
        assert got.dtype is torch.bfloat16, name
        assert bool(((got.double() - right).abs() <= half * right.abs() + 1e-4).all()), name
    assert wide.dtype is torch.float32 and near(wide, exact + total)


def test_which_processors_multiply_bfloat16(monkeypatch):
    for facts, imitated in (({"avx2", "avx512f"}, True), ({"avx512_bf16"}, False), ({""}, False)):
        monkeypatch.setattr(product, "_facts_of_processor", lambda facts=facts: facts)
        assert product._imitated.__wrapped__() == imitated
    few = torch.randn(4, 4096).bfloat16()
    monkeypatch.setattr(product, "_imitated", lambda: True)
    with torch.no_grad():
        assert not product.widens(few, few.t(), 4096), "its weight is read once"
        assert product.widens(few.view(64, 256), few, 4096)
    assert not product.widens(few.view(64, 256), few, 4096), "autograd would not see it"
