"""Attention of packed documents as it is defined, and what its kernels are compared by."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from outsize.kernels import building
from outsize.models import flash

BOUNDS = (0, 300, 600, 607, 607, 608, 1125)  # over tiles and segments, tiny ones, an empty one
HEADS = 4
TILE, SEGMENT = 64, 256  # queries or keys of a tile and of a task, as in attention.cpp
# Flags of builds with other vectors than the session's, which has the widest of its processor.
OTHER_VECTORS = [(), pytest.param(("-mavx2", "-mfma"), marks=pytest.mark.skipif(
    "avx512f" not in building.processor(), reason="the session has built them, or cannot"
))]  # fmt: skip


def dense(q, k, v, bounds, scale, window):
    """Attention as its definition reads, a document at a time."""
    outputs = []
    for start, stop in pairwise(bounds):
        a, b, c = (x[start:stop].transpose(0, 1) for x in (q, k, v))
        b, c = (x.repeat_interleave(a.shape[0] // x.shape[0], 0) for x in (b, c))
        behind = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        seen = (behind >= 0) & (behind < (window or stop))
        score = (a @ b.mT * scale).masked_fill(~seen, float("-inf"))
        outputs.append((score.softmax(-1) @ c).transpose(0, 1))
    return torch.cat(outputs)


def theirs(q, k, v, bounds, scale, window):
    """PyTorch's kernel, the twin."""
    facts = flash.Facts(bounds, scale, window, max(q.shape[2], v.shape[2]))
    return flash._Flash.apply(q, k, v, facts)


def made(sizes, kv_heads, dtype=torch.float32, bounds=BOUNDS) -> list[Tensor]:
    """q, k, v, the gradient of the output."""
    generator = torch.Generator().manual_seed(5)
    key, value = sizes
    shapes = ((HEADS, key), (kv_heads, key), (kv_heads, value), (HEADS, value))
    return [torch.randn(bounds[-1], *x, generator=generator).to(dtype) for x in shapes]


def results(attend, tensors, scale, window, bounds=BOUNDS) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    *inputs, pull = tensors
    inputs = [x.detach().requires_grad_() for x in inputs]
    output = attend(*inputs, bounds, scale, window)
    return [output.detach(), *torch.autograd.grad(output, inputs, pull)]


def errors(got, exact) -> list[float]:
    """Relative, in the norm of each tensor."""
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, exact, strict=True)]
