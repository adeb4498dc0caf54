"""Products and attention of each token alone: right, and the same bits in any company."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outsize.errors import OutsizeError
from outsize.kernels import eights, native, product, rows
from outsize.kernels.heads import by_head
from outsize.kernels.norm import rms_norm
from outsize.memory import Ledger
from outsize.models.coding import Grid, format_of
from outsize.simulate.fake import FakeMode

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C++ compiler")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LARGEST = {torch.float32: 1e-6, torch.bfloat16: 5e-3}  # relative to the largest of the result


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize(
    "sizes", [(1, 5, 3), (7, 64, 33), (130, 50, 70), (4, 1000, 65), (520, 110, 5)], ids=str
)
def test_products_are_right_and_know_nobody(name: str, sizes: tuple[int, int, int]) -> None:
    """Of more tokens, too, than are made wide at once, and than stay in a cache."""
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
@pytest.mark.parametrize("turns", [False, True])
def test_products_of_heads_are_right_and_know_nobody(name: str, turns: bool) -> None:
    """By matrices that lie apart, of some tokens and of each alone; gradients in float64."""
    dtype, heads, inner, outputs = DTYPES[name], 3, 37, 83
    shape = (inner, outputs) if turns else (outputs, inner)
    x_THI, whole = _random(7, heads, inner + 4), _random(heads, shape[0] + 5, shape[1], seed=1)
    x_THI, weight = x_THI.to(dtype)[..., :inner], whole.to(dtype)[:, 5:]
    by = "thi,hio->tho" if turns else "thi,hoi->tho"
    with torch.no_grad(), rows.alone():
        y_THO = by_head(x_THI, weight, turns)
        each = [by_head(x_THI[t : t + 1], weight, turns) for t in range(7)]
        apart = by_head(x_THI, torch.stack((weight, weight + 1), -1)[..., 0], turns)
    expected = torch.einsum(by, x_THI.double(), weight.double())
    for found in (y_THO, apart):  # apart: of a weight whose numbers are not side by side
        assert float((found - expected).abs().max() / expected.abs().max()) < LARGEST[dtype]
    assert torch.equal(torch.cat(each), y_THO)
    given = [x.double().requires_grad_() for x in (x_THI, weight)]
    pulled = torch.autograd.grad(by_head(*given, turns).square().sum(), given)
    right = torch.autograd.grad(torch.einsum(by, *given).square().sum(), given)
    for one, other in zip(pulled, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize(
    "form", ["int8", "int4", "int8:64", "int4:64", "nf4", "q8_0", "q4_0", "int8-rows:32"]
)
def test_products_by_codes_are_those_by_what_they_stand_for(name: str, form: str) -> None:
    dtype, found, (outputs, inner) = DTYPES[name], format_of(form), (21, 192)
    numbers = _random(outputs, inner)
    numbers[0] *= 1e-3  # scales of float16 that are not normal
    codes, shared = found.encode(numbers)
    grid = Grid(inner // found.group)
    laid, weight = found.laid(codes, shared, grid), found.decode(codes, shared, grid, dtype)
    assert laid is not None and laid.ready
    bias = _random(outputs, seed=1).to(dtype)
    for tokens in (1, 2, 3, 5, 6, 7, 8, 70):
        x = _random(tokens, inner, seed=tokens).to(dtype)
        assert torch.equal(rows.by_codes(x, laid, outputs, bias), rows.linear(x, weight, bias))


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize(
    ("form", "how"),
    [
        ("int8:16", "+a8"), ("int8:32", "+a8"), ("int4", "+a8"), ("int4:256", "+a8"),
        ("q8_0", "+outliers"), ("q4_0", "+outliers"), ("int8-rows:16", "+a8"),
        ("int8-rows:32", "+outliers"), ("int8-rows:256", "+outliers"),
    ],
)  # fmt: skip
def test_products_of_rounded_rows_are_the_twins_and_know_nobody(
    name: str, form: str, how: rows.Rounding
) -> None:
    dtype, found, (outputs, inner) = DTYPES[name], format_of(form), (69, 256)
    codes, shared = found.encode(_random(outputs, inner))
    grid = Grid(inner // found.group)
    laid, bias = found.laid(codes, shared, grid), _random(outputs, seed=1).to(dtype)
    assert laid is not None
    x = _random(131, inner, seed=2)
    x[1], x[2, :3], x[3, 5:] = 0, 1e-33, 1e4  # nothing, next to nothing, some far from others
    x[4, 7], x[5, 200] = torch.nan, -torch.inf
    x[6, 9], x[6, 70], x[7:40, 130] = 6.0, -5.99, -41.5  # a feature of many tokens, and others'
    x = x.to(dtype)
    with torch.no_grad():
        y = eights.linear(x, laid, outputs, bias, how)
        expected = eights.plain(x, laid, outputs, bias, how)
    assert torch.equal(y[:4], expected[:4]) and torch.equal(y[6:], expected[6:])
    assert bool(y[4:6].isnan().all()) and bool(expected[4:6].isnan().all())
    if form.startswith("int8-rows"):  # of the magnitudes that workers agree on
        most_T = eights.largest(x, how) * (1 + torch.arange(len(x)) % 3)
        with torch.no_grad():
            y_TO = eights.linear(x, laid, outputs, bias, how, lambda _: most_T)
        wanted = eights.plain(x, laid, outputs, bias, how, most_T)
        assert torch.equal(y_TO.nan_to_num(7.0), wanted.nan_to_num(7.0))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for first, last in ((0, 1), (1, 4), (6, 13), (100, 131)):
            some = rows.by_codes(x[first:last].contiguous(), laid, outputs, bias, how)
            assert torch.equal(some, y[first:last])
    finally:
        torch.set_num_threads(threads)


def test_rounded_rows_are_near_and_exact_where_they_are_whole() -> None:
    found = format_of("int8:32")
    codes, shared = found.encode(_random(40, 96))
    laid, weight = (of(codes, shared, Grid(3)) for of in (found.laid, found.decode))
    x = _random(9, 96, seed=1).double()
    exact = x @ weight.double().T
    assert float((eights.plain(x, laid, 40, None) - exact).norm() / exact.norm()) < 7e-3
    whole = (x * 40).round().clamp_(-127, 127)
    whole.view(9, 3, 32)[:, :, 0] = 127
    assert torch.allclose(
        eights.plain(whole, laid, 40, None), whole @ weight.double().T, rtol=0, atol=1e-10
    )
    with pytest.raises(OutsizeError, match="leave \\+a8 out"):
        eights.linear(x.requires_grad_(), laid, 40, None)


@pytest.mark.parametrize("how", ["+a8", "+outliers"])
def test_rows_with_a_scale_each_are_the_papers(how: rows.Rounding) -> None:
    """LLM.int8() written out: absmax over 127 of each token and of each output, outliers apart."""
    weight, x = _random(12, 64), _random(9, 64, seed=1).double()
    x[:, 11] *= 40
    x[3] /= 50  # a token without
    found = format_of("int8-rows:16")
    codes, shared = found.encode(weight)
    y = eights.plain(x, found.laid(codes, shared, Grid(4)), 12, None, how)
    steps_O1 = weight.abs().amax(1, keepdim=True) / 127
    whole = (weight / steps_O1).round()
    held = (whole * steps_O1).double()
    apart = x * (x.abs() >= 6) if how == "+outliers" else torch.zeros_like(x)
    left = x - apart
    sizes_T1 = left.abs().amax(1, keepdim=True) / 127
    wanted = (left / sizes_T1).round() @ whole.T.double() * sizes_T1 * steps_O1.T.double()
    assert float((y - wanted - apart @ held.T).abs().max()) < 1e-10
    most = float((y - x @ held.T).abs().max())
    assert most < 0.3 if how == "+outliers" else most > 0.5


def test_the_way_is_taken_where_it_is_asked_for_alone() -> None:
    x, w = _random(3, 8), _random(4, 8)
    with torch.no_grad():
        assert not rows.wanted(x, w)
        with rows.alone():
            assert rows.wanted(x, w) and not rows.wanted(x.double(), w.double())
        assert not rows.wanted(x, w)
    with rows.alone():
        assert not rows.wanted(x, w)  # gradients are recorded


@pytest.mark.parametrize("name", DTYPES)
def test_a_norm_of_rows_of_a_wider_tensor_knows_nobody(name: str) -> None:
    """One row of it lies as any other does, several do not."""
    wide, weight = _random(6, 130).to(DTYPES[name]), _random(100).to(DTYPES[name])
    with torch.no_grad(), rows.alone():
        every = rms_norm(wide[:, :100], weight, 1e-6, 0.0)
        each = [rms_norm(wide[i : i + 1, :100], weight, 1e-6, 0.0) for i in range(6)]
    assert torch.equal(every, torch.cat(each))


def _said(file: str, name: str) -> int:
    """The largest value that a source of the passes gives a name."""
    text = (Path(rows.__file__).parent / file).read_text(encoding="utf-8")
    return max(int(value) for value in re.findall(rf"\b{name} = (\d+)[;,]", text))


def _beside(x: Tensor, call: Callable[[Tensor], Tensor]) -> int:
    """Bytes that a ledger sees at most while a product of fake rows is made, but for its result."""
    with torch.no_grad(), rows.alone(), Ledger() as ledger:
        y = call(x)
    return int(ledger.peak - y.nbytes)


def test_room_that_products_take_for_themselves_is_foretold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the passes allocate it: 300 rows of 192 numbers, on three threads."""
    monkeypatch.setattr(native, "threads", lambda: 3)
    some, wide = _said("eights.h", "MOST_ROWS"), min(300, _said("rows.cpp", "SOME"))
    sums, chunk = _said("eights.h", "ACROSS"), _said("eights.h", "CHUNK")
    outputs, vector = _said("rows.cpp", "OUTPUTS"), _said("tiles.h", "LANES")
    form = format_of("int8:64")
    codes, scales = form.encode(_random(21, 192))
    laid = form.laid(codes, scales, Grid(3))
    assert laid is not None
    numbers = some * 192 * 2 + 4 * some * 3 + 4 * some * 3 * (64 // chunk)
    with FakeMode():
        x, narrow = torch.empty(300, 192), torch.empty(300, 190, dtype=torch.bfloat16)
        w = torch.empty(21, 190, dtype=torch.bfloat16)
        found = _beside(x, lambda x: eights.linear(x, laid, 21, None))
        assert 0 <= found - numbers - 4 * 3 * sums * (3 + some) <= 8
        row = -(-190 // vector) * vector
        expected = 4 * wide * row + 4 * 3 * outputs * 190
        assert 0 <= _beside(narrow, lambda x: product.linear(x, w, None)) - expected <= 4 * 21
        whole = torch.empty(21, 192)
        assert _beside(x, lambda x: rows.linear(x, whole, None)) <= 4 * 21
