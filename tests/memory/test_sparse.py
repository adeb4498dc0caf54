"""Bitmap-sparse images: bit for bit, native against plain, and damaged ones."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from outsize.errors import OutsizeError
from outsize.kernels import native
from outsize.memory import sparse

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8)
SIZES = (1, 63, 64, 65, 1000, sparse.GROUP, 3 * sparse.GROUP + 77)
# Patterns that arithmetic would change: -0.0, NaNs with payloads, a denormal, an infinity.
ODD_32 = np.array([0x80000000, 0x7FC00001, 0x7F800001, 0xFFC0BEEF, 1, 0x7F800000], np.uint32)


def weights(size, density, dtype, seed=0):
    torch.manual_seed(seed)
    x = (torch.randn(size) * 9).to(dtype)
    x[torch.rand(size) >= density] = 0
    return x


def bits(x):
    return x.view(torch.uint8)


@pytest.fixture(params=["native", "plain"])
def passes(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("no C++ compiler")


@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize(("dtype", "size"), [*itertools.product(DTYPES, SIZES)])
def test_unpacked_is_what_was_packed(dtype, size):
    for density in (0.0, 0.03, 0.5, 1.0):
        x = weights(size, density, dtype)
        image = sparse.pack(x)
        assert len(image) == sparse.packed_bytes(x) and len(image) % sparse.ALIGNMENT == 0
        out = torch.full_like(x, 5)
        sparse.unpack(image, out)
        assert torch.equal(bits(out), bits(x))


@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_patterns_that_arithmetic_would_change(dtype):
    high = dtype != torch.float32
    odd = (ODD_32 >> 16).astype(np.uint16).view(np.int16) if high else ODD_32.view(np.int32)
    x = torch.zeros(200, dtype=torch.int16 if high else torch.int32)
    x[10 : 10 + len(odd)] = torch.from_numpy(odd)
    x[-len(odd) :] = torch.from_numpy(odd)
    image = sparse.pack(x.view(dtype))
    out = torch.empty(200, dtype=dtype)
    sparse.unpack(image, out)
    assert torch.equal(out.view(x.dtype), x)
    assert sparse.opened(image).layout.nonzeros == int((x != 0).sum())


@pytest.mark.parametrize("dtype", DTYPES)
def test_native_images_are_those_of_the_twins(dtype, monkeypatch):
    if native.library() is None:
        pytest.skip("no C++ compiler")
    x = weights(2 * sparse.GROUP + 130, 0.4, dtype)
    image = sparse.pack(x)
    monkeypatch.setattr(native, "library", lambda: None)
    assert torch.equal(sparse.pack(x), image)
    # And what numpy says of the same bytes.
    nonzero = x.numpy() != 0 if dtype != torch.bfloat16 else x.view(torch.int16).numpy() != 0
    bitmap = np.packbits(nonzero, bitorder="little")
    assert np.array_equal(image[64 : 64 + len(bitmap)].numpy(), bitmap)


@pytest.mark.parametrize("size", [20 * sparse.GROUP + 5, (5 << 20) + 1])  # the second past caches
def test_threads_share_the_groups(size):
    x = weights(size, 0.5, torch.bfloat16)
    image, out = sparse.pack(x), torch.empty_like(x)
    for threads in (1, 2, 5):
        out.fill_(7)
        sparse.unpack(image, out, threads)
        assert torch.equal(out, x)


@pytest.mark.parametrize(
    ("dtype", "element", "density"),
    [(torch.float32, 32, 0.5), (torch.bfloat16, 16, 0.5), (torch.bfloat16, 16, 0.1)],
)
def test_bytes_are_a_bit_an_element_and_the_nonzeros(dtype, element, density):
    size = 1 << 20
    x = weights(size, density, dtype)
    kept = int((x != 0).sum())
    formula = (size + kept * element) / 8
    assert 1.0 <= len(sparse.pack(x)) / formula < 1.005


def test_padding_behind_an_image_is_passed_over():
    x = weights(500, 0.5, torch.float32)
    image = sparse.pack(x)
    out = torch.empty_like(x)
    sparse.unpack(torch.cat([image, torch.full((4096,), 255, dtype=torch.uint8)]), out)
    assert torch.equal(out, x)


@pytest.mark.usefixtures("passes")
def test_a_damaged_image_is_refused():
    x = weights(3 * sparse.GROUP, 0.5, torch.bfloat16)
    image = sparse.pack(x)
    layout = sparse.opened(image).layout
    cases = {"begin": 0, "disagree": layout.bitmap.start + 1000}
    for message, at in cases.items():
        hurt = image.clone()
        hurt[at] ^= 1
        with pytest.raises(OutsizeError, match=message):
            sparse.unpack(hurt, torch.empty_like(x))
    for hurt in (image[: len(image) // 2], image[:10]):
        with pytest.raises(OutsizeError, match="damaged"):
            sparse.unpack(hurt, torch.empty_like(x))
    huge = image.clone()
    huge[24:32].view(torch.int64).fill_(2**40)
    with pytest.raises(OutsizeError, match="damaged"):
        sparse.unpack(huge, torch.empty_like(x))


def test_starts_that_lie_never_read_past_the_values():
    if native.library() is None:
        pytest.skip("no C++ compiler")
    x = weights(3 * sparse.GROUP, 0.5, torch.bfloat16)
    for group, start in ((1, 10**12), (2, -(10**12)), (3, 0)):
        hurt = sparse.pack(x)
        sparse.opened(hurt).starts_G1[group] = start
        with pytest.raises(OutsizeError, match="disagree"):
            sparse.unpack(hurt, torch.empty_like(x))
    hurt = sparse.pack(x)
    sparse.opened(hurt).starts_G1[1:3] += 10**9  # group 1 agrees with itself, far outside
    with pytest.raises(OutsizeError, match="disagree"):
        sparse.unpack(hurt, torch.empty_like(x))


def test_an_image_of_another_tensor_is_refused():
    image = sparse.pack(weights(500, 0.5, torch.float32))
    for wrong in (torch.empty(499), torch.empty(500, dtype=torch.bfloat16)):
        with pytest.raises(OutsizeError, match="does not fit"):
            sparse.unpack(image, wrong)
    with pytest.raises(OutsizeError, match="flatten"):
        sparse.pack(torch.ones(4, 4))
