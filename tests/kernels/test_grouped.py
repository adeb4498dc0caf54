"""Grouped products against a product a weight: the twin on the host, PyTorch's kernel, Triton's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from interpreting import interpret, interpreted
from torch import Tensor

from outsize.kernels import native
from outsize.kernels.grouped import by_pytorch, ends_of, grouped, served
from outsize.simulate.counter import Counter

SIZES = ((3, 0, 7, 1, 0, 5), (0, 0, 0, 16, 0, 0), (16,), (1, 2, 3, 4, 6))
ops = torch.ops.outsize


def given(sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, weights, and where the rows of each end."""
    draw = torch.Generator().manual_seed(0)
    x_NI = torch.randn(sum(sizes), 12, generator=draw, dtype=torch.float64)
    weight_EOI = torch.randn(len(sizes), 20, 12, generator=draw, dtype=torch.float64)
    return x_NI.to(dtype), weight_EOI.to(dtype), ends_of(torch.tensor(sizes))


def one_by_one(x_NI: Tensor, weight_EOI: Tensor, sizes: tuple[int, ...]) -> Tensor:
    pieces = zip(x_NI.split(sizes), weight_EOI, strict=True)
    return torch.cat([x @ weight.t() for x, weight in pieces])


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("sinks", [False, True], ids=["autograd", "a sink"])
@pytest.mark.parametrize("learns", ["both", "rows", "weights"])
def test_values_and_gradients_are_those_of_a_product_a_weight(sizes, sinks, learns) -> None:
    x, weight, ends = given(sizes, torch.float64)
    x.requires_grad_(learns != "weights")
    weight.requires_grad_(learns != "rows")
    over = [one for one in (x, weight) if one.requires_grad]
    pull = torch.randn(len(x), 20, dtype=torch.float64)
    y = one_by_one(x, weight, sizes)
    wanted = torch.autograd.grad(y, over, pull)
    taken = torch.zeros_like(weight)

    def sink(owner: Tensor, compute: Callable[[Tensor], None]) -> None:
        assert owner is weight and weight.requires_grad
        compute(taken)

    found = grouped(x, weight, ends, sink if sinks else None)
    found.backward(pull)
    torch.testing.assert_close(found, y, rtol=0, atol=1e-12)
    gradients = {id(x): x.grad, id(weight): taken if sinks else weight.grad}
    for one, want in zip(over, wanted, strict=True):
        torch.testing.assert_close(gradients[id(one)], want, rtol=0, atol=1e-12)
    assert not sinks or weight.grad is None


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_pytorch_is_asked_for_is_the_same(sizes, dtype) -> None:
    """Its kernel for processors, which takes what that of a GPU takes."""
    x, weight, ends = given(sizes, dtype)
    x, weight = (torch.nn.functional.pad(one, (0, 4)) for one in (x, weight))  # rows of 16 bytes
    g = torch.randn(len(x), 24).to(dtype)
    weight = torch.nn.functional.pad(weight, (0, 0, 0, 4))
    for rows, weights in ((x, weight), (g, weight.transpose(1, 2))):
        wanted = ops.grouped(rows, weights, ends)
        torch.testing.assert_close(by_pytorch(rows, weights, ends), wanted)


def as_a_gpu_does() -> None:
    """The kernels of a GPU beside the twins."""
    kernels = native.kernels("grouped")
    for dtype in (torch.float64, torch.float32, torch.float16):
        wide = torch.promote_types(dtype, torch.float32)
        for sizes in ((70, 0, 3, 130, 0), (1,)):
            x, weight, ends = given(sizes, dtype)
            g = torch.randn(len(x), 20, dtype=torch.float64).to(dtype)
            for rows, weights in ((x, weight), (g, weight.transpose(1, 2))):
                y = torch.empty(len(x), weights.shape[1], dtype=dtype)
                kernels.product(rows, weights, ends, y)
                torch.testing.assert_close(y, ops.grouped(rows, weights, ends))
            total, wanted = torch.ones(2, *weight.shape, dtype=wide)
            kernels.add(total, g, x, ends)
            ops.grouped_add(wanted, g, x, ends)
            close = {"rtol": 1e-2, "atol": 5e-2} if dtype == torch.float16 else {}
            torch.testing.assert_close(total, wanted, **close)


@interpreted
def test_the_kernels_of_a_gpu_give_the_same() -> None:
    interpret(__file__, "as_a_gpu_does")


def test_rows_are_counted_once_whoever_takes_them() -> None:
    x, weight, ends = given(SIZES[0], torch.float64)
    x.requires_grad_()
    weight.requires_grad_()
    with Counter() as counter:
        grouped(x, weight, ends, None).sum().backward()
    assert counter.work.flops() == 3 * 2 * len(x) * 20 * 12


def test_the_host_multiplies_one_by_one() -> None:
    assert not served(torch.device("cpu")) and not served(torch.device("meta"))
