"""Bitmap-sparse images of pruned weights at rest (Joo et al., "Endor", 2024).

Half of a pruned matrix is zeros, and reading them is time lost. An image holds one bit an element,
which says whether it is there, and the elements that are: 9 bits for 16 at half density. Unlike
lists of indices it never loses much, and unpacking is one pass without a search. Exact: an element
is left out only if all its bits are zero.

An image, little-endian, each part at a multiple of 64 bytes:

    header   magic, width, elements, non-zeros, elements a group (5 x 8 bytes)
    bitmap   one bit an element, lowest first, in words of 64
    starts   int64, non-zeros before each group, and all of them: groups unpack side by side
    values   the non-zeros in order, and 64 bytes that may be read but mean nothing
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.errors import OutsizeError
from outsize.kernels import native, sparse

ALIGNMENT = 64  # bytes: a cache line, the widest vector
GROUP = 8192  # elements unpacked by one thread at a time; its start costs 8 bytes in 16 KiB
MAGIC = int.from_bytes(b"OUTSPRS1", "little")

assert sys.byteorder == "little", "images are read as they lie"


@dataclass(frozen=True)
class Layout:
    """Sizes of an image: width in bytes of an element, counts in elements, offsets in bytes."""

    width: int
    elements: int
    nonzeros: int
    group: int = GROUP

    @property
    def bitmap(self) -> slice:
        return _part(ALIGNMENT, 8 * -(-self.elements // sparse.WORD))

    @property
    def starts(self) -> slice:
        return _part(_up(self.bitmap.stop), 8 * (-(-self.elements // self.group) + 1))

    @property
    def values(self) -> slice:
        return _part(_up(self.starts.stop), self.width * self.nonzeros)

    @property
    def nbytes(self) -> int:
        return _up(self.values.stop) + ALIGNMENT


@dataclass(frozen=True)
class Packed:
    """The parts of an image, as views of it."""

    layout: Layout
    bitmap_B: Tensor
    starts_G1: Tensor
    values_Z: Tensor


def packed_bytes(flat: Tensor) -> int:
    """Bytes of the image of a flat tensor."""
    integers = _integers(flat)
    counts = integers.count_nonzero()
    return Layout(flat.element_size(), flat.numel(), int(counts)).nbytes


def pack(flat: Tensor) -> Tensor:
    """The image (uint8, on the same device) of a flat tensor of elements of 1, 2, 4 or 8 bytes."""
    integers = _integers(flat)
    bitmap_B, counts_G = sparse.mark(integers, GROUP)
    starts_G1 = torch.nn.functional.pad(counts_G.cumsum(0), (1, 0))
    layout = Layout(flat.element_size(), flat.numel(), int(starts_G1[-1]))
    image = torch.zeros(layout.nbytes, dtype=torch.uint8, device=flat.device)
    fields = (MAGIC, layout.width, layout.elements, layout.nonzeros, layout.group)
    image[: 8 * len(fields)].view(torch.int64).copy_(torch.tensor(fields))
    parts = _parts(image, layout)
    parts.bitmap_B.copy_(bitmap_B)
    parts.starts_G1.copy_(starts_G1)
    sparse.pack(integers, bitmap_B, starts_G1, GROUP, parts.values_Z)
    return image


def unpack(image: Tensor, out: Tensor, threads: int | None = None) -> None:
    """Write every element of `out`, flat, of the dtype that was packed; `image` may be followed by
    padding. threads: of the CPU, PyTorch's number if not given.

    Raises OutsizeError for an image that is damaged or of another size; `out` is then worthless.
    """
    parts = opened(image)
    layout, integers = parts.layout, _integers(out)
    if (layout.width, layout.elements) != (out.element_size(), out.numel()):
        raise OutsizeError(
            f"a sparse image of {layout.elements:,} elements of {layout.width} bytes does not fit "
            f"{out.numel():,} of {out.element_size()}; unpack it into what was packed"
        )
    count = native.threads() if threads is None else threads
    if not sparse.unpack(
        parts.bitmap_B, parts.starts_G1, parts.values_Z, layout.group, integers, count
    ):
        raise _damaged("its bitmap and its counts disagree")


def opened(image: Tensor) -> Packed:
    """The parts of an image. Raises OutsizeError for bytes that are no whole image."""
    if image.numel() < ALIGNMENT:
        raise _damaged(f"it has {image.numel()} bytes")
    if image.data_ptr() % 8:
        raise _damaged("it does not begin at a multiple of 8 bytes")
    magic, *sizes = image[:40].view(torch.int64).tolist()
    if magic != MAGIC:
        raise _damaged("it does not begin with OUTSPRS1")
    layout = Layout(*sizes)
    width, elements, nonzeros, group = sizes
    sane = width in sparse.INTEGERS and 0 <= nonzeros <= elements and group > 0
    if not sane or group % sparse.WORD or layout.nbytes > image.numel():
        raise _damaged(f"{image.numel():,} bytes for a header of {sizes}")
    return _parts(image, layout)


def _parts(image: Tensor, layout: Layout) -> Packed:
    return Packed(
        layout,
        image[layout.bitmap].view(torch.int64),
        image[layout.starts].view(torch.int64),
        image[layout.values].view(sparse.INTEGERS[layout.width]),
    )


def _integers(flat: Tensor) -> Tensor:
    """The same memory as integers of the same width."""
    if flat.dim() != 1 or not flat.is_contiguous() or flat.is_complex():
        raise OutsizeError(
            f"a tensor of shape {tuple(flat.shape)} and {flat.dtype} cannot be packed; expected a "
            "flat one: pass weight.flatten()"
        )
    return flat.detach().view(sparse.INTEGERS[flat.element_size()])


def _part(start: int, nbytes: int) -> slice:
    return slice(start, start + nbytes)


def _up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _damaged(why: str) -> OutsizeError:
    return OutsizeError(f"a sparse image is damaged: {why}; write it again from the weights")
