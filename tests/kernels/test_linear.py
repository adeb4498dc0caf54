"""Weight gradients that go to a sink equal autograd's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from outsize.kernels.linear import embedding, linear


class Buffers:
    """A sink that adds every gradient up in a buffer of its own dtype, at once or later."""

    def __init__(self, dtype: torch.dtype, later: bool = False) -> None:
        self.dtype, self.later, self.kept = dtype, later, []
        self.buffers: dict[int, torch.Tensor] = {}

    def __call__(self, weight, compute) -> None:
        if self.later:
            self.kept.append((weight, compute))
            return
        buffer = self.buffers.setdefault(id(weight), torch.zeros(weight.shape, dtype=self.dtype))
        with torch.no_grad():
            compute(buffer)

    def run(self) -> None:
        self.later = False
        for weight, compute in self.kept:
            self(weight, compute)

    def of(self, weight) -> torch.Tensor:
        return self.buffers[id(weight)]


def leaf(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def close(a, b, limit=1e-10):
    return float((a - b).abs().max()) <= limit * float(b.abs().max())


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 5)])
def test_gradients_equal_autograd(shape, later):
    x, weight, bias = leaf(*shape), leaf(4, 5), leaf(4)
    pull = torch.randn(*shape[:-1], 4, dtype=torch.float64)
    y = F.linear(x, weight, bias)
    gx, gw, gb = torch.autograd.grad((y * pull).sum(), (x, weight, bias))

    sink = Buffers(torch.float64, later)
    ours = linear(x, weight, bias, sink)
    assert torch.equal(ours, y)
    (ours * pull).sum().backward()
    if later:
        assert not sink.buffers, "a kept gradient is not computed before its time"
        sink.run()
    assert weight.grad is None and bias.grad is None, "autograd must see none of them"
    assert close(x.grad, gx) and close(sink.of(weight), gw) and close(sink.of(bias), gb)


def test_gradients_add_up_over_calls():
    x, weight, bias, sink = leaf(6, 5), leaf(4, 5), leaf(4), Buffers(torch.float64)
    for _ in range(3):
        linear(x, weight, bias, sink).square().sum().backward()
    total = F.linear(x, weight, bias).square().sum() * 3
    gw, gb = torch.autograd.grad(total, (weight, bias))
    assert close(sink.of(weight), gw) and close(sink.of(bias), gb)


def test_an_input_without_gradient_still_gives_the_weight_one():
    x, weight, sink = torch.randn(6, 5, dtype=torch.float64), leaf(4, 5), Buffers(torch.float64)
    linear(x, weight, None, sink).square().sum().backward()
    (gw,) = torch.autograd.grad(F.linear(x, weight).square().sum(), weight)
    assert close(sink.of(weight), gw)
    assert not x.requires_grad and x.grad is None


def test_frozen_weights_reach_no_sink_and_pass_the_gradient_on():
    x, sink = leaf(6, 5), Buffers(torch.float64)
    weight, bias = torch.randn(4, 5, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    linear(x, weight, bias, sink).square().sum().backward()
    (gx,) = torch.autograd.grad(F.linear(x, weight, bias).square().sum(), x)
    assert not sink.buffers and close(x.grad, gx)


def test_half_precision_products_add_up_in_the_buffers_dtype():
    """Sixty-four equal gradients: in bfloat16 the sum would stick at 256 times one's last digit."""
    x, weight = leaf(8, 5, dtype=torch.bfloat16), leaf(4, 5, dtype=torch.bfloat16)
    sink = Buffers(torch.float32)
    for _ in range(64):
        linear(x, weight, None, sink).backward(torch.ones(8, 4, dtype=torch.bfloat16))
    (one,) = torch.autograd.grad(
        F.linear(x, weight), weight, torch.ones(8, 4, dtype=torch.bfloat16)
    )
    assert sink.of(weight).dtype == torch.float32
    assert torch.equal(sink.of(weight), one.float() * 64)


def test_embedding_gradient_equals_autograd_where_ids_repeat():
    weight, sink = leaf(9, 3), Buffers(torch.float64)
    ids = torch.tensor([[4, 4, 0], [8, 4, 0]])
    pull = torch.randn(2, 3, 3, dtype=torch.float64)
    (gw,) = torch.autograd.grad((F.embedding(ids, weight) * pull).sum(), weight)
    ours = embedding(ids, weight, sink)
    assert torch.equal(ours, F.embedding(ids, weight))
    (ours * pull).sum().backward()
    assert weight.grad is None and close(sink.of(weight), gw)


def test_a_tied_weight_gathers_both_gradients_in_one_buffer():
    weight, sink = leaf(9, 3), Buffers(torch.float64)
    ids = torch.tensor([1, 5, 5, 2])
    (gw,) = torch.autograd.grad(
        F.linear(F.embedding(ids, weight).tanh(), weight).square().sum(), weight
    )
    linear(embedding(ids, weight, sink).tanh(), weight, None, sink).square().sum().backward()
    assert close(sink.of(weight), gw)


def test_without_a_sink_or_without_gradients_it_is_the_plain_operator():
    x, weight, sink = leaf(6, 5), leaf(4, 5), Buffers(torch.float64)
    linear(x, weight, None, None).square().sum().backward()
    (gw,) = torch.autograd.grad(F.linear(x, weight).square().sum(), weight)
    assert close(weight.grad, gw)
    with torch.no_grad():
        assert linear(x, weight, None, sink).grad_fn is None
        assert embedding(torch.tensor([1]), weight, sink).grad_fn is None
    assert not sink.buffers
