"""Products by oneDNN against float64 and against MKL, and when they are taken."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from outsize.kernels import product

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
