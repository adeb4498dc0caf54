"""GGUF files, as llama.cpp reads them: a decoder's facts, its tokenizer and its tensors.

The layout is that of ggml's docs/gguf.md, version 3. What a family's tensors are called is a table
in gguf_names.py; a family that is not in it is refused. Tensors are made one at a time.

O outputs, I inputs, H heads, P pairs of features of a head that turn together.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from outsize.checkpoint.gguf_names import (
    FAMILIES,
    context,
    grouped,
    lacking,
    main_rope,
    shape_of,
    window,
)
from outsize.checkpoint.gguf_words import Words, facts_of
from outsize.errors import OutsizeError
from outsize.models.coding import format_of
from outsize.models.config import DecoderConfig, Rope
from outsize.models.decoder import Decoder
from outsize.models.rope import frequencies

MAGIC, VERSION, ALIGN = b"GGUF", 3, 32
_CODES = {"u32": 4, "f32": 6, "bool": 7, "str": 8, "list": 9, "i32": 5}
# By the name of a type: its number in ggml, and that of a file that is mostly of it.
TYPES = {
    "F32": (0, 0), "F16": (1, 1), "BF16": (30, 32), "Q4_0": (2, 2), "Q8_0": (8, 7),
    "Q4_K": (12, 15), "Q5_K": (13, 17), "Q6_K": (14, 18),
}  # fmt: skip
# Of types that hold numbers as they are.
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FACTORS = "rope_freqs.weight"  # of Llama 3.1's way of stretching turns, which no fact says
# That hold numbers whatever the type is.
_NUMBERS = ("position_embd", "ffn_gate_inp")


@dataclass(frozen=True)
class Kept:
    """A tensor of the file. shape: rows first; make: its bytes, 1-D uint8."""

    name: str
    shape: tuple[int, ...]
    kind: str
    bytes: int
    make: Callable[[], Tensor]


def check(config: DecoderConfig, kind: str) -> None:
    """OutsizeError for a family that has no name here, for facts that the file cannot say, and for
    a type of tensors that is not known."""
    if kind not in TYPES:
        raise OutsizeError(f"gguf:{kind} is not known; expected one of {', '.join(TYPES)}")
    if config.family not in FAMILIES:
        raise OutsizeError(
            f"gguf has no name here for the family {config.family}; expected one of"
            f" {', '.join(FAMILIES)}: export it --to hf"
        )
    for what in lacking(config):
        raise OutsizeError(f"gguf: the model has {what}, which is not written; export it --to hf")


def write(model: Decoder, path: Path, kind: str, tokenizer: Words | None, name: str) -> list[str]:
    """Write a plain decoder; gives what there is to say of it. kind: of the blocks' matrices; norms
    and biases are F32, embedding and head F16 (F32 in a file of that), as are matrices whose rows
    blocks of the kind do not divide. tokenizer: None where there is none."""
    config = model.config
    check(config, kind)
    facts = dict(_facts(config, kind, name))
    words, why = facts_of(tokenizer, config)
    facts |= words
    kept = list(_tensors(model, kind))
    with path.open("wb") as file:
        _head(file, facts, kept)
        for one in kept:
            raw = one.make()
            assert raw.nbytes == one.bytes, one.name
            file.write(raw.numpy().tobytes())
            file.write(bytes(-one.bytes % ALIGN))
    matrices = [one for one in kept if len(one.shape) > 1 and one.name.startswith("blk.")]
    others = sum(one.kind == "F16" != kind for one in matrices)
    odd = f"{others} of {len(matrices)} matrices are F16: blocks of {kind} do not divide their rows"
    own = context(config)
    short = f"its context is {own} tokens: the architecture has no window, which the model has"
    return [*([odd] if others else []), *([short] if own < config.positions else []),
            *([why] if why else [])]  # fmt: skip


def factors_of(rope: Rope) -> Tensor:
    """What the frequency of each pair is divided by, float64 (P)."""
    here = torch.device("cpu")
    return frequencies(replace(rope, kind="default"), 0, here) / frequencies(rope, 0, here)


def _tensors(model: Decoder, kind: str) -> Iterator[Kept]:
    rope = main_rope(model.config)
    if rope is not None and rope.kind == "llama3":
        pairs = factors_of(rope).to(torch.float32)
        yield Kept(
            FACTORS, tuple(pairs.shape), "F32", pairs.nbytes, lambda: pairs.view(torch.uint8)
        )
    for theirs, held in grouped(model).items():
        shape = shape_of(held)
        mine = _kind(theirs, shape, kind)
        size = prod(shape)
        if mine in FLOATS:
            size *= FLOATS[mine].itemsize
        else:
            form = format_of(mine.lower())
            size = size // form.group * form.block
        yield Kept(theirs, shape, mine, size, partial(_bytes, model.config, held, mine))


def _kind(theirs: str, shape: tuple[int, ...], kind: str) -> str:
    """The type of a tensor in a file of a kind."""
    if len(shape) == 1 or kind == "F32" or theirs.split(".")[-2] in _NUMBERS:
        return "F32"
    if not theirs.startswith("blk."):
        return "F16"
    if kind not in FLOATS and shape[-1] % format_of(kind.lower(), f"gguf:{kind}").group:
        return "F16"
    return kind


def _bytes(config: DecoderConfig, held: list[tuple[str, Tensor]], kind: str) -> Tensor:
    parts = [_as_there(config, name, one.detach().cpu()) for name, one in held]
    value = parts[0] if len(parts) == 1 else torch.cat(parts)
    if kind in FLOATS:
        return value.to(FLOATS[kind]).contiguous().view(torch.uint8).flatten()
    return format_of(kind.lower()).encode(value.flatten(0, -2))[0].flatten()


def _as_there(config: DecoderConfig, name: str, value: Tensor) -> Tensor:
    """Rows of queries and keys in pairs; norms that multiply by 1 + weight as what they multiply
    by."""
    _, module, _ = name.rsplit(".", 2)
    if module.endswith("norm") and config.norm.unit == 0:
        return value.float() + 1
    if FAMILIES[config.family].paired and ".attention." in name and module in "qk":
        return paired(value, config.heads if module == "q" else config.kv_heads)
    return value


def paired(value: Tensor, heads: int) -> Tensor:
    """Rows (or a bias) whose rotated halves lie one behind another, in pairs, as ggml has them."""
    pairs: Tensor = value.unflatten(0, (heads, 2, -1)).transpose(1, 2)
    return pairs.reshape(value.shape)


def _facts(config: DecoderConfig, kind: str, name: str) -> Iterator[tuple[str, tuple[str, Any]]]:
    kin, rope, moe = FAMILIES[config.family], main_rope(config), config.experts
    yield "general.architecture", ("str", kin.name)
    yield "general.name", ("str", name)
    yield "general.file_type", ("u32", TYPES[kind][1])
    yield "general.quantization_version", ("u32", 2)
    whole: dict[str, int | None] = {
        "vocab_size": config.vocab, "context_length": context(config),
        "embedding_length": config.hidden, "block_count": len(config.layers),
        "feed_forward_length": config.mlp_hidden, "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads, "attention.key_length": config.head_size,
        "attention.value_length": config.value_size,
        "attention.sliding_window": window(config) if kin.period else None,
        "rope.dimension_count": None if rope is None else rope.dim,
    }  # fmt: skip
    if moe is not None:
        whole |= {"expert_count": moe.count, "expert_used_count": moe.chosen}
        whole |= {"expert_feed_forward_length": moe.hidden}
    broken: dict[str, float | None] = {
        f"attention.layer_norm_{'rms_' if config.norm.kind == 'rms' else ''}epsilon":
            config.norm.eps,
        "attn_logit_softcapping": config.softcap, "final_logit_softcapping": config.logit_softcap,
        "rope.freq_base": None if rope is None else rope.theta,
    }  # fmt: skip
    for key, number in whole.items():
        if number is not None:
            yield f"{kin.name}.{key}", ("u32", number)
    for key, value in broken.items():
        if value is not None:
            yield f"{kin.name}.{key}", ("f32", value)
    if rope is not None and rope.kind == "linear":
        yield f"{kin.name}.rope.scaling.type", ("str", "linear")
        yield f"{kin.name}.rope.scaling.factor", ("f32", rope.factor)


def _head(file: BinaryIO, facts: Mapping[str, tuple[str, Any]], kept: list[Kept]) -> None:
    file.write(MAGIC + struct.pack("<IQQ", VERSION, len(kept), len(facts)))
    for key, (kind, value) in facts.items():
        file.write(_string(key) + struct.pack("<I", _CODES[kind]) + _value(kind, value))
    offset = 0
    for one in kept:
        dims = one.shape[::-1]  # the innermost first
        file.write(_string(one.name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims))
        file.write(struct.pack("<IQ", TYPES[one.kind][0], offset))
        offset += -(-one.bytes // ALIGN) * ALIGN
    file.write(bytes(-file.tell() % ALIGN))


def _value(kind: str, value: Any) -> bytes:
    if kind == "str":
        return _string(value)
    if kind == "list":
        inner, values = value
        head = struct.pack("<IQ", _CODES[inner], len(values))
        return head + b"".join(_value(inner, each) for each in values)
    return struct.pack({"u32": "<I", "i32": "<i", "f32": "<f", "bool": "<?"}[kind], value)


def _string(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw
