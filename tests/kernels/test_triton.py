"""Triton's kernels against the plain twins: its interpreter runs them on the host."""

from __future__ import annotations

import torch
from interpreting import interpret, interpreted
from torch import Tensor

from outsize.kernels import blockwise, gate, loss, native, norm, rope
from outsize.kernels.blockwise import Moments, Rates
from outsize.kernels.loss import Targets

# Of the largest value: what one rounding may be off. The interpreter's bfloat16 is cut off.
CLOSE = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 8e-3}


def near(found: Tensor, exact: Tensor) -> None:
    allowed = CLOSE[found.dtype] * float(exact.abs().max())
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=allowed)


def of(dtype: torch.dtype, *shape: int) -> list[Tensor]:
    return list(torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype))


def moments(count: int, block: int, draw: torch.Generator) -> Moments:
    """Of some updates before."""
    blocks = -(-count // block)
    codes = torch.randint(0, 256, (2, count), generator=draw).to(torch.uint8)
    scales = torch.rand(2, blocks, generator=draw)
    scales[:, -1] = 0.0
    return Moments(codes[0], scales[0], codes[1], scales[1])


def blockwise_adam() -> None:
    draw = torch.Generator().manual_seed(0)
    rates = Rates(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, decay=0.1, step=3)
    for count, block in ((1, 1), (300, 64), (1000, 100), (5000, 4096)):
        for held, given in ((torch.float32, torch.bfloat16), (torch.float16, torch.float32)):
            w = torch.randn(count, generator=draw).to(held)
            g = (torch.randn(count, generator=draw) * 1e-3).to(given)
            g[: count // 3] = 0.0
            before = moments(count, block, draw)
            states = [before.mean, before.mean_scale, before.square, before.square_scale]
            wanted, found = ([x.clone() for x in (w, *states)] for _ in range(2))
            blockwise.plain(wanted[0], g, Moments(*wanted[1:]), block, rates.numbers)
            native.kernels("blockwise").update(
                found[0], g, (found[1], found[2]), (found[3], found[4]),
                blockwise._tables_on(torch.device("cpu")), block, rates.numbers,
            )  # fmt: skip
            for a, b in zip(found, wanted, strict=True):
                assert torch.equal(a, b), (count, block, held)


def rms_norm() -> None:
    kernels = native.kernels()
    for dtype in CLOSE:
        for count, size in ((1, 5), (600, 33), (7, 3000)):
            for held in {dtype, torch.float32}:
                (x, g), (weight,) = of(dtype, 2, count, size), of(held, 1, size)
                y, inverse = norm._allocate(x, weight, 1e-6, 1.0)
                kernels.rms_norm(x, weight, 1e-6, 1.0, y, inverse)
                exact = [t.double() for t in (x, weight)]
                wanted, root = norm.plain(*exact, 1e-6, 1.0)
                near(y, wanted)
                near(inverse, root)
                twins = norm.plain_backward(g.double(), *exact, root, 1.0, True, True)
                for wants in ((True, True), (True, False), (False, True)):
                    made = norm._allocate_backward(g, x, weight, inverse, 1.0, *wants)
                    into = [t if want else None for t, want in zip(made, wants, strict=True)]
                    kernels.rms_norm_backward((g, x, inverse), weight, 1.0, *into)
                    for gradient, twin in zip(into, twins, strict=True):
                        if gradient is not None:
                            near(gradient, twin)


def turn() -> None:
    for dtype in CLOSE:
        for heads, size, pairs in ((3, 6, 3), (1, 2, 1), (40, 130, 64)):
            (cos, sin), (whole,) = of(torch.float32, 2, 3, pairs), of(dtype, 1, 3, heads, size)
            (wide,) = of(dtype, 1, heads, 3, size + 2)
            for x in (whole, wide.transpose(0, 1)[..., :size]):
                for interleaved, sign in ((False, 1.0), (True, 1.0), (False, -1.0)):
                    y = rope._allocate(x, cos, sin, interleaved, sign)
                    native.kernels().turn(x, cos, sin, interleaved, sign, y)
                    exact = [t.double() for t in (x, cos, sin)]
                    near(y, rope.plain(*exact, interleaved, sign))
                    assert torch.equal(y[..., 2 * pairs :], x[..., 2 * pairs :])


def gated() -> None:
    for dtype in CLOSE:
        for count in (1, 1024, 3001):
            x, up, g = of(dtype, 3, count)
            exact = [t.double() for t in (x, up)]
            y, (ggate, gup) = torch.empty_like(x), (torch.empty_like(x), torch.empty_like(x))
            native.kernels().gate(x, up, y)
            native.kernels().gate_backward(g, x, up, ggate, gup)
            near(y, gate.plain(*exact, gate.SILU))
            twins = gate.plain_backward(g.double(), *exact, gate.SILU)
            near(ggate, twins[0])
            near(gup, twins[1])


def cross_entropy() -> None:
    for dtype in CLOSE:
        for count, size, weighed in ((1, 2, False), (7, 1025, True), (3, 9000, False)):
            (logits,) = of(dtype, 1, count, size)
            targets = torch.arange(count) * 3 % size
            targets[1::5] = -100
            weights = torch.rand(count) + 0.5 if weighed else None
            exact, got, total = logits.double(), logits.clone(), torch.empty(())
            wanted = loss.plain(exact, Targets(targets, weights), 0.125, True)
            native.kernels().cross_entropy(got, targets, 0.125, False, weights, total)
            assert abs(float(total / wanted) - 1) < 2e-6 and torch.equal(got, logits)
            native.kernels().cross_entropy(got, targets, 0.125, True, weights, total)
            assert abs(float(total / wanted) - 1) < 2e-6
            near(got, exact)
            assert not got[targets == -100].any()
            targets[0] = size  # no token: the host does not look
            native.kernels().cross_entropy(got, targets, 0.125, True, weights, total)
            assert total.isnan()


KERNELS = (blockwise_adam, rms_norm, turn, gated, cross_entropy)


def as_a_gpu_does() -> None:
    """Every kernel, in a process whose Triton interprets."""
    for run in KERNELS:
        run()


@interpreted
def test_the_kernels_of_a_gpu_give_the_same() -> None:
    interpret(__file__, "as_a_gpu_does")
