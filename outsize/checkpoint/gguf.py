"""GGUF files, as llama.cpp reads them: a decoder's facts, its tokenizer and its tensors.

The layout is that of ggml's docs/gguf.md, version 3. What a family's tensors and facts are called
is a table here; a family that is not in it is refused. Tensors are made one at a time.

O outputs, I inputs, H heads, P pairs of features of a head that turn together.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

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
# By family: the architecture, and whether rotated features of queries and keys lie in pairs there.
FAMILIES = {
    "llama": ("llama", True), "mistral": ("llama", True), "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
}  # fmt: skip
FACTORS = "rope_freqs.weight"  # of Llama 3.1's way of stretching turns, which no fact says
OUTER = {"prologue.tokens": "token_embd", "epilogue.norm": "output_norm", "epilogue.head": "output"}
BLOCK = {
    "attention_norm": "attn_norm", "attention.q": "attn_q", "attention.k": "attn_k",
    "attention.v": "attn_v", "attention.o": "attn_output", "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm", "mlp_norm": "ffn_norm", "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up", "mlp.down": "ffn_down",
}  # fmt: skip


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
    known = {"default", "linear"} | ({"llama3"} if FAMILIES[config.family][0] == "llama" else set())
    scaled = [rope.kind for rope in config.ropes.values() if rope.kind not in known]
    windows = {layer.window for layer in config.layers} - {None}
    lacking = {
        "a window": windows, config.rewired: config.rewired, "experts": config.experts,
        "a norm behind its embedding": config.embed_norm,
    }  # fmt: skip
    for what in (*scaled, *(name for name, there in lacking.items() if there)):
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
    others = sum(one.kind != kind for one in matrices)
    odd = f"{others} of {len(matrices)} matrices are F16: blocks of {kind} do not divide their rows"
    return [*([odd] if others else []), *([why] if why else [])]


def named(name: str) -> str:
    """What the file calls a parameter, or the weight of one."""
    module, _, leaf = name.rpartition(".")
    if not module.startswith("blocks."):
        return f"{OUTER[module]}.{leaf}"
    _, block, inside = module.split(".", 2)
    return f"blk.{block}.{BLOCK[inside]}.{leaf}"


def factors_of(rope: Rope) -> Tensor:
    """What the frequency of each pair is divided by, float64 (P)."""
    here = torch.device("cpu")
    return frequencies(replace(rope, kind="default"), 0, here) / frequencies(rope, 0, here)


def _tensors(model: Decoder, kind: str) -> Iterator[Kept]:
    paired = FAMILIES[model.config.family][1]
    (rope,) = model.config.ropes.values()
    if rope.kind == "llama3":
        pairs = factors_of(rope).to(torch.float32)
        yield Kept(
            FACTORS, tuple(pairs.shape), "F32", pairs.nbytes, lambda: pairs.view(torch.uint8)
        )
    for name, parameter in model.named_parameters():
        module = name.rpartition(".")[0]
        inside = module.split(".", 2)[2] if module.startswith("blocks.") else module
        outer = inside in OUTER
        mine = "F32" if parameter.dim() == 1 or kind == "F32" else "F16" if outer else kind
        rows = 0
        if paired and inside in ("attention.q", "attention.k"):
            rows = model.config.heads if inside[-1] == "q" else model.config.kv_heads
        shape = tuple(parameter.shape)
        size = parameter.numel() * 4 if mine == "F32" else parameter.numel() * 2
        if mine not in ("F32", "F16", "BF16"):
            form = format_of(mine.lower(), f"gguf:{mine}")
            if shape[-1] % form.group:
                mine = "F16"
            else:
                size = parameter.numel() // form.group * form.block
        yield Kept(named(name), shape, mine, size, _making(parameter, mine, rows))


def _making(parameter: Tensor, kind: str, heads: int) -> Callable[[], Tensor]:
    def make() -> Tensor:
        value = parameter.detach().cpu()
        if heads:
            value = paired(value, heads)
        if kind in FLOATS:
            held = value.to(FLOATS[kind])
            return held.contiguous().view(torch.uint8).flatten()
        return format_of(kind.lower()).encode(value)[0].flatten()

    return make


def paired(value: Tensor, heads: int) -> Tensor:
    """Rows (or a bias) whose rotated halves lie one behind another, in pairs, as ggml has them."""
    pairs: Tensor = value.unflatten(0, (heads, 2, -1)).transpose(1, 2)
    return pairs.reshape(value.shape)


def _facts(config: DecoderConfig, kind: str, name: str) -> Iterator[tuple[str, tuple[str, Any]]]:
    kin = FAMILIES[config.family][0]
    yield "general.architecture", ("str", kin)
    yield "general.name", ("str", name)
    yield "general.file_type", ("u32", TYPES[kind][1])
    yield "general.quantization_version", ("u32", 2)
    (rope,) = config.ropes.values()
    for key, value in {
        "vocab_size": config.vocab, "context_length": config.positions,
        "embedding_length": config.hidden, "block_count": len(config.layers),
        "feed_forward_length": config.mlp_hidden, "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads, "attention.key_length": config.head_size,
        "attention.value_length": config.value_size, "rope.dimension_count": rope.dim,
    }.items():  # fmt: skip
        yield f"{kin}.{key}", ("u32", value)
    yield f"{kin}.attention.layer_norm_rms_epsilon", ("f32", config.norm.eps)
    yield f"{kin}.rope.freq_base", ("f32", rope.theta)
    if rope.kind == "linear":
        yield f"{kin}.rope.scaling.type", ("str", "linear")
        yield f"{kin}.rope.scaling.factor", ("f32", rope.factor)


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
