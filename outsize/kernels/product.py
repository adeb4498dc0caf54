"""Matrix products on a CPU, by what uses the processor's widest vectors.

PyTorch multiplies float32 with Intel's MKL, which takes AVX-512 on Intel's processors only: on an
AMD EPYC (Zen 5) it reaches 90 to 115 GFLOP/s a core where oneDNN, which PyTorch also brings and
uses for bfloat16, reaches 190 to 260. Which library is a matter of the processor and the shapes
alone, never of a measurement, so that results stay bitwise the same run after run.

Few processors multiply bfloat16. Where one does not, PyTorch reaches 2 to 35 GFLOP/s a core by its
own loops, by how the operands lie; tiles that are made wide for a product in float32 reach what it
does. Sums are float32's over all of the inner dim, and what is held in bfloat16 is rounded once.

M rows, I inner, N columns.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize.kernels.rows import linear as row_by_row
from outsize.kernels.rows import wanted
from outsize.torch_private import FakeTensor

LEAST = 1 << 20  # multiplications below which a call's own cost counts for more
PART = 1 << 20  # elements of a result that are made at once and then put where they belong
ROWS = 512  # of a tile at most, whose operands are made wide
FEW = 16  # rows below which what a weight costs to be made wide is not made up for
WIDE = 1 << 20  # elements of the second operand of a tile
_HERE = threading.local()


@contextmanager
def elsewhere(device: bool = True) -> Iterator[None]:
    """In this thread, products of bfloat16 are asked for as they are, whatever this processor has:
    of rehearsals for a device that is not it, if it is one."""
    before = getattr(_HERE, "elsewhere", False)
    _HERE.elsewhere = device
    try:
        yield
    finally:
        _HERE.elsewhere = before


def linear(x: Tensor, weight_NI: Tensor, bias_N: Tensor | None) -> Tensor:
    """x (..., I) times weight plus bias: (..., N). Not for autograd to record."""
    if wanted(x, weight_NI):
        return row_by_row(x, weight_NI, bias_N)
    if widens(x, weight_NI, weight_NI.size(0)):
        y_MN = x.new_empty(x.numel() // x.shape[-1], weight_NI.size(0))
        _put_wide(x.reshape(-1, x.shape[-1]), weight_NI.t(), y_MN, bias_N)
        return y_MN.view(*x.shape[:-1], -1)
    if not _fits(x, weight_NI, weight_NI.size(0)):
        return F.linear(x, weight_NI, bias_N)
    y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight_NI, bias_N, "none", [], "")
    return y


def product(a: Tensor, b_IN: Tensor) -> Tensor:
    """a (..., I) @ b."""
    count = b_IN.size(1)
    one = _fits(a, b_IN, count) or widens(a, b_IN, count)
    return linear(a, b_IN.t(), None) if one else a @ b_IN


def add_product(total_MN: Tensor, a_MI: Tensor, b_IN: Tensor) -> None:
    """total += a @ b, all of one dtype, or, of what is made wide, total in float32."""
    if widens(a_MI, b_IN, b_IN.size(1)):
        for rows, columns, a, b in _tiles(a_MI, b_IN):
            part = total_MN[rows, columns]
            if part.dtype == a.dtype:
                part.addmm_(a, b)
            else:
                part.copy_(torch.addmm(part.to(a.dtype), a, b))
    elif _fits(a_MI, b_IN, b_IN.size(1)):  # whole: in blocks, a transposed `a` is 1.3x slower
        total_MN.add_(linear(a_MI, b_IN.t(), None))
    else:
        total_MN.addmm_(a_MI, b_IN)


def put_product(a_MI: Tensor, b_IN: Tensor, out_MN: Tensor) -> None:
    """out = a @ b, all of one dtype."""
    if widens(a_MI, b_IN, b_IN.size(1)):
        _put_wide(a_MI, b_IN, out_MN)
        return
    if not _fits(a_MI, b_IN, b_IN.size(1)):
        torch.mm(a_MI, b_IN, out=out_MN)
        return
    for rows, columns in _blocks(out_MN):
        out_MN[rows, columns].copy_(linear(a_MI[rows], b_IN[:, columns].t(), None))


def _put_wide(a_MI: Tensor, b_IN: Tensor, out_MN: Tensor, bias_N: Tensor | None = None) -> None:
    for rows, columns, a, b in _tiles(a_MI, b_IN):
        y = torch.mm(a, b)
        out_MN[rows, columns].copy_(y if bias_N is None else y.add_(bias_N[columns]))


def _tiles(a_MI: Tensor, b_IN: Tensor) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Parts of a result, and what they are the products of, in float32: a few megabytes."""
    (M, I), N = a_MI.shape, b_IN.shape[1]  # noqa: E741
    width = max(FEW, WIDE // max(1, I))
    for left in range(0, N, width):
        columns = slice(left, min(left + width, N))
        b = b_IN[:, columns].to(torch.float32)
        for top in range(0, M, ROWS):
            rows = slice(top, min(top + ROWS, M))
            yield rows, columns, a_MI[rows].to(torch.float32), b


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


def widens(a: Tensor, b: Tensor, columns: int) -> bool:
    """Whether a times b, of so many columns, is made of tiles in float32."""
    return (
        a.dtype == torch.bfloat16
        and a.numel() * columns >= LEAST
        and a.numel() >= FEW * a.shape[-1]
        and not torch.is_grad_enabled()
        and _plain(a, torch.bfloat16)
        and _plain(b, torch.bfloat16)
        and _imitated()
        and not getattr(_HERE, "elsewhere", False)
    )


@functools.cache
def _imitated() -> bool:
    """Whether this processor has no products of bfloat16, as far as it says what it has."""
    return not _facts_of_processor() & {"avx512_bf16", "amx_bf16", "bf16", ""}


def _facts_of_processor() -> set[str]:
    """What it says that it has; "" where it says nothing."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {""}
    named = (line.partition(":") for line in text.splitlines())
    found = (has for name, _, has in named if name.strip() in ("flags", "Features"))
    return set(next(found, "").split()) or {""}


def _plain(tensor: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    return (
        tensor.dtype == dtype
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
