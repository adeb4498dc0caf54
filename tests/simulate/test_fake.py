"""What a rehearsal's fake tensors are, told by PyTorch's own mode that keeps nothing: shapes,
strides, dtypes, devices and which of them share a storage, of every operator of a program."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, layer_norm, linear, scaled_dot_product_attention

from outsize.simulate import fake
from outsize.simulate.fake import FakeMode
from outsize.torch_private import (
    DispatchMode,
    FakeTensorMode,
    grouped_product,
    storage_key,
    tree_leaves,
)


class Seen(DispatchMode):
    """Every operator with what it gave; storages by the order in which they were first seen."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[object] = []
        self._kept: list[Tensor] = []
        self._storages: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "prim":
            leaves = [x for x in tree_leaves((args, result)) if isinstance(x, Tensor)]
            self._kept += leaves  # an address is not given twice
            self.said.append((str(func), type(result), [self._facts(leaf) for leaf in leaves]))
        return result

    def _facts(self, x: Tensor) -> object:
        storage = self._storages.setdefault(storage_key(x), len(self._storages))
        nbytes = x.untyped_storage().nbytes()
        return x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, storage, nbytes


def layer(size: int) -> None:
    x = torch.randn(size, 12, requires_grad=True)
    w = torch.zeros(36, 12, dtype=torch.float32, requires_grad=True)
    q, k, v = linear(layer_norm(x, (12,)), w).view(size, 3, 2, 6).unbind(1)
    heads = (one.transpose(0, 1)[None] for one in (q, k, v))
    y = scaled_dot_product_attention(*heads, is_causal=True)[0].transpose(0, 1).reshape(size, 12)
    loss = cross_entropy((x + y).float(), torch.zeros(size, dtype=torch.long))
    loss.backward()
    with torch.no_grad():
        w.sub_(w.grad, alpha=0.1)
        torch._foreach_mul_([w.grad, x.grad], 0.5)


def alike(size: int) -> None:
    a, b = torch.ones(size, size), torch.ones(size, size)
    torch.mul(a, a)  # one argument twice, then two alike
    torch.mul(a, b)
    a.add_(a), a.add_(b), b.add_(a)
    a[1:].copy_(b[:-1]), a[1:].add_(1), a[0].add_(1.0), a[0].add_(True)
    a.to(torch.bfloat16), a.to(torch.float64), a.sum(), a.sum(0), a.sum(0, keepdim=True)
    torch.add(a, b, out=b), torch.add(a, b, out=torch.empty_like(b))
    a.t().contiguous(), a.expand(2, size, size)
    torch.cat([a, b]), torch.cat([a, a, b]), a.split(1)[-1].mul_(2), a.max(dim=0)
    torch.empty(0), torch.tensor(3.0) * a, a * torch.tensor(2)


def changing(size: int) -> None:
    """What changes its own argument's shape."""
    a = torch.zeros(size, 2 * size)
    a.t_(), a.squeeze_(), a.resize_(size + 3, 2), a.unsqueeze_(0), (a + 1).sum(0)
    b = torch.zeros(4)
    b.set_(a.untyped_storage(), 1, (2, 2), (2, 1)), b.mul_(2)


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    fake._known.cache_clear()
    yield
    fake._known.cache_clear()


def played(mode: Any, program: Callable[[int], None], size: int) -> list[object]:
    with mode, Seen() as seen:
        program(size)
    return seen.said


@pytest.mark.parametrize("program", (layer, alike, changing))
def test_operators_give_what_they_give_without_memory(program) -> None:
    wanted = {size: played(FakeTensorMode(), program, size) for size in (3, 5)}
    assert len(wanted[3]) > 5
    for size in (3, 5, 3, 5):
        assert played(FakeMode(), program, size) == wanted[size]


def test_what_was_given_is_not_asked_again(monkeypatch) -> None:
    played(FakeMode(), alike, 4)
    asked: list[str] = []
    ask = FakeTensorMode.dispatch

    def dispatch(mode: Any, func: Any, *rest: Any) -> Any:
        asked.append(str(func))
        return ask(mode, func, *rest)

    monkeypatch.setattr(FakeTensorMode, "dispatch", dispatch)
    again = played(FakeMode(), alike, 4)
    assert len(asked) < len(again) / 4, asked


def test_types_and_modes_of_computing_are_told_apart() -> None:
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            with FakeMode():
                assert torch.zeros(2).dtype == dtype
        finally:
            torch.set_default_dtype(torch.float32)
    with FakeMode():
        x = torch.ones(2, dtype=torch.int64)
        assert (x * 2).dtype == torch.int64 and (x * 2.0).dtype == torch.float32
        assert (x * True).dtype == torch.int64
        with torch.inference_mode():
            assert torch.zeros(2).is_inference()
        assert not torch.zeros(2).is_inference()


def test_values_are_still_refused() -> None:
    from outsize.torch_private import DataDependentOutputException, DynamicOutputShapeException

    for _ in range(2):
        with FakeMode():
            with pytest.raises(DataDependentOutputException):
                torch.zeros(2).sum().item()
            with pytest.raises(DynamicOutputShapeException):
                torch.zeros(2).nonzero()


def test_numbers_that_are_written_down_stay_known_without_the_compiler(monkeypatch) -> None:
    """Until somebody writes into them; torch.compile is not imported to name them."""
    from outsize.torch_private import DataDependentOutputException, FakeTensor

    monkeypatch.setitem(sys.modules, "torch._dynamo.source", None)  # its import fails
    with FakeMode():
        one = torch.tensor(3)
        assert type(one) is FakeTensor and one.item() == 3 and (one + 1).item() == 4
        many = torch.tensor([[1.5] * 300] * 2)
        assert type(many) is FakeTensor and many.shape == (2, 300) and many.stride() == (300, 1)
        assert many.dtype == torch.float32 and many.untyped_storage().nbytes() == 2_400
        other = torch.tensor(2.0)
        other.add_(torch.zeros(2).sum())
        with pytest.raises(DataDependentOutputException):
            other.item()
        with pytest.raises(DataDependentOutputException):
            many.sum().item()


def test_products_of_groups_are_those_of_a_processor() -> None:
    """PyTorch's own mode refuses all but bfloat16."""

    def products() -> list[tuple[object, ...]]:
        rows, ends = torch.zeros(10, 16), torch.full((4,), 10, dtype=torch.int32)
        weights, outs = torch.zeros(4, 6, 16).transpose(1, 2), torch.zeros(10, 8)
        made = [
            grouped_product(rows, weights, ends),  # 6 numbers a row, which begin at 16 bytes
            grouped_product(rows.t(), outs, ends),
            grouped_product(torch.zeros(4, 3, 16), weights),
        ]
        return [(one.shape, one.stride(), one.dtype, one.device) for one in made]

    want = products()
    with FakeMode():
        assert products() == want
