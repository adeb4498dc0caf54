"""How a flat buffer is written down on a tier: as it is, or smaller, and exactly the same again.

A store keeps bytes; a codec says what they mean. What reads a chunk asks the codec, by the name
that was kept beside it, to put its image into the room where the chunk is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from outsize.errors import OutsizeError, nearest
from outsize.memory import sparse


class Codec(Protocol):
    """decode(encode(flat), out) makes out equal flat, bit for bit."""

    @property
    def name(self) -> str: ...

    def nbytes(self, flat: Tensor) -> int:
        """Bytes of its image."""

    def encode(self, flat: Tensor) -> Tensor:
        """The image of a flat tensor, uint8; it may share the tensor's memory."""

    def decode(self, image: Tensor, out: Tensor) -> None:
        """Write the flat tensor `out`; padding behind the image is passed over. Raises OutsizeError
        for an image that does not fit."""


class Dense:
    """Every element."""

    name = "dense"

    def nbytes(self, flat: Tensor) -> int:
        return flat.nbytes

    def encode(self, flat: Tensor) -> Tensor:
        return flat.detach().contiguous().view(torch.uint8)

    def decode(self, image: Tensor, out: Tensor) -> None:
        if image.numel() < out.nbytes:
            raise OutsizeError(
                f"a dense image of {image.numel():,} bytes, expected {out.nbytes:,}; it was cut or "
                "belongs to another tensor: write it again from the weights"
            )
        out.view(torch.uint8).copy_(image[: out.nbytes])


class Bitmap:
    """A bit an element and the non-zeros (outsize/memory/sparse.py)."""

    name = "bitmap"

    def nbytes(self, flat: Tensor) -> int:
        return sparse.packed_bytes(flat)

    def encode(self, flat: Tensor) -> Tensor:
        return sparse.pack(flat)

    def decode(self, image: Tensor, out: Tensor) -> None:
        sparse.unpack(image, out)


CODECS: Mapping[str, Codec] = {codec.name: codec for codec in (Dense(), Bitmap())}


def codec(name: str) -> Codec:
    """The codec of this name. Raises OutsizeError with the nearest name for an unknown one."""
    if name not in CODECS:
        raise OutsizeError(f"codec {name!r}{nearest(name, tuple(CODECS))}")
    return CODECS[name]


def best(flat: Tensor) -> Codec:
    """The codec whose image of this tensor is smallest; of equals the one that costs no work."""
    return min(CODECS.values(), key=lambda each: each.nbytes(flat))
