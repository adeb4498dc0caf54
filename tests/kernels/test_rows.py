"""Products and attention of each token alone: right, and the same bits in any company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outsize.kernels import native, product, rows
from outsize.models.coding import Grid, format_of

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C++ compiler")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LARGEST = {torch.float32: 1e-6, torch.bfloat16: 5e-3}  # relative to the largest of the result


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("sizes", [(1, 5, 3), (7, 64, 33), (130, 50, 70), (4, 1000, 65)], ids=str)
def test_products_are_right_and_know_nobody(name: str, sizes: tuple[int, int, int]) -> None:
    tokens, inner, outputs = sizes
    dtype = DTYPES[name]
    x, w, b = (_random(*s).to(dtype) for s in ((tokens, inner), (outputs, inner), (outputs,)))
    with torch.no_grad(), rows.alone():
        y = product.linear(x, w, b)
    expected = x.double() @ w.double().T + b.double()
    assert float((y - expected).abs().max() / expected.abs().max()) < LARGEST[dtype]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for first, last in ((0, 1), (tokens // 2, tokens), (tokens - 1, tokens)):
            some = rows.linear(x[first:last].contiguous(), w, b)
            assert torch.equal(some, y[first:last])
        few = slice(outputs // 3, outputs // 2 + 1)  # nor do outputs
        assert torch.equal(rows.linear(x, w[few].contiguous(), b[few].contiguous()), y[:, few])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("form", ["int8", "int4", "int8:64", "int4:64", "nf4", "q8_0", "q4_0"])
def test_products_by_codes_are_those_by_what_they_stand_for(name: str, form: str) -> None:
    dtype, found, (outputs, inner) = DTYPES[name], format_of(form), (21, 192)
    codes, shared = found.encode(_random(outputs, inner))
    grid = Grid(inner // found.group)
    laid, weight = found.laid(codes, shared, grid), found.decode(codes, shared, grid, dtype)
    assert laid is not None and laid.ready
    bias = _random(outputs, seed=1).to(dtype)
    for tokens in (1, 2, 3, 5, 6, 7, 8, 70):
        x = _random(tokens, inner, seed=tokens).to(dtype)
        assert torch.equal(rows.by_codes(x, laid, outputs, bias), rows.linear(x, weight, bias))


def test_the_way_is_taken_where_it_is_asked_for_alone() -> None:
    x, w = _random(3, 8), _random(4, 8)
    with torch.no_grad():
        assert not rows.wanted(x, w)
        with rows.alone():
            assert rows.wanted(x, w) and not rows.wanted(x.double(), w.double())
        assert not rows.wanted(x, w)
    with rows.alone():
        assert not rows.wanted(x, w)  # gradients are recorded
