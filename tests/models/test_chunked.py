"""Attention in chunks against attention of whole documents: outputs and all gradients, float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from outsize.kernels import attention
from outsize.models.attention import LocalAttend
from outsize.models.chunk import Left
from outsize.models.chunked import ChunkAttend
from outsize.models.layout import clip
from outsize.models.seams import AttendSpec

HEADS, GROUPS, KEY, VALUE = 4, 2, 6, 4
DOCUMENTS = {
    "one": (0, 50),
    "many": (0, 3, 4, 17, 17, 30, 43, 50),
    "a long one inside": (0, 2, 49, 50),
}
SPECS = {
    "plain": AttendSpec(0, 0.3),
    "window 1": AttendSpec(0, 0.3, window=1),
    "window 9": AttendSpec(0, 0.3, window=9),
    "window 40": AttendSpec(0, 0.3, window=40),
    "capped": AttendSpec(0, 0.3, softcap=2.0),
    "capped, window": AttendSpec(0, 0.3, window=9, softcap=2.0),
}


def inputs(dtype=torch.float64, tokens=50):
    shapes = (HEADS, KEY), (GROUPS, KEY), (GROUPS, VALUE)
    return [torch.randn(tokens, *shape, dtype=dtype) for shape in shapes]


def whole(qkv, bounds, spec, go):
    leaves = [x.clone().requires_grad_() for x in qkv]
    o = LocalAttend()(*leaves, bounds, spec)
    o.backward(go)
    return [o.detach(), *(x.grad for x in leaves)]


def in_chunks(qkv, bounds, spec, go, chunk):
    """Forward first to last, then back last to first; keys and values stored by the first pass."""
    tokens, held = bounds[-1], Left(bounds)
    cuts = list(pairwise([*range(0, tokens, chunk), tokens]))
    outputs, gradients = [], [torch.empty_like(x) for x in qkv]
    for start, stop in cuts:
        with torch.no_grad():
            part = [x[start:stop] for x in qkv]
            o = ChunkAttend(held, start)(*part, clip(bounds, start, stop), spec)
        outputs.append(o)
    for (start, stop), before in reversed(list(zip(cuts, outputs, strict=True))):
        leaves = [x[start:stop].clone().requires_grad_() for x in qkv]
        o = ChunkAttend(held, start)(*leaves, clip(bounds, start, stop), spec)
        assert torch.equal(o, before)
        o.backward(go[start:stop])
        for total, leaf in zip(gradients, leaves, strict=True):
            total[start:stop] = leaf.grad
    return [torch.cat(outputs), *gradients]


def worst(got, expected) -> float:
    pairs = zip(got, expected, strict=True)
    # A window of one token gives queries and keys a gradient of zero.
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in pairs)


@pytest.mark.parametrize(
    ("name", "documents"),
    [
        *((name, "many") for name in SPECS), ("plain", "one"), ("window 40", "one"),
        ("window 9", "a long one inside"), ("capped", "a long one inside"),
    ],
)  # fmt: skip
def test_chunks_give_what_the_whole_gives(name, documents):
    bounds, qkv = DOCUMENTS[documents], inputs()
    go = torch.randn(50, HEADS, VALUE, dtype=torch.float64)
    expected = whole(qkv, bounds, SPECS[name], go)
    for chunk in (1, 7, 16, 49, 50, 64):
        assert worst(in_chunks(qkv, bounds, SPECS[name], go, chunk), expected) <= 1e-12, chunk


@pytest.mark.parametrize("name", ["plain", "window 40"])
def test_long_pasts(name):
    """With a window, several masks for one chunk."""
    tokens = 700
    bounds, qkv = (0, 11, tokens), inputs(tokens=tokens)
    go = torch.randn(tokens, HEADS, VALUE, dtype=torch.float64)
    spec = AttendSpec(0, 0.3, None if name == "plain" else 400)
    expected = whole(qkv, bounds, spec, go)
    for chunk in (150, 333):
        assert worst(in_chunks(qkv, bounds, spec, go, chunk), expected) <= 1e-12


@pytest.mark.parametrize(
    ("name", "chunk"),
    [
        *(("plain", chunk) for chunk in (1, 37, 64, 128, 200, 300)),
        ("window 9", 37), ("window 9", 200), ("window 40", 64), ("window 40", 300),
    ],
)  # fmt: skip
def test_the_native_kernel_sees_a_past(name, chunk):
    """Float32 against float64, documents that begin a tile or do not, chunks of all sorts."""
    bounds = (0, 5, 64, 300)
    qkv = inputs(torch.float32, tokens=300)
    go = torch.randn(300, HEADS, VALUE)
    exact = whole([x.double() for x in qkv], bounds, SPECS[name], go.double())
    if attention.fits(*qkv):
        assert worst(in_chunks(qkv, bounds, SPECS[name], go, chunk), exact) <= 3e-6


def test_half_precision_is_as_far_from_exact_as_the_whole():
    """Gradients of queries and keys are summed in float32; roundings are those of each call."""
    bounds, qkv = (0, 50), inputs(torch.bfloat16)
    go = torch.randn(50, HEADS, VALUE, dtype=torch.bfloat16)
    exact = whole([x.double() for x in qkv], bounds, SPECS["plain"], go.double())

    def errors(made):
        return [float((a - b).norm() / b.norm()) for a, b in zip(made, exact, strict=True)]

    theirs = errors(whole(qkv, bounds, SPECS["plain"], go))
    ours = errors(in_chunks(qkv, bounds, SPECS["plain"], go, 3))
    assert all(a <= 1.5 * b for a, b in zip(ours, theirs, strict=True)), (ours, theirs)
