"""Pages of keys and values in each form, and attention over them, beside plain PyTorch."""

from __future__ import annotations

import math
from array import array

import pytest
import torch
from torch import Tensor

from outsize.kernels import native, paged, pages
from outsize.kernels.pages import FORMS, GROUP, Pool, coded, decoded

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C++ compiler")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LARGEST = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}  # relative error


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def filled(form: str, x_TGK: Tensor, page: int) -> Pool:
    """All of these, in whole pages."""
    pool = Pool(FORMS[form], len(x_TGK) // page, page, x_TGK[:1])
    order_T = torch.randperm(len(x_TGK), generator=torch.Generator().manual_seed(1))
    for some_T in order_T.split(7):
        pool.put(some_T, x_TGK[some_T])
    return pool


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("sort", ["plain", "window", "softcap"])
@pytest.mark.parametrize("form", FORMS)
def test_attention_over_pages(name: str, sort: str, form: str) -> None:
    """Two sequences whose pages lie anywhere, beside softmax over what each token sees of what
    pages hold; with a cap more heads share their keys than a task has."""
    dtype, page, groups, size, value = DTYPES[name], 4, 2, 40, 13
    heads = 40 if sort == "softcap" else 6
    window, softcap = (3 if sort == "window" else None), (2.0 if sort == "softcap" else None)
    keys, values = pools = [
        filled(form, _random(11 * page, groups, width, seed=width).to(dtype), page)
        for width in (size, value)
    ]
    k_PSGK, v_PSGW = (pool.get(torch.arange(11)) for pool in pools)
    tables, places = ([7, 2, 5], [0, 8]), ([8, 9, 10], [6])  # of the second one token alone
    q_THK = _random(4, heads, size, seed=3).to(dtype)
    seen = pages.Seen(
        pages.numbers([*tables[0], *tables[1]]),
        pages.numbers([0, 0, 0, 3]),
        pages.numbers([*places[0], *places[1]]),
    )
    o_THW = pages.attend(q_THK, keys, values, seen, 0.3, window, softcap)
    at = [(0, place) for place in places[0]] + [(1, place) for place in places[1]]
    for t, (which, place) in enumerate(at):
        low = 0 if window is None else max(0, place - window + 1)
        k, v = (x[tables[which]].flatten(0, 1)[low : place + 1].double() for x in (k_PSGK, v_PSGW))
        for head in range(heads):
            group = head // (heads // groups)
            scores = k[:, group] @ q_THK[t, head].double() * 0.3
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            expected = scores.softmax(0) @ v[:, group]
            wrong = float((o_THW[t, head] - expected).abs().max() / expected.abs().max())
            assert wrong < 4 * LARGEST[dtype], (t, head)
    one = pages.Seen(pages.numbers(tables[1]), pages.numbers([0]), pages.numbers(places[1]))
    alone = pages.attend(q_THK[3:].contiguous(), keys, values, one, 0.3, window, softcap)
    assert torch.equal(alone, o_THW[3:]) and not math.isnan(float(alone.sum()))


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("size", [32, 40])
def test_heads_with_keys_of_their_own(size: int, window: int | None) -> None:
    """Single tokens, whose tiles or heads are shared among threads where tokens do not come out
    even: beside softmax, and bit for bit the same for any number of threads."""
    page, heads, places, threads = 16, 5, (3, 64, 201), torch.get_num_threads()
    keys, values = pools = [
        filled("as-stored", _random(208, heads, size, seed=n), page) for n in (1, 2)
    ]
    k_LHK, v_LHW = (pool.get(torch.arange(13)).flatten(0, 1).double() for pool in pools)
    q_THK = _random(3, heads, size, seed=3)
    seen = pages.Seen(*map(pages.numbers, (range(13), [1, 4, 0], places)))
    last = pages.Seen(*map(pages.numbers, (range(13), [0], places[2:])))
    found = []
    try:
        for count in (1, 2, 3, 4):
            torch.set_num_threads(count)
            own = (
                pages.attend(q_THK[n:], keys, values, x, 0.3, window, None)
                for n, x in ((0, seen), (2, last))
            )
            found.append(torch.cat(list(own)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], one) for one in found[1:])
    assert torch.equal(found[0][2], found[0][3]), "in any company"
    for t, (first, place) in enumerate(zip((16, 64, 0), places, strict=True)):
        low = 0 if window is None else max(0, place - window + 1)
        k, v = (x[first + low : first + place + 1] for x in (k_LHK, v_LHW))
        scores_HL = torch.einsum("hk,lhk->hl", q_THK[t].double(), k) * 0.3
        expected = torch.einsum("hl,lhw->hw", scores_HL.softmax(-1), v)
        wrong = float((found[0][t] - expected).abs().max() / expected.abs().max())
        assert wrong < 4 * LARGEST[torch.float32], t


@pytest.mark.parametrize("size", [64, 33, 7])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_held_is_near_and_as_large_as_it_says(form: str, size: int) -> None:
    """A number is off by half a step at most, of which its group has 127 up to the largest, or 8;
    a token's codes are its own."""
    x_TGK, steps = _random(12, 2, size) * torch.tensor([0.01, 100.0]).view(1, 2, 1), 0
    pool, bits = filled(form, x_TGK, 3), FORMS[form].bits
    back = pool.get(torch.arange(4)).flatten(0, 1)
    assert sum(x.nbytes for x in pool.tensors) == 12 * 2 * FORMS[form].bytes(size, torch.float32)
    exact = [FORMS[form].exact(dtype) for dtype in DTYPES.values()]
    assert exact == [form == "as-stored", form in ("as-stored", "bf16")]
    if not bits:
        assert torch.equal(back, x_TGK if form == "as-stored" else x_TGK.bfloat16().float())
        return
    steps = 127 if bits == 8 else 8
    for first in range(0, size, GROUP):
        own, held = (one[..., first : first + GROUP] for one in (x_TGK, back))
        step = own.abs().amax(-1, keepdim=True) / steps
        room = 1 if bits == 4 else 0.5  # 8 of the other sign has no code of its own
        assert ((own - held).abs() <= step * (room + steps * 2.0**-8)).all()
    some = decoded(*coded(x_TGK[5:6], bits), bits, size)
    assert torch.equal(some[0], back[5])
    assert not decoded(*coded(torch.zeros(1, 1, size), bits), bits, size).any()


@pytest.mark.parametrize("form", ["int8", "int4", "bf16"])
def test_attention_reads_codes_as_their_twin_does(form: str) -> None:
    """Bit for bit what it gives of the numbers that codes stand for."""
    x_TGK, q_THK = _random(80, 2, 40), _random(70, 4, 40, seed=5)
    pool = filled(form, x_TGK, 16)
    plain = filled("as-stored", pool.get(torch.arange(5)).flatten(0, 1), 16)
    places = [pages.numbers(some) for some in ([3, 0, 4, 1, 2], [0] * 70, range(70))]
    found = [pages.attend(q_THK, x, x, pages.Seen(*places), 0.2, None, None) for x in (pool, plain)]
    assert torch.equal(*found)


@pytest.mark.parametrize("form", FORMS)
def test_values_that_are_the_first_numbers_of_their_keys(form: str) -> None:
    """Of heads larger than those of tiles, in parts: bit for bit what is given of values that lie
    apart, and near plain softmax; on devices by PyTorch's operators."""
    heads, size, value, places = 20, 290, 264, [3, 77, 78]
    q_THK = _random(3, heads, size, seed=5) / 8
    keys = filled(form, _random(80, 1, size), 16)
    held_TK = keys.get(torch.arange(5)).flatten(0, 2)
    apart = [filled("as-stored", held_TK[:, None, :n].contiguous(), 16) for n in (size, value)]
    tables = [3, 0, 4, 1, 2]
    seen = pages.Seen(*map(pages.numbers, (tables, [0] * 3, places)))
    found = pages.attend(q_THK, keys, keys.first(value), seen, 0.2, None, None)
    assert torch.equal(found, pages.attend(q_THK, *apart, seen, 0.2, None, None))
    assert torch.equal(keys.first(value).get(slice(0, 5)).flatten(0, 2), held_TK[:, :value])
    raw = [x for x in (keys.data, keys.scales) if x is not None]
    sights = paged.Sights(torch.tensor([tables] * 3), torch.tensor(places))
    asked = (FORMS[form].bits, value, 1 << 20), (0.2, 0.0)
    there = paged.plain(q_THK, raw, raw, sights.tables_TP, sights.positions_T, *asked)
    own_TK = held_TK.unflatten(0, (5, 16))[tables].flatten(0, 1).double()
    for t, place in enumerate(places):
        scores_HL = q_THK[t].double() @ own_TK[: place + 1].T * 0.2
        expected = scores_HL.softmax(1) @ own_TK[: place + 1, :value]
        for one in (found, there):
            torch.testing.assert_close(one[t].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sort", ["plain", "window", "softcap"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [64, 40, 13, 160])
def test_a_token_alone_is_what_it_is_among_others(size: int, form: str, sort: str) -> None:
    """Bit for bit, where its keys are read where they lie and where tiles of them are shared."""
    window, softcap = (67 if sort == "window" else None), (2.0 if sort == "softcap" else None)
    keys, values = (filled(form, _random(192, 2, size, seed=n), 24) for n in (0, 1))
    tables, q_THK = pages.numbers([3, 0, 4, 1, 2, 7, 6, 5]), _random(70, 2, size, seed=5)
    given = keys, values, tables, window, softcap
    together = _attended(q_THK, range(80, 150), *given)
    for t in (0, 1, 15, 16, 47, 48, 69):
        alone = _attended(q_THK[t : t + 1].contiguous(), range(80 + t, 81 + t), *given)
        assert torch.equal(alone[0], together[t]), t


def _attended(
    q_THK: Tensor,
    places: range,
    keys: Pool,
    values: Pool,
    tables: array[int],
    window: int | None,
    softcap: float | None,
) -> Tensor:
    seen = pages.Seen(tables, pages.numbers([0] * len(places)), pages.numbers(places))
    return pages.attend(q_THK, keys, values, seen, 0.2, window, softcap)
