"""Codecs: every one gives back the same bits, and the smaller image is chosen."""

from __future__ import annotations

import pytest
import torch

from outsize.errors import OutsizeError
from outsize.memory import codec


def weights(density, dtype=torch.bfloat16, size=100_000):
    torch.manual_seed(1)
    x = torch.randn(size).to(dtype)
    x[torch.rand(size) >= density] = 0
    return x


@pytest.mark.parametrize("name", sorted(codec.CODECS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_codec_is_exact(name, dtype):
    each, x = codec.codec(name), weights(0.5, dtype)
    x[3], x[5] = -0.0, float("nan")
    image = each.encode(x)
    assert image.dtype == torch.uint8 and image.numel() == each.nbytes(x)
    out = torch.ones_like(x)
    padded = torch.cat([image, torch.zeros(4096, dtype=torch.uint8)])
    each.decode(padded, out)
    assert torch.equal(out.view(torch.uint8), x.view(torch.uint8))
    with pytest.raises(OutsizeError):
        each.decode(image[: image.numel() // 3], out)


@pytest.mark.parametrize(
    ("dtype", "density", "name"),
    [
        (torch.bfloat16, 1.0, "dense"),
        (torch.bfloat16, 0.96, "dense"),  # a bit an element costs a sixteenth
        (torch.bfloat16, 0.92, "bitmap"),
        (torch.float32, 0.98, "dense"),  # and a thirty-second here
        (torch.float32, 0.95, "bitmap"),
        (torch.bfloat16, 0.0, "bitmap"),
    ],
)
def test_the_smaller_image_is_chosen(dtype, density, name):
    assert codec.best(weights(density, dtype)).name == name


def test_an_unknown_codec_is_named_with_the_nearest():
    with pytest.raises(OutsizeError, match="did you mean 'bitmap'"):
        codec.codec("bitmpa")
