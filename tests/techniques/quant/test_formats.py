"""Formats of weights: bytes and values of bitsandbytes' and GGUF's own, written out plainly."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from outsize.errors import OutsizeError
from outsize.kernels import codes, native
from outsize.kernels.coded import linear
from outsize.models.coding import FORMATS, Grid, decoded, encoded, format_of, over
from outsize.techniques.quant import int4, int8, nf4

SIZES = {
    "int8": 66 / 64, "int4": 34 / 64, "q8_0": 34 / 32, "q4_0": 18 / 32, "q4_k": 144 / 256,
    "q5_k": 176 / 256, "q6_k": 210 / 256,
}  # fmt: skip
NAMES = [*SIZES, "int4:32", "int8:128", "nf4", "nf4:32", "int8-rows"]


def weights(rows: int = 24, inputs: int = 512, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers of several sizes, a row of zeros, groups with ties of both signs."""
    draw = torch.Generator().manual_seed(2)
    made = torch.randn(rows, inputs, generator=draw) * torch.logspace(-2, 1, rows)[:, None]
    made[3] = 0.0
    made[4] = torch.tensor([0.5, -0.5]).repeat(inputs // 2)
    return made.to(dtype)


def gguf_blocks(weight: np.ndarray, bits: int) -> np.ndarray:
    """Q8_0 or Q4_0 as ggml-quants.c has it, block by block."""
    found = []
    for x in weight.astype(np.float32).reshape(-1, 32):
        if bits == 8:
            d = np.abs(x).max() / np.float32(127)
            scaled = x * (np.float32(1) / d if d else np.float32(0))
            whole = np.trunc(np.abs(scaled) + np.float32(0.5)) * np.sign(scaled)
            codes = whole.astype(np.int8).view(np.uint8)
        else:
            largest = x[np.argmax(np.abs(x))]
            d = largest / np.float32(-8)
            scaled = x * (np.float32(1) / d if d else np.float32(0))
            q = np.minimum(15, (scaled + np.float32(8.5)).astype(np.uint8))
            codes = q[:16] | (q[16:] << 4)
        found.append(np.concatenate([np.array([d], np.float16).view(np.uint8), codes]))
    return np.concatenate(found).reshape(len(weight), -1)


@pytest.mark.parametrize("bits", [8, 4])
def test_gguf_blocks_are_byte_for_byte_those_of_ggml(bits):
    weight = weights()
    codes, _ = format_of(f"q{bits}_0").encode(weight)
    assert np.array_equal(codes.numpy(), gguf_blocks(weight.numpy(), bits))


def test_what_is_farthest_from_zero_is_the_first_of_several_and_scales_of_zero_give_zeros():
    groups = torch.tensor(
        [[1.0, -3, 2], [3, 1, -3], [-3, 3, 1], [0, 0, 0], [-0.0, 0, 0], [1, 5, -2]]
    )
    wanted = [x[np.argmax(np.abs(x))] for x in groups.numpy()]
    found = codes.farthest(groups)
    assert found.shape == (6, 1) and found.flatten().tolist() == wanted
    assert torch.equal(found.signbit().flatten(), torch.tensor(np.signbit(wanted)))
    assert codes.farthest(groups.to("meta")).shape == (6, 1)
    groups[1, 1] = math.nan
    assert codes.farthest(groups).isnan().flatten().tolist() == [False, True, *4 * [False]]
    quotient = over(torch.tensor([[2.0, -1], [3, -4]]), torch.tensor([[0.0], [2]]))
    assert quotient.tolist() == [[0, 0], [1.5, -2]]


@pytest.mark.parametrize("made", [int4, int8])
@pytest.mark.parametrize("group", [16, 64, 256])
def test_the_native_pass_makes_the_blocks_of_its_twin(made, group, monkeypatch):
    """Zeros of either sign, ties, halves of a step, numbers that scales below the least lose."""
    if native.library() is None:
        pytest.skip("no compiler")
    x = torch.randn(64, group, generator=torch.Generator().manual_seed(0))
    x *= torch.logspace(-45, 37, 64)[:, None]
    x[0], x[1], x[2, 3] = 0.0, -0.0, 0.0
    x[3] = torch.linspace(-8, 8, group).mul(2).round().div(2)  # both ends are as far
    x[4], x[5, 5:7] = -x[3], torch.tensor([9.0, -9.0])
    x[6] = torch.linspace(-127, 127, group).mul(2).round().div(2)
    wanted = made.plainly(x)
    monkeypatch.setattr(codes, "farthest", None)
    monkeypatch.setattr(made, "plainly", None)  # is asked for nothing
    assert torch.equal(made.pack(x), wanted)
    for bad in (math.nan, math.inf, -math.inf):
        x[7, 2] = bad
        with pytest.raises(OutsizeError, match="scales are not finite"):
            encoded(format_of(f"{made.NAME}:{group}"), x, "a weight")


@pytest.mark.parametrize("name", ["nf4", "int4:32", "q4_k"])
def test_the_shape_of_a_weight_is_known_without_decoding(name, monkeypatch):
    """Its operators would import torch._dynamo, where a directory is described: 2 seconds."""
    form = format_of(name)
    codes, shared = form.encode(weights())
    wanted = decoded(form, codes, shared)
    monkeypatch.setattr(type(form), "decode", None)
    found = decoded(form, codes.to("meta"), None if shared is None else shared.to("meta"))
    assert found.is_meta and (found.shape, found.dtype) == (wanted.shape, wanted.dtype)


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_k", "q5_k", "q6_k"])
def test_the_gguf_package_reads_and_writes_the_same(name):
    quants = pytest.importorskip("gguf.quants")
    from gguf import GGMLQuantizationType as Types

    form, kind, weight = format_of(name), Types[name.upper()], weights()
    codes, _ = form.encode(weight)
    assert np.array_equal(
        quants.dequantize(codes.numpy(), kind), decoded(form, codes, None).numpy()
    )
    if not name.endswith("_k"):  # which the package reads alone
        assert np.array_equal(quants.quantize(weight.numpy(), kind), codes.numpy())


@pytest.mark.parametrize(("name", "wide"), [("q5_k", (1, 3)), ("q6_k", (209,))])
def test_any_bits_decode_as_the_gguf_package_decodes_them(name, wide):
    quants = pytest.importorskip("gguf.quants")
    from gguf import GGMLQuantizationType as Types

    form, draw = format_of(name), torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (6, form.block), dtype=torch.uint8, generator=draw)
    blocks[:, list(wide)] &= 0x3B  # finite scales
    wanted = quants.dequantize(blocks.numpy(), Types[name.upper()])
    assert np.array_equal(form.decode(blocks, None, Grid(1)).numpy(), wanted)


def q4_k_values(block: np.ndarray) -> np.ndarray:
    """The 256 numbers of a super-block by its bits, one at a time (ggml-quants.c)."""
    d, least = block[:4].copy().view(np.float16).astype(np.float32)
    s, codes, found = [int(x) for x in block[4:16]], block[16:], []
    for part in range(8):
        if part < 4:
            step, low = s[part] & 63, s[part + 4] & 63
        else:
            step = (s[part + 4] & 15) | (s[part - 4] >> 6 << 4)
            low = (s[part + 4] >> 4) | (s[part] >> 6 << 4)
        here = codes[part // 2 * 32 : part // 2 * 32 + 32]
        q = (here >> 4 if part % 2 else here & 15).astype(np.float32)
        found.append(d * np.float32(step) * q - least * np.float32(low))
    return np.concatenate(found)


def test_q4_k_decodes_any_bits_as_ggml_does():
    draw = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (6, 144), dtype=torch.uint8, generator=draw)
    blocks[:, 1] &= 0x3B  # finite scales
    blocks[:, 3] &= 0x3B
    wanted = np.stack([q4_k_values(block) for block in blocks.numpy()])
    assert np.array_equal(format_of("q4_k").decode(blocks, None, Grid(1)).numpy(), wanted)


def dynamic_map() -> torch.Tensor:
    """bitsandbytes' create_dynamic_map(signed=True)."""
    found = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1)
        means = 10.0 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2.0)
        found += means.tolist() + (-means).tolist()
    return torch.tensor(sorted(found))


def nearest(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return (x[:, None] - table).abs().argmin(-1)


def test_nf4_is_that_of_the_paper_in_values_scales_and_order():
    """Blocks of 64 over the flat weight; their largest, less the mean, in 8 bits by 256s."""
    weight, form = weights(24, 1536), format_of("nf4")
    codes, shared = form.encode(weight)
    flat = weight.reshape(-1, 64)
    absmax = flat.abs().amax(-1)
    offset = absmax.mean()
    table, values = dynamic_map(), torch.tensor(nf4.VALUES)
    second = torch.stack([x.abs().max() for x in (absmax - offset).split(256)])
    scaled = (absmax - offset) / second.repeat_interleave(256)[: len(absmax)]
    names = nearest(scaled, table)
    largest = table[names] * second.repeat_interleave(256)[: len(absmax)] + offset
    q = nearest((flat / absmax.clamp(min=1e-30)[:, None]).flatten(), values).view(-1, 64)
    wanted = (values[q] * largest[:, None]).view_as(weight)
    torch.testing.assert_close(decoded(form, codes, shared), wanted, rtol=1e-6, atol=1e-7)
    bytes_of_blocks = codes.view(-1, 33)
    assert torch.equal(bytes_of_blocks[:, 0].long(), names)
    assert torch.equal(bytes_of_blocks[:, 1:].long(), q[:, ::2] * 16 + q[:, 1::2])
    quantiles = torch.distributions.Normal(0, 1).icdf(torch.linspace(0.9677083, 0.5, 9)[:-1])
    assert torch.allclose(values[8:], (quantiles / quantiles[0]).flip(0), atol=1e-4)
    borders = (values[1:] + values[:-1]) / 2  # which are the lower one's, as in bitsandbytes
    assert nf4._nearest(borders, values).tolist() == list(range(15))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_bits_are_as_said_and_values_within_a_step(name, dtype):
    weight, form = weights(dtype=dtype), format_of(name)
    made = encoded(form, weight, "w")
    held = sum(x.nbytes for x in made.values())
    scales = 4 * len(weight) if name == "int8-rows" else 0  # which its bits leave out
    assert (held - scales) * 8 / weight.numel() == pytest.approx(form.bits, rel=2e-3)
    if name in SIZES:
        assert held == SIZES[name] * weight.numel()
    if name.startswith("nf4"):  # its scales have steps of their own
        return
    found = decoded(form, made["codes"], made.get("code_scales"))
    groups = weight.to(torch.float32).view(-1, 512 if scales else form.group)
    wide = groups.amax(-1) - groups.amin(-1) if name == "q4_k" else groups.abs().amax(-1)
    step = wide / (127 if "8" in name.partition(":")[0] else 8)
    error = (found.view_as(groups) - groups).abs().amax(-1)
    assert (error <= step * 1.02 + 1e-7).all(), name
    assert not found[3].any()


@pytest.mark.parametrize("name", NAMES)
def test_rows_and_blocks_of_codes_are_those_of_the_weight(name):
    """What a worker of a tensor axis has, and what a product decodes at a time."""
    weight, form = weights(40), format_of(name)
    codes, shared = form.encode(weight)
    whole = decoded(form, codes, shared)
    stride = 512 // form.group
    part = form.decode(codes[10:30], shared, Grid(stride).below(10))
    assert torch.equal(part, whole[10:30])
    some = codes[:, (stride // 2) * form.block :]
    part = form.decode(some, shared, Grid(stride, column=stride // 2))
    assert torch.equal(part, whole[:, 256:])


@pytest.mark.parametrize("order", ["bytes", "halves", "pairs"])
@pytest.mark.parametrize("group", [16, 32, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_pass_in_c_is_its_twin_bit_for_bit(order, group, dtype):
    draw = torch.Generator().manual_seed(1)
    size = 3 + (group if order == "bytes" else group // 2)
    blocks = torch.randint(0, 256, (77, size), dtype=torch.uint8, generator=draw)
    scales = torch.randn(77, 1, generator=draw)
    table = None if order == "bytes" else torch.randn(16, generator=draw)
    found = codes.decoded(codes.Laid(blocks, scales, table, order, 3), dtype)
    wanted = codes.plain(blocks, scales, table, order, 3).to(dtype)
    assert found.shape == (77, group) and torch.equal(found, wanted)


def test_products_by_pieces_are_those_of_the_weight(monkeypatch):
    monkeypatch.setattr("outsize.kernels.coded.PIECE", 7 * 512)
    weight = weights(40).double()
    x = torch.randn(2, 5, 512, dtype=torch.float64, requires_grad=True)
    seen = []

    def decode(first, last, dtype):
        seen.append((first, last))
        return weight[first:last].to(dtype)

    y = linear(x, (40, 512), decode)
    assert seen[0] == (0, 7) and seen[-1] == (35, 40) and len(seen) == 6
    up = torch.randn_like(y)
    y.backward(up)
    torch.testing.assert_close(y, x @ weight.T, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x.grad, up @ weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["int5", "int4:13", "int4:", "nf4:33", "q8_0:64"])
def test_what_is_no_format_is_refused_in_a_line(name):
    with pytest.raises(OutsizeError, match="weights: ") as caught:
        format_of(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", FORMATS.names())
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_weight_that_is_not_finite_is_refused(name, bad):
    weight = weights()
    weight[7, 9] = bad
    with pytest.raises(OutsizeError, match=r"^blocks\.0\.mlp\.up: its scales are not finite"):
        encoded(format_of(name), weight, "blocks.0.mlp.up")


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_alone_in_its_block_comes_back(name):
    """Its size is what scales are made of: nothing but their own rounding is lost."""
    for value in (1.0, -1.0):
        weight = torch.zeros(2, 512)
        weight[0, 5] = value
        found = decoded(format_of(name), *format_of(name).encode(weight))
        torch.testing.assert_close(found, weight, rtol=0, atol=1e-3)
    for weight in (torch.linspace(1, 2, 512).view(1, -1), torch.linspace(-2, -1, 512).view(1, -1)):
        found = decoded(format_of(name), *format_of(name).encode(weight))
        torch.testing.assert_close(found, weight, rtol=0, atol=0.3)  # far from zero, all of them


def test_a_scale_of_few_bits_turns_no_sign():
    """1.3e-38 / 127 is rounded to one tenth less in bfloat16, which has no smaller number."""
    weight = torch.full((1, 64), 1.3e-38)
    assert (decoded(format_of("int8"), *format_of("int8").encode(weight)) > 1.1e-38).all()


def test_columns_of_nf4_have_the_second_scales_of_their_groups():
    """Of which there is one for 256 groups: here another one begins within a row."""
    form, weight = format_of("nf4:32"), weights(24, 576)
    codes, shared = form.encode(weight)
    stride, at = 18, 9
    some = codes.view(24, stride, form.block)[:, at:].reshape(24, -1)
    part = form.decode(some, shared, Grid(stride, column=at))
    assert torch.equal(part, decoded(form, codes, shared)[:, at * 32 :])
