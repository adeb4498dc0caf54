"""The cache at the Attend seam: what it gives step by step is what one full pass gives."""

from __future__ import annotations

import math

import pytest
import torch
from decoders import CONFIGS
from many import Kept
from torch import Tensor

from outsize.decode.generate import direct
from outsize.kernels import native
from outsize.models.attention import LocalAttend
from outsize.models.build import build
from outsize.models.decoder import Decoder
from outsize.models.families import parse
from outsize.models.seams import AttendSpec


def _model(name: str) -> Decoder:
    model = build(parse(CONFIGS[name]), seed=3, dtype=torch.float64)
    with torch.no_grad():  # far from the initial values, at which attention is nearly even
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model


def _step(model: Decoder, cache: Kept, rows: dict[int, Tensor]) -> dict[int, Tensor]:
    """Feed `rows` (slot -> ids): the logits of the last token of each slot."""
    attend = cache.extend(list(rows), [len(ids) for ids in rows.values()])
    with torch.no_grad():
        logits = direct(model)(
            torch.cat(list(rows.values())), attend.positions(), attend.bounds, attend
        )
    return dict(zip(rows, logits, strict=True))


@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_and_decode_give_the_logits_of_one_full_pass(name: str) -> None:
    """Prompts of different lengths in one batch, one of them fed in slices; then one token each;
    a sequence that pauses; a slot that is used again."""
    model = _model(name)
    seeded = torch.Generator().manual_seed(1)
    text = {slot: torch.randint(61, (24,), generator=seeded) for slot in range(3)}
    with torch.no_grad():
        full = {slot: model(ids) for slot, ids in text.items()}
    cache = Kept(3, 24, 5, anywhere=name in list(CONFIGS)[::2])
    steps = [{0: 7, 1: 1, 2: 9}, {0: 1, 1: 6, 2: 1}, {2: 1, 0: 1}]
    steps += [{0: 1, 1: 1, 2: 1}] * 10
    largest = 0.0

    def feed(counts: dict[int, int]) -> float:
        rows, wrong = {}, 0.0
        for slot, count in counts.items():
            start = cache.lengths[slot]
            rows[slot] = text[slot][start : start + count]
        for slot, logits in _step(model, cache, rows).items():
            expected = full[slot][cache.lengths[slot] - 1]
            assert bool(expected.isfinite().all())
            wrong = max(wrong, float((logits - expected).abs().max() / expected.abs().max()))
        return wrong

    for counts in steps:
        largest = max(largest, feed(counts))
    cache.clear(1)
    largest = max(largest, feed({1: 3, 0: 2}), feed({1: 2}), feed({1: 1}))
    assert largest < 1e-10
    assert cache.lengths == [21, 6, 21]


def test_the_cache_matters() -> None:
    """The check above would see a lost token: feeding the last one alone gives other logits."""
    model = _model("llama")
    ids = torch.arange(12)
    with torch.no_grad():
        expected = model(ids)[-1]
    alone = _step(model, Kept(1, 12), {0: ids[-1:]})[0]
    assert float((alone - expected).abs().max()) > 1e-3


def _dense(q: Tensor, k: Tensor, v: Tensor, spec: AttendSpec) -> Tensor:
    """Plain masked softmax over one sequence, with keys and values repeated for their queries."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhk,lhk->hql", q, k) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    far = torch.arange(len(q))[:, None] - torch.arange(len(k))[None]
    hidden = far < 0
    if spec.window is not None:
        hidden |= far >= spec.window
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("hql,lhw->qhw", weights, v)


CLOSE = {torch.float64: 1e-12, torch.float32: 2e-6}  # of values about 1


@pytest.mark.parametrize(
    ("softcap", "window", "dtype", "anywhere"),
    [
        (softcap, window, list(CLOSE)[(i + j) % 2], bool((i // 2 + j) % 2))
        for i, window in enumerate([None, 1, 3, 300])
        for j, softcap in enumerate([None, 2.0])
    ],
)
def test_against_plain_attention(
    softcap: float | None, window: int | None, dtype: torch.dtype, anywhere: bool
) -> None:
    """Long enough that queries are handled in several chunks, or by our kernel in float32; value
    heads of another size."""
    seeded = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(700, heads, size, generator=seeded, dtype=torch.float64)
        for heads, size in ((6, 8), (3, 8), (3, 5))
    )
    spec = AttendSpec(layer=4, scale=0.5, window=window, softcap=softcap)
    expected = _dense(q, k, v, spec)
    cache, outputs, at = Kept(2, 700, anywhere=anywhere), [], 0
    for count in (1, 9, 600, 1, 1, 88):
        attend = cache.extend([1], [count])
        rows = slice(at, at + count)
        fed = (x[rows].to(dtype) for x in (q, k, v))
        outputs.append(attend(*fed, attend.bounds, spec))
        at += count
    found, atol = torch.cat(outputs).double(), CLOSE[dtype]
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@pytest.mark.skipif(native.library() is None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_bits_do_not_depend_on_slices_or_pages(dtype: torch.dtype, softcap: float | None) -> None:
    """Each token alone, prompts in tiles that begin anywhere, beside others, in training's way."""
    seeded = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(333, heads, size, generator=seeded).to(dtype)
        for heads, size in ((4, 24), (2, 24), (2, 8))
    )
    spec = AttendSpec(layer=0, scale=0.5, window=150, softcap=softcap)
    with torch.no_grad():
        whole = LocalAttend()(q, k, v, (0, 333), spec)
        for counts in ((333,), (64, 1, 70, 100, 1, 97), (3,) * 111):
            for anywhere in (False, True):
                cache, at, one = Kept(2, 333, anywhere=anywhere), 0, slice(0, 1)
                for count in counts:
                    past, rows = cache.extend([1, 0], [1, count]), slice(at, at + count)
                    fed = (torch.cat([x[one], x[rows]]) for x in (q, k, v))
                    found = past(*fed, past.bounds, spec)[1:]
                    assert torch.equal(found, whole[rows]), (counts, anywhere)
                    at += count


def test_memory_is_allocated_once() -> None:
    model = _model("llama")
    kept = Kept(2, 16)
    cache = kept.cache
    _step(model, kept, {0: torch.arange(4), 1: torch.arange(6)})
    held = cache.bytes
    assert held == 3 * 2 * (2 * 2 * 16 * 8) * 8  # layers, k and v, (slots, capacity, heads, size)
    pointers = [x.data_ptr() for x in cache.tensors]
    for _ in range(5):
        _step(model, kept, {0: torch.tensor([1]), 1: torch.tensor([2])})
    assert cache.bytes == held
    assert [x.data_ptr() for x in cache.tensors] == pointers


def test_positions_and_lengths() -> None:
    cache = Kept(3, 10)
    cache.extend([0, 2], [4, 1])
    attend = cache.extend([2, 1, 0], [2, 3, 1], ahead=[5, 0, 0])
    assert attend.positions().tolist() == [1, 2, 0, 1, 2, 4]
    assert attend.bounds == (0, 2, 5, 6)
    assert [part.stop for part in attend.parts] == [3, 3, 5]
    assert attend.lengths == (8, 3, 5)
