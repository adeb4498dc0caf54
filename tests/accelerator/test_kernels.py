"""Kernels of our own on the device give what the plain twins give on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import strict
import torch
from torch import Tensor

from outsize import accelerator
from outsize.kernels import blockwise, gate, grouped, loss, native, norm, rope
from outsize.kernels.blockwise import Moments, Rates
from outsize.kernels.linear import add_product
from outsize.kernels.loss import Head, Targets

Bring = Callable[[Tensor], Tensor]
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # of the largest value
DTYPES = tuple(CLOSE)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def agree(found: Iterable[Tensor], wanted: Iterable[Tensor], close: float | None = None) -> None:
    """close: of the largest value; None for that of the dtype, 0 for the same bits."""
    for here, there in zip(found, wanted, strict=True):
        assert here.dtype == there.dtype and here.shape == there.shape
        allowed = CLOSE.get(there.dtype, 1e-5) if close is None else close
        here, there = here.cpu().double(), there.double()
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


OPERATORS = ("rms_norm", "rms_norm_backward", "turn", "gate", "gate_backward", "cross_entropy")


def _norm(to: Bring, dtype: torch.dtype, size: int = 2048, count: int = 300) -> list[Tensor]:
    x, g = (to(drawn(count, size, dtype=dtype, seed=seed)) for seed in range(2))
    weight = to(drawn(size, dtype=dtype, seed=2))
    y, inverse = norm._normed(x, weight, 1e-6, 1.0)
    backward = torch.ops.outsize.rms_norm_backward.default
    if not native.fits(x, by="rms_norm_backward"):
        backward = norm.plain_backward
    return [y, inverse, *backward(g, x, weight, inverse, 1.0, True, True)]


def _turn(to: Bring, dtype: torch.dtype) -> list[Tensor]:
    cos, sin = (to(drawn(50, 32, seed=seed)) for seed in range(2))
    apart = to(drawn(5, 50, 80, dtype=dtype, seed=2)).transpose(0, 1)[..., :75]
    return [
        rope._turned(x, cos, sin, interleaved, sign)
        for x in (apart, apart.contiguous())
        for interleaved in (False, True)
        for sign in (1.0, -1.0)
    ]


def _gate(to: Bring, dtype: torch.dtype) -> list[Tensor]:
    g, x, up = (to(drawn(301, 37, dtype=dtype, seed=seed)) for seed in range(3))
    y = gate._made(x, up, gate.SILU)
    if native.alike(g, x, up, by="gate_backward"):
        return [y, *torch.ops.outsize.gate_backward.default(g, x, up)]
    return [y, *gate.plain_backward(g, x, up, gate.SILU)]


def _entropy(to: Bring, dtype: torch.dtype) -> list[Tensor]:
    made, ids = [], torch.arange(37) * 7
    ids[1::5] = loss.IGNORE
    for gradient in (True, False):
        for weights in (None, drawn(37, seed=1).abs()):
            logits = to(drawn(37, 9001, dtype=dtype))
            targets = Targets(to(ids), None if weights is None else to(weights))
            head = Head(0.125, 64, None)
            there = native.served(logits, by="cross_entropy")
            if not there and logits.dtype != torch.float64:  # the twin's are float32 at least
                logits = logits.float()
            made.append((head.fused if there else head.entropy)(logits, targets, gradient))
            made += [logits.to(dtype)] if gradient else []
    return made


PASSES: dict[str, Callable[[Bring, torch.dtype], list[Tensor]]] = {
    "RMS norm": _norm,
    "RMS norm of heads": lambda to, dtype: _norm(to, dtype, 64, 3001),
    "turn": _turn,
    "gate": _gate,
    "cross-entropy": _entropy,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(PASSES))
def test_a_pass_gives_what_its_twin_does(name: str, dtype: torch.dtype, device: str) -> None:
    """The twin in float64, on the CPU. Where there is a kernel it runs, and twice gives the same
    bits."""
    run = PASSES[name]
    for _ in strict.begins(device, strict.ORDERS[:1]):
        with torch.no_grad():
            first, second = (run(lambda x: x.to(device), dtype) for _ in range(2))
            wanted = run(lambda x: x.double() if x.is_floating_point() else x, dtype)
        for here, again, there in zip(first, second, wanted, strict=True):
            assert torch.equal(here.cpu(), again.cpu())
            agree([here.cpu()], [there.to(here.dtype)])


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_products_are_added_to_wider_gradients(dtype: torch.dtype, device: str) -> None:
    """On a GPU as they are: a product that is rounded first is off by a hundred times as much."""
    close = 1e-5 if device == "cuda" else 1e-2
    for _ in strict.begins(device, strict.ORDERS[:1]):
        a, b, total = drawn(64, 40, dtype=dtype), drawn(64, 24, dtype=dtype), drawn(41, 24)
        grad = total.to(device)[1:]
        for _ in range(2):
            with torch.no_grad():
                add_product(grad, a.to(device).t(), b.to(device))
        agree([grad], [(total[1:].double() + 2 * (a.double().t() @ b.double())).float()], close)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_device_that_triton_compiles_for_has_a_kernel(name: str, device: str) -> None:
    for _ in strict.begins(device, strict.ORDERS[:1]):
        x = torch.ones(1, device=device)
        there = device in accelerator.COMPILED and native.compiles()
        with torch.no_grad():
            assert native.fits(x, by=name) == there and not native.fits(x.double(), by=name)
