"""Kernels of our own on the device give what the plain twins give on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import strict
import torch
from torch import Tensor

from outsize.kernels import blockwise, grouped
from outsize.kernels.blockwise import Moments, Rates

Bring = Callable[[Tensor], Tensor]
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # of the largest value
DTYPES = tuple(CLOSE)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def agree(found: Iterable[Tensor], wanted: Iterable[Tensor], close: float | None = None) -> None:
    """close: of the largest value; None for that of the dtype, 0 for the same bits."""
    for here, there in zip(found, wanted, strict=True):
        assert here.dtype == there.dtype and here.shape == there.shape
        here, there = here.cpu().double(), there.double()
        allowed = CLOSE.get(there.dtype, 1e-5) if close is None else close
        torch.testing.assert_close(here, there, rtol=0, atol=allowed * float(there.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [64, 100, 4096, 5000])
def test_8_bit_adamw_gives_the_bits_of_the_cpu(dtype: torch.dtype, block: int, device: str) -> None:
    for _ in strict.begins(device, strict.ORDERS[:1]):
        agree(_updated(torch.device(device), dtype, block), _updated(None, dtype, block), 0)


def _updated(device: torch.device | None, dtype: torch.dtype, block: int) -> list[Tensor]:
    """Weights and moments of some updates; None: by the twin on the CPU."""
    w, codes = drawn(10_001, dtype=dtype), torch.zeros(2, 10_001, dtype=torch.uint8)
    codes[0] = blockwise.ZERO
    mean_scale, square_scale = torch.zeros(2, -(-10_001 // block))
    held = [x.to(device or "cpu") for x in (w, codes[0], mean_scale, codes[1], square_scale)]
    moments = Moments(*held[1:])
    for step in range(1, 4):
        g = drawn(10_001, seed=step) * 1e-3
        g[:300] = 0.0
        rates = Rates(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, decay=0.1, step=step)
        if device is None:
            blockwise.plain(held[0], g, moments, block, rates.numbers)
        else:
            blockwise.update(held[0], g.to(device), moments, block, rates)
    return held


@pytest.mark.parametrize("dtype", (torch.float64, *DTYPES), ids=str)
def test_grouped_products_are_those_of_the_cpu(dtype: torch.dtype, device: str) -> None:
    for _ in strict.begins(device, strict.ORDERS[:1]):
        agree(_grouped(lambda x: x.to(device), dtype), _grouped(lambda x: x, dtype), 1e-2)


def _grouped(to: Bring, dtype: torch.dtype) -> list[Tensor]:
    ends = to(grouped.ends_of(torch.tensor([70, 0, 3, 130])))
    x, g = to(drawn(203, 12, dtype=dtype)), to(drawn(203, 20, dtype=dtype, seed=1))
    weight = to(drawn(4, 20, 12, dtype=dtype, seed=2))
    total = to(torch.ones(4, 20, 12, dtype=torch.promote_types(dtype, torch.float32)))
    grouped._add(total, g, x, ends)
    products = ((x, weight), (g, weight.transpose(1, 2)))
    return [*(grouped._product(rows, of, ends) for rows, of in products), total]
