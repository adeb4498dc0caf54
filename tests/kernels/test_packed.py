"""Weights that are packed for products of rounded rows: the same bits, and the way back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outsize.kernels import codes, eights, native
from outsize.kernels.codes import PANEL, Laid
from outsize.kernels.rows import Rounding
from outsize.models.build import build
from outsize.models.coding import CODES, Grid, asked, format_of
from outsize.models.families import parse
from outsize.models.linear import held
from outsize.models.packing import pack

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C++ compiler")
OUTPUTS, INNER = 37, 256  # two panels, and some rows that stay as they lie


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _laid(form: str, inner: int = INNER) -> Laid:
    found = format_of(form)
    raw, shared = found.encode(_random(OUTPUTS, inner))
    laid = found.laid(raw, shared, Grid(inner // found.group))
    assert laid is not None
    return laid


def _packed(laid: Laid, inner: int = INNER) -> Laid:
    """Byte by byte, as the order of a panel is said: scales by groups, then codes of four
    neighbours of every output, those of 8 bits counted from 0."""
    groups, block, head = inner // laid.group, laid.blocks_NB.shape[1], laid.head
    shift = 0 if laid.order == "halves" else 128
    rows = laid.blocks_NB.view(OUTPUTS, groups, block).tolist()
    found = list[int]()
    for first in range(0, OUTPUTS - OUTPUTS % PANEL, PANEL):
        panel = rows[first : first + PANEL]
        found += [x for g in range(groups) for row in panel for x in row[g][:head]]
        for g in range(groups):
            for i in range(head, block, 4):
                found += [x ^ shift for row in panel for x in row[g][i : i + 4]]
    found += [x for row in rows[len(found) // (groups * block) :] for one in row for x in one]
    blocks = torch.tensor(found, dtype=torch.uint8).view(-1, block)
    return laid._replace(blocks_NB=blocks, packed=groups)


FORMS: list[tuple[str, Rounding]] = [
    ("int8:32", "+a8"), ("int8", "+outliers"), ("int4:32", "+a8"), ("int4:256", "+outliers"),
    ("q8_0", "+a8"), ("q4_0", "+outliers"), ("int8-rows:32", "+a8"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "how"), FORMS)
@pytest.mark.parametrize("inner", [INNER, 3 * INNER])
def test_packed_weights_give_the_same_bits(form: str, how: Rounding, inner: int) -> None:
    laid = _laid(form, inner)
    expected = _packed(laid, inner)
    back = codes.lying(expected)
    assert back.packed == 0 and torch.equal(back.blocks_NB, laid.blocks_NB)
    assert torch.equal(codes.decoded(expected), codes.decoded(laid))
    own = laid._replace(blocks_NB=laid.blocks_NB.clone())
    if not eights.pack(own, OUTPUTS):
        assert torch.equal(own.blocks_NB, laid.blocks_NB)
        assert torch.backends.cpu.get_cpu_capability() == "DEFAULT"
        pytest.skip("this processor reads weights best as they lie")
    packed = own._replace(packed=expected.packed)
    assert torch.equal(own.blocks_NB, expected.blocks_NB) and not eights.pack(packed, OUTPUTS)
    bias = _random(OUTPUTS, seed=1)
    with torch.no_grad():
        x = _random(131, inner, seed=2)
        x[1], x[2, 5:], x[3, 9], x[7:40, 130] = 0, 1e4, torch.nan, -41.5
        wanted = eights.plain(x, laid, OUTPUTS, bias, how)
        for tokens in (*range(1, 18), 131):
            y = eights.linear(x[-tokens:], packed, OUTPUTS, bias, how)
            assert torch.equal(y.nan_to_num(7.0), wanted[-tokens:].nan_to_num(7.0))
        assert torch.equal(eights.plain(x[-3:], packed, OUTPUTS, bias, how), wanted[-3:])


def test_a_model_is_packed_once_and_stands_for_the_same() -> None:
    said = {
        "model_type": "llama", "vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    }  # fmt: skip
    model = build(asked(parse(said), "int8:32+head+a8"), seed=1)
    own = {name: one for name, one in held(model) if one.coded is not None}
    assert len(own) == 15
    one, other = own["blocks.0.attention.q"], own["blocks.1.attention.q"]
    other.register_parameter(CODES, one.get_parameter(CODES))  # one weight of two blocks
    with torch.no_grad():
        ids = torch.arange(9)
        before = {name: one.matrix() for name, one in own.items()}
        rows = one.decoded(3, 20, torch.float32)
        y = model(ids)
        for _ in range(2):
            pack(model)
            assert torch.equal(model(ids), y)
            assert torch.equal(one.decoded(3, 20, torch.float32), rows)
            assert all(torch.equal(one.matrix(), before[name]) for name, one in own.items())
    coded = {one.coded.packed for one in own.values() if one.coded is not None}
    assert len(coded) == 1


def test_products_by_numbers_as_they_are_leave_a_model_alone() -> None:
    said = {"model_type": "gpt2", "vocab_size": 50, "n_embd": 64, "n_layer": 1, "n_head": 2}
    model = build(asked(parse(said), "int8:32"), seed=1)
    before = {name: x.clone() for name, x in model.named_parameters()}
    pack(model)
    assert all(torch.equal(x, before[name]) for name, x in model.named_parameters())


def test_weights_that_are_elsewhere_stay_as_they_lie() -> None:
    said = {"model_type": "gpt2", "vocab_size": 50, "n_embd": 64, "n_layer": 1, "n_head": 2}
    model = build(asked(parse(said), "int8:32+head+a8"), seed=1)
    model.away = "memory"
    pack(model)
    assert not any(one.coded is not None and one.coded.packed for _, one in held(model))
