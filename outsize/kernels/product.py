"""Matrix products in float32 on a CPU, by the library that uses the processor's widest vectors.

PyTorch multiplies float32 with Intel's MKL, which takes AVX-512 on Intel's processors only: on an
AMD EPYC (Zen 5) it reaches 90 to 115 GFLOP/s a core where oneDNN, which PyTorch also brings and
uses for bfloat16, reaches 190 to 260. Which library is a matter of the processor and the shapes
alone, never of a measurement, so that results stay bitwise the same run after run.

M rows, I inner, N columns.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize.kernels.rows import linear as row_by_row
from outsize.kernels.rows import wanted
from outsize.torch_private import FakeTensor

LEAST = 1 << 20  # multiplications below which a call's own cost counts for more
PART = 1 << 20  # elements of a result that are made at once and then put where they belong


def linear(x: Tensor, weight_NI: Tensor, bias_N: Tensor | None) -> Tensor:
    """x (..., I) times weight plus bias: (..., N). Not for autograd to record."""
    if wanted(x, weight_NI):
        return row_by_row(x, weight_NI, bias_N)
    if not _fits(x, weight_NI, weight_NI.size(0)):
        return F.linear(x, weight_NI, bias_N)
    y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight_NI, bias_N, "none", [], "")
    return y


def product(a: Tensor, b_IN: Tensor) -> Tensor:
    """a (..., I) @ b."""
    return linear(a, b_IN.t(), None) if _fits(a, b_IN, b_IN.size(1)) else a @ b_IN


def add_product(total_MN: Tensor, a_MI: Tensor, b_IN: Tensor) -> None:
    """total += a @ b, all of one dtype."""
    if _fits(a_MI, b_IN, b_IN.size(1)):  # whole: in blocks, a transposed `a` is 1.3x slower
        total_MN.add_(linear(a_MI, b_IN.t(), None))
    else:
        total_MN.addmm_(a_MI, b_IN)


def put_product(a_MI: Tensor, b_IN: Tensor, out_MN: Tensor) -> None:
    """out = a @ b, all of one dtype."""
    if not _fits(a_MI, b_IN, b_IN.size(1)):
        torch.mm(a_MI, b_IN, out=out_MN)
        return
    for rows, columns in _blocks(out_MN):
        out_MN[rows, columns].copy_(linear(a_MI[rows], b_IN[:, columns].t(), None))


def _blocks(out_MN: Tensor) -> Iterator[tuple[slice, slice]]:
    """Parts of a result along its longer side: oneDNN gives a tensor of its own, and one of all
    logits would double the largest tensor there is."""
    rows, columns = out_MN.shape
    longer, other = max(rows, columns), min(rows, columns)
    size = -(-longer // max(1, -(-longer * other // PART)))
    for start in range(0, longer, size):
        part = slice(start, min(start + size, longer))
        yield (part, slice(None)) if rows >= columns else (slice(None), part)


def _fits(x: Tensor, other: Tensor, columns: int) -> bool:
    """Whether x times `other`, of so many columns, is a product for oneDNN. Small ones are asked
    about most often: what tells them comes first."""
    return (
        x.numel() * columns >= LEAST
        and not torch.is_grad_enabled()
        and _plain(x)
        and _plain(other)
        and _preferred()
    )


def _plain(tensor: Tensor) -> bool:
    return (
        tensor.dtype == torch.float32
        and tensor.device.type == "cpu"
        and type(tensor) in (Tensor, nn.Parameter, FakeTensor)
    )


@functools.cache
def _preferred() -> bool:
    """Whether MKL would leave half of this processor's vectors idle and oneDNN is there."""
    try:
        facts = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    wide = "AuthenticAMD" in facts and "avx512f" in facts
    return wide and torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
