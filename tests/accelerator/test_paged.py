"""Attention over pages by tables on a device, and blocks that are recorded there."""

from __future__ import annotations

import pytest
import strict
import torch
from stepping import LLAMA, stepped

from outsize import accelerator
from outsize.decode.graphs import Graphs
from outsize.decode.paged import PagedCache
from outsize.decode.runs import each_alone
from outsize.kernels import paged
from outsize.models.build import build
from outsize.models.families import parse

# Tokens, query heads, key-value heads, head sizes, tokens and number of pages, window, cap.
SHAPES = {
    "grouped": (3, 8, 2, 64, 64, 16, 40, None, None),
    "narrow": (1, 4, 4, 24, 10, 16, 5, 7, None),
    "capped": (2, 6, 1, 80, 80, 64, 9, 300, 30.0),
}
CLOSE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_see_their_pages(shape: str, dtype: torch.dtype, device: str) -> None:
    tokens, heads, groups, size, out, page, width, window, cap = SHAPES[shape]
    draw = torch.Generator().manual_seed(1)

    def some(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=draw, dtype=torch.float64).to(dtype)

    q, k, v = some(tokens, heads, size), some(99, page, groups, size), some(99, page, groups, out)
    tables = torch.randint(99, (tokens, width), generator=draw, dtype=torch.int32)
    places = torch.tensor([width * page - 1, 3, 17][:tokens], dtype=torch.int32)
    facts = (0, out, window or paged.FAR), (size**-0.5, cap or 0.0)
    expected = one_by_one(q, k, v, tables, places, window, cap)
    whole = paged.plain(q.double(), [k.double()], [v.double()], tables, places, *facts)
    assert (whole - expected).abs().max() <= 1e-10
    for _ in strict.begins(device, strict.ORDERS[:1], 1 << 28):
        held = [k.to(device)], [v.to(device)]
        seen = tables.to(device), places.to(device)
        found = torch.ops.outsize.paged(q.to(device), *held, *seen, *facts)
        assert (found.cpu().double() - expected).abs().max() <= CLOSE[dtype]


def one_by_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: torch.Tensor, places: torch.Tensor,
    window: int | None, cap: float | None,
) -> torch.Tensor:  # fmt: skip
    """o_THW, each token and head alone, over the keys that it sees and no others."""
    tokens, heads, size = q.shape
    found = torch.empty(tokens, heads, v.shape[-1], dtype=torch.float64)
    for token, place in enumerate(places.tolist()):
        first = 0 if window is None else max(0, place + 1 - window)
        k_LGK, v_LGW = (x.double()[tables[token].long()].flatten(0, 1) for x in (k, v))
        for head in range(heads):
            seen, group = slice(first, place + 1), head // (heads // k.shape[2])
            scores = k_LGK[seen, group] @ q[token, head].double() * size**-0.5
            scores = scores if cap is None else cap * (scores / cap).tanh()
            found[token, head] = scores.softmax(0) @ v_LGW[seen, group]
    return found


@pytest.mark.parametrize("form", ["as-stored", "int8"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_what_is_recorded_is_what_modules_give(dtype: torch.dtype, form: str, device: str) -> None:
    model = build(parse(LLAMA), seed=1).to(dtype)
    for _ in strict.begins(device, strict.ORDERS[:1], 1 << 28):
        there = model.to(device)
        expected = stepped(there, PagedCache(9, 16, 3, form), each_alone)
        if not accelerator.records(torch.device(device)):
            continue
        graphs, cache = Graphs(there), PagedCache(9, 16, 3, form)
        for _ in range(3):
            for mine, theirs in zip(stepped(there, cache, graphs), expected, strict=True):
                apart = (mine - theirs).abs().max().double()
                assert apart <= CLOSE[dtype] * theirs.abs().max().double()
