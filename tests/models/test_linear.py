"""The Linear seam: products nest, what is beside a weight is added, kernels get it alone."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from outsize.errors import OutsizeError
from outsize.models.linear import Linear, dense
from outsize.runtime.intercept import intercept


def made(bias: bool = True) -> Linear:
    torch.manual_seed(3)
    one = Linear(5, 4, bias).double()
    for parameter in one.parameters():
        nn.init.normal_(parameter)
    return one


class Twice(nn.Module):
    """What is beside has the product's place, and a say in the bias."""

    enters = False

    def __init__(self):
        super().__init__()
        self.more = nn.Parameter(torch.ones(4))

    def forward(self, one, x):
        return 2 * one.plain(x) + self.more

    def merged(self, weight):
        raise AssertionError

    def shift(self, bias):
        return 3 * bias


def test_products_nest_and_what_is_beside_is_added():
    one, x = made(), torch.randn(7, 5, dtype=torch.float64)
    assert one.bias is not None and one.bytes == (20 + 4) * 8
    plain = x @ one.weight.T + one.bias
    torch.testing.assert_close(one(x), plain)
    doubled = one.product
    one.product = lambda linear, x, bias: 2 * doubled(linear, x, bias)
    one.adds_bias = False
    torch.testing.assert_close(one(x), 2 * (plain - one.bias))
    one.product, one.adds_bias, one.beside = dense, True, Twice().double()
    torch.testing.assert_close(one(x), 2 * (plain - one.bias) + one.beside.more + 3 * one.bias)
    assert set(dict(one.named_parameters())) == {"weight", "bias", "beside.more"}


def test_a_wide_product_sends_the_gradient_to_the_weights_own_sink():
    one = made(bias=False).to(torch.bfloat16)
    x = torch.randn(7, 5).to(torch.bfloat16)
    found = {}

    def sink(weight, compute):
        found[weight] = torch.zeros(weight.shape)
        compute(found[weight])

    one.sink = sink
    one.wide(x.requires_grad_()).square().sum().backward()
    weight = one.weight.detach().float().requires_grad_()
    (x.detach().float() @ weight.T).square().sum().backward()
    torch.testing.assert_close(found[one.weight], weight.grad)


def test_a_fused_kernel_gets_no_weight_that_is_not_all_of_the_product():
    one = made()
    assert one.fused() == (one.weight, one.bias)
    one.beside = nn.Linear(5, 4)
    for use in (one.fused, lambda: one.wide(torch.zeros(1, 5))):
        with pytest.raises(OutsizeError, match="cannot have an adapter"):
            use()


def test_intercepted_calls_end_in_the_reverse_order_and_names_stay():
    one, x = made(), torch.randn(2, 5, dtype=torch.float64)
    names, plain, kind = list(one.state_dict()), one(x), type(one)
    one.register_forward_hook(lambda _, args, y: y + 1)
    undo = []
    for factor in (2, 3):
        own = one.forward
        undo.append(intercept(one, lambda x, own=own, factor=factor: factor * own(x)))
    torch.testing.assert_close(one(x), 6 * plain + 1)  # hooks stay outside
    assert list(one.state_dict()) == names and isinstance(one, Linear)
    with pytest.raises(AssertionError):
        undo[0]()
    undo[1]()
    torch.testing.assert_close(one(x), 2 * plain + 1)
    undo[0]()
    assert type(one) is kind and "forward" not in one.__dict__


def test_nothing_assigns_to_the_forward_of_another():
    """How a module is multiplied, run again or spilled is handed in: no order of patches counts."""
    package = Path(__file__).parents[2] / "outsize"
    found = []
    for file in sorted(package.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if not re.search(r"\.\s*forward\b", text):
            continue  # to parse all takes two seconds
        for node in ast.walk(ast.parse(text)):
            targets = node.targets if isinstance(node, ast.Assign) else []
            found += [
                f"{file.relative_to(package)}:{node.lineno}"
                for one in targets
                if isinstance(one, ast.Attribute)
                and one.attr == "forward"
                and not (isinstance(one.value, ast.Name) and one.value.id == "self")
            ]
    assert not found, "a product, a lookup, or outsize/runtime/intercept.py"
