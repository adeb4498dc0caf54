"""Packing and unpacking of bitmap-sparse buffers: sparse.cpp, each part with a plain twin.

Elements are seen as integers of their width, so that every bit pattern passes through unchanged;
zero is the element with no bit set, and -0.0 is not one. The twins are PyTorch and run on any
device; they serve where `native` finds no compiler or where the buffers are not on the CPU.

N elements, B = ceil(N / 64) words of the bitmap, G groups, Z non-zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outsize.kernels import native
from outsize.kernels.native import Passes

WORD = 64  # elements of a word of the bitmap
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def mark(x_N: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """(bitmap_B, counts_G), int64 both: the non-zeros of integers x_N, and how many each group of
    `group` elements, a multiple of 64, has."""
    found = _library(x_N)
    if found is None:
        return plain_mark(x_N, group)
    bitmap_B = torch.empty(-(-x_N.numel() // WORD), dtype=torch.int64)
    counts_G = torch.empty(-(-x_N.numel() // group), dtype=torch.int64)
    found.outsize_sparse_mark(
        *(x_N.element_size(), x_N.data_ptr(), x_N.numel(), group),
        *(bitmap_B.data_ptr(), counts_G.data_ptr(), native.threads()),
    )
    return bitmap_B, counts_G


def pack(x_N: Tensor, bitmap_B: Tensor, starts_G1: Tensor, group: int, values_Z: Tensor) -> None:
    """The non-zeros of integers x_N, in order, into values_Z; starts_G1: those before a group."""
    found = _library(x_N, values_Z)
    if found is None:
        plain_pack(x_N, values_Z)
        return
    found.outsize_sparse_pack(
        *(x_N.element_size(), x_N.data_ptr(), x_N.numel(), group, bitmap_B.data_ptr()),
        *(starts_G1.data_ptr(), values_Z.data_ptr(), native.threads()),
    )


def unpack(
    bitmap_B: Tensor, starts_G1: Tensor, values_Z: Tensor, group: int, out_N: Tensor, threads: int
) -> bool:
    """Write all of out_N, integers; False, and any content, where the parts do not fit together.

    At least 63 bytes of the memory behind values_Z must be readable; they are not used.
    """
    found = _library(bitmap_B, starts_G1, values_Z, out_N)
    if found is None:
        return plain_unpack(bitmap_B, values_Z, out_N)
    wrong: int = found.outsize_sparse_unpack(
        *(out_N.element_size(), bitmap_B.data_ptr(), starts_G1.data_ptr(), values_Z.data_ptr()),
        *(out_N.numel(), group, values_Z.numel(), out_N.data_ptr(), threads),
    )
    return wrong == 0


def plain_mark(x_N: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """The twin of outsize_sparse_mark."""
    set_N = x_N != 0
    pad = -len(set_N) % group
    padded = torch.nn.functional.pad(set_N, (0, pad))
    counts_G = padded.view(-1, group).sum(1)
    words = padded[: -(-len(set_N) // WORD) * WORD].view(-1, WORD).long()
    return (words << torch.arange(WORD, device=x_N.device)).sum(1), counts_G


def plain_pack(x_N: Tensor, values_Z: Tensor) -> None:
    """The twin of outsize_sparse_pack."""
    values_Z.copy_(x_N[x_N != 0])


def plain_unpack(bitmap_B: Tensor, values_Z: Tensor, out_N: Tensor) -> bool:
    """The twin of outsize_sparse_unpack; the bitmap alone says where each value goes."""
    bits = (bitmap_B[:, None] >> torch.arange(WORD, device=bitmap_B.device)) & 1
    set_N = bits.flatten()[: out_N.numel()].bool()
    if int(bits.sum()) != values_Z.numel() or int(set_N.sum()) != values_Z.numel():
        return False
    out_N.zero_()
    out_N[set_N] = values_Z
    return True


def _library(*tensors: Tensor) -> Passes | None:
    """The passes, for tensors that lie one element behind another on the CPU."""
    if any(x.device.type != "cpu" or not x.is_contiguous() for x in tensors):
        return None
    return native.library()
