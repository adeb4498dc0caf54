"""Blocks in one native call: bit for bit what the modules give, pages included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stepping import LLAMA, stepped

from outsize.decode.paged import PagedCache
from outsize.decode.runs import Runs, each_alone, runs_of
from outsize.kernels import native
from outsize.kernels.pages import FORMS, Pool
from outsize.models.build import build
from outsize.models.coding import asked
from outsize.models.decoder import Block, Decoder
from outsize.models.families import parse

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C++ compiler")
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "biases": {**LLAMA, "model_type": "qwen2"},
    "norms of heads": {**LLAMA, "model_type": "qwen3", "head_dim": 24},
    "windows": {**LLAMA, "model_type": "mistral", "sliding_window": 5},
    "keys of each head": {**LLAMA, "num_key_value_heads": 4},
}
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "gpt2": ({"model_type": "gpt2", "vocab_size": 50, "n_positions": 64, "n_embd": 32,
              "n_layer": 2, "n_head": 2}, "feed-forward"),
    "gemma2": ({**LLAMA, "model_type": "gemma2", "head_dim": 32}, "feed-forward"),
}  # fmt: skip


def model_of(said: dict[str, Any], dtype: torch.dtype, format: str | None = None) -> Decoder:
    """With weights in a format: codes at random, with small scales."""
    model = build(asked(parse(said), format), seed=1)
    draw = torch.Generator().manual_seed(3)
    for one in model.modules():
        coded = getattr(one, "coded", None)
        if coded is not None:
            sizes = one.sizes
            codes, shared = coded.format.encode(torch.randn(sizes, generator=draw) * 0.1)
            one.codes.data.copy_(codes)
            if shared is not None:
                one.code_scales.data.copy_(shared)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            with torch.no_grad():
                parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.05)
    return model.to(dtype)


def played(
    model: Decoder, form: str, native_runs: bool, others: tuple[int, ...] = ()
) -> list[torch.Tensor]:
    """What goes out of the blocks in three steps, prompts and single tokens mixed."""
    runs = runs_of(model)
    assert runs is not None and set(runs.why) == set(others)
    through = runs if native_runs else each_alone
    return [x for _ in range(2) for x in stepped(model, PagedCache(9, 16, 3, form), through)]


@pytest.mark.parametrize(
    ("name", "dtype", "form"),
    [
        (name, (torch.float32, torch.bfloat16)[(i + j) % 2], form)
        for i, name in enumerate(MODELS)
        for j, form in enumerate(FORMS)
    ],
)
def test_a_run_is_its_modules_bit_for_bit(name: str, dtype: torch.dtype, form: str) -> None:
    model = model_of(MODELS[name], dtype)
    found, expected = (played(model, form, native_runs) for native_runs in (True, False))
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs) and bool(mine.isfinite().all())


# Prompts that begin a tile of training's, end in one, go on within one and lie in pages anywhere.
LONG = (
    [7, 2, 11, 0, 9, 1, 14, 3, 21, 20, 23, 22, 19], [5], [4, 13, 6, 15, 8, 12, 10, 16, 17, 18],
)  # fmt: skip
SLICES = ((70, 2, 64), (1, 1, 65), (135, 0, 1), (1, 1, 20), (1, 0, 0))


@pytest.mark.parametrize(
    ("name", "dtype", "form", "format"),
    [
        ("llama", torch.float32, "as-stored", None), ("windows", torch.float32, "as-stored", None),
        ("norms of heads", torch.bfloat16, "as-stored", None),
        ("llama", torch.float32, "int8", None),
        ("keys of each head", torch.float32, "as-stored", None),
        ("llama", torch.float32, "as-stored", "int8:32+a8"),
        ("biases", torch.float32, "as-stored", "int4:32+a8"),
        ("llama", torch.bfloat16, "as-stored", "int8-rows:32+outliers"),
    ],
)  # fmt: skip
def test_prompts_are_in_runs_bit_for_bit(
    name: str, dtype: torch.dtype, form: str, format: str | None
) -> None:
    """By a team of three, beside modules on one thread. Of 136 tokens that are rounded to 8 bits,
    128 are so together, each by the thread whose token it is; a single one by each for itself."""
    said, threads, made = MODELS[name], torch.get_num_threads(), []
    model = model_of(said if format is None else said | {"intermediate_size": 192}, dtype, format)
    runs = runs_of(model)
    assert runs is not None
    try:
        for through, count in ((runs, 3), (each_alone, 1)):
            torch.set_num_threads(count)
            made.append(stepped(model, PagedCache(24, 16, 3, form), through, LONG, SLICES))
    finally:
        torch.set_num_threads(threads)
    found, expected = made
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs) and bool(mine.isfinite().all())


@pytest.mark.parametrize(
    "format", ["int8", "int4:32", "q8_0", "q4_0", "nf4:32", "int4:32+a8", "int8-rows:32+outliers"]
)
def test_codes_are_multiplied_as_modules_do(format: str) -> None:
    model = model_of(LLAMA | {"intermediate_size": 192}, torch.float32, format)
    found, expected = (played(model, "as-stored", native_runs) for native_runs in (True, False))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", OTHERS)
def test_other_blocks_say_what_keeps_them(name: str) -> None:
    said, why = OTHERS[name]
    model = build(parse(said), seed=0)
    assert runs_of(model) is None
    runs = Runs(model.blocks, torch.float32)
    assert all(why in one for one in runs.why.values())


def test_a_block_of_another_sort_is_called_between_runs() -> None:
    class Own(Block):
        """Says that it does something else."""

    model = model_of(LLAMA, torch.float32)
    expected = played(model, "as-stored", False)
    model.blocks[1].__class__ = Own
    found = played(model, "as-stored", True, others=(1,))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("form", ["int8", "int4", "bf16"])
@pytest.mark.parametrize("size", [24, 32, 50])
def test_what_pages_are_given_is_the_twins(form: str, size: int) -> None:
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(6, 2, size, generator=draw)
    x[1] = 0
    x[2, 0, : size // 2] *= -1e4
    pools = [Pool(FORMS[form], 2, 4, x) for _ in range(2)]
    where = torch.tensor([5, 1, 0, 7, 2, 3])
    for pool in pools:
        pool.data.zero_()
        if pool.scales is not None:
            pool.scales.zero_()
    with torch.no_grad():
        pools[0].put(where, x)
        pools[1].plain_put(where, x)
    assert torch.equal(pools[0].data, pools[1].data)
    if pools[0].scales is not None and pools[1].scales is not None:
        assert torch.equal(pools[0].scales, pools[1].scales)
