"""Adding half-precision gradients to a wider accumulator, without a wider copy of them."""

from __future__ import annotations

import torch
from torch import Tensor

from outsize.kernels import native


def accumulate(total: Tensor, x: Tensor) -> None:
    """total += x, in the dtype of `total`; shapes alike."""
    with torch.no_grad():
        if total.dtype == torch.float32 and x.shape == total.shape and _fused(total, x):
            made = _run if native.bare(total) else torch.ops.outsize.accumulate.default
            made(total, x)
        else:
            total.add_(x)  # the twin of outsize_add


def _fused(total: Tensor, x: Tensor) -> bool:
    return native.fits(total) and native.fits(x)


def _run(total: Tensor, x: Tensor) -> None:
    code, count = native.CODES[x.dtype], total.numel()
    native.loaded().outsize_add(code, total.data_ptr(), x.data_ptr(), count, native.threads())


_OPERATORS = (native.define("accumulate(Tensor(a!) total, Tensor x) -> ()", _run, native.nothing),)
