"""Attention by any rule of who sees whom: against a loop over all pairs, written here.

float64 and 1e-10, outputs, log-sum-exps and all gradients; our own kernel in float32 against it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from outsize.errors import OutsizeError
from outsize.kernels import attention as kernel
from outsize.models import masked
from outsize.models.attention import LocalAttend
from outsize.models.masked import attend_masked, merge
from outsize.models.seams import AttendSpec

BOUNDS = (0, 5, 5, 12, 23)
PARENTS = (-1, 0, 0, 1, 1, *(-1, 5, 6, 6, 5, 9, 10), *(-1, 12, 12, 13, 14, 14, 15, 12, 19, 20, 20))
PLAIN = AttendSpec(0, 0.4)
RULES = {
    "causal": PLAIN,
    "window": replace(PLAIN, window=3),
    "full": replace(PLAIN, causal=False),
    "near": replace(PLAIN, causal=False, window=3),
    "prefix": replace(PLAIN, prefix=4),
    "prefix and window": replace(PLAIN, prefix=2, window=2),
    "tree": replace(PLAIN, tree=PARENTS),
    "capped": replace(PLAIN, softcap=1.5, causal=False),
}


def _line(token: int) -> set[int]:
    return set() if token < 0 else {token} | _line(PARENTS[token])


def _sees(q: int, k: int, spec: AttendSpec) -> bool:
    document = next((a, b) for a, b in pairwise(BOUNDS) if a <= q < b)
    if not document[0] <= k < document[1]:
        return False
    if spec.tree is not None:
        return k in _line(q)
    if spec.prefix and k < document[0] + spec.prefix:
        return True
    near = spec.window is None or abs(q - k) < spec.window
    return near and (k <= q or not spec.causal)


def _plainly(
    q_THK: Tensor, k_LGK: Tensor, v_LGW: Tensor, spec: AttendSpec
) -> tuple[Tensor, Tensor]:
    shared = q_THK.shape[1] // k_LGK.shape[1]
    outputs, sums = [], []
    for i in range(len(q_THK)):
        seen = [
            j for j in range(len(k_LGK)) if _sees(spec.first_query + i, spec.first_key + j, spec)
        ]
        for h in range(q_THK.shape[1]):
            score = (k_LGK[seen, h // shared] @ q_THK[i, h]) * spec.scale
            if spec.softcap is not None:
                score = spec.softcap * torch.tanh(score / spec.softcap)
            sums.append(torch.logsumexp(score, 0) if seen else score.new_tensor(-math.inf))
            outputs.append(score.softmax(0) @ v_LGW[seen, h // shared])
    shape = q_THK.shape[:2]
    return torch.stack(outputs).view(*shape, -1), torch.stack(sums).view(shape)


def _inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = ((4, 6), (2, 6), (2, 5))
    return [torch.randn(BOUNDS[-1], *size, dtype=dtype, requires_grad=True) for size in sizes]


def _cut(inputs: list[Tensor], queries: slice, keys: slice) -> list[Tensor]:
    return [inputs[0][queries], inputs[1][keys], inputs[2][keys]]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("queries", [(0, 23), (0, 9), (7, 16), (12, 23), (20, 21)])
def test_any_rule_anywhere(
    rule: str, queries: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masked, "CHUNK_LEAST", 4)
    spec, here = replace(RULES[rule], first_query=queries[0]), slice(*queries)
    inputs = _inputs()
    expected, _ = _plainly(*_cut(inputs, here, slice(None)), spec)
    given = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, given)
    found = LocalAttend()(*_cut(inputs, here, slice(None)), BOUNDS, spec)
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    for a, b in zip(torch.autograd.grad(found, inputs, given), wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


@pytest.mark.parametrize("rule", RULES)
def test_parts_of_the_keys_merge(rule: str) -> None:
    """Queries 6 .. 19 over three parts of the keys, some of which some of them do not see."""
    inputs, here = _inputs(), slice(6, 19)
    spec = replace(RULES[rule], first_query=6)
    expected, sums = _plainly(*_cut(inputs, here, slice(None)), spec)
    given, given_sums = torch.randn_like(expected), torch.randn_like(sums)
    wanted = torch.autograd.grad((expected, sums), inputs, (given, given_sums))
    parts = [
        attend_masked(*_cut(inputs, here, slice(*keys)), BOUNDS, replace(spec, first_key=keys[0]))
        for keys in ((0, 8), (8, 9), (9, 23))
    ]
    found, lse = merge(parts)
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    torch.testing.assert_close(lse, sums, atol=1e-10, rtol=0)
    for a, b in zip(
        torch.autograd.grad((found, lse), inputs, (given, given_sums)), wanted, strict=True
    ):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


def test_seeing_nothing_is_zero() -> None:
    inputs = _inputs()
    o, lse = attend_masked(
        *_cut(inputs, slice(0, 3), slice(5, 9)), BOUNDS, replace(PLAIN, first_key=5)
    )
    assert not o.any() and (lse == -math.inf).all()
    o, lse = merge([(o, lse), (o, lse)])
    assert not o.any() and (lse == -math.inf).all()
    gradients = torch.autograd.grad(o.sum(), inputs)
    assert not any(g.any() for g in gradients)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("first", [0, 10, 64, 150, 290])
def test_our_kernel_sees_a_stretch(window: int | None, first: int) -> None:
    bounds, tokens = (0, 130, 300), 300
    torch.manual_seed(1)
    q, k, v = (
        torch.randn(tokens, heads, 32, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    )
    last = min(first + 100, tokens)
    spec = AttendSpec(0, 0.2, window, first_query=first)
    expected, _ = attend_masked(q[first:last], k, v, bounds, spec)
    given = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, k, v), given)
    small = [x.detach().float().requires_grad_() for x in (q, k, v)]
    assert kernel.fits(*small)
    found = LocalAttend()(small[0][first:last], *small[1:], bounds, spec)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=0)
    for a, b in zip(torch.autograd.grad(found, small, given.float()), wanted, strict=True):
        torch.testing.assert_close(a.double(), b, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        (replace(PLAIN, tree=PARENTS[:20]), "20 parents; expected one for each of 23"),
        (replace(PLAIN, tree=(-1, 1, *PARENTS[2:])), "parent of token 1 is 1"),
        (replace(PLAIN, tree=PARENTS, window=3), "window and prefix do not go with it"),
        (replace(PLAIN, first_query=1, causal=False), "reach token 24"),
    ],
)
def test_refusals(spec: AttendSpec, what: str) -> None:
    with pytest.raises(OutsizeError, match=what):
        LocalAttend()(*_inputs(), BOUNDS, spec)
