"""A GGUF file unpacked into a Hugging Face directory: its facts as a config.json, its tokenizer,
its tensors one at a time.

Where all matrices of blocks are of one type of codes they stay these codes, byte for byte (rows of
queries and keys in our order). Where types are mixed, as llama.cpp's usual files have them, they
become numbers. What is handed over as FILE.gguf is unpacked once, beside the caches of data.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outsize.checkpoint.contents import WEIGHTS, merged, write_groups
from outsize.checkpoint.gguf import FACTORS, FAMILIES, FLOATS, factors_of, named
from outsize.checkpoint.gguf_file import GgufFile, Span, coder, open_gguf
from outsize.checkpoint.gguf_words import ends, tokens, write_words
from outsize.checkpoint.hub import MAX_SHARD_BYTES, whole_directory, write_config
from outsize.checkpoint.shards import SUMS, sums_json
from outsize.checkpoint.writing import write_json
from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.models.coding import CODES, coded, weight_of
from outsize.models.config import DecoderConfig, Rope
from outsize.models.decoder import Decoder
from outsize.models.families import parse
from outsize.models.names import layout

SUFFIX = ".gguf"
CACHE = Path("~/.cache/outsize/gguf")
_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # by architecture
_TRAINED = 8192  # positions before they were stretched
_LLAMA3 = (8.0, 32.0, 1.0, 2.0, 4.0, 16.0)  # factors that ropes of Llama 3.1 and its kin have


def unpack(path: Path, into: Path, dtype: torch.dtype | None = None) -> list[str]:
    """Write the model of a file as a directory; gives what there is to say of it. dtype: of all
    weights, which are then no codes; None: codes as they are and float32 beside them, or the
    matrices' own, or bfloat16 where codes are mixed.

    OutsizeError for a file that is cut, of another family, or whose tensors are not its model's.
    """
    file = open_gguf(path)
    config = config_of(file)
    model = build(config)
    spans = dict(_spans(file, model))
    kinds = {one.kind for name, one in spans.items() if _matrix(name, one)}
    single = min(kinds) if len(kinds) == 1 else None
    if single is not None and single not in FLOATS and dtype is None:
        config = coded(config, coder(single), stored=True)
    target = dtype or _dtype(single)
    said = list[str]()

    def write(directory: Path) -> None:
        said.extend(filter(None, [write_words(file, directory)]))
        _write(file, build(config), spans, target, directory)

    whole_directory(into, write)
    held = str(target).removeprefix("torch.") if config.coding is None else str(single)
    return [f"{into}: {config.family}, matrices of {', '.join(sorted(kinds))} as {held}", *said]


def _dtype(single: str | None) -> torch.dtype:
    """Of what are no codes, where matrices are of one type, or of several."""
    return torch.bfloat16 if single is None else FLOATS.get(single, torch.float32)


def cached(path: Path) -> Path:
    """Where a file is, or will be, unpacked: by its place, size and time of change."""
    at = path.resolve()
    mark = f"{at}\0{at.stat().st_size}\0{at.stat().st_mtime_ns}".encode()
    return CACHE.expanduser() / f"{path.stem}-{hashlib.blake2b(mark, digest_size=8).hexdigest()}"


def directory_of(path: Path) -> Path:
    """The directory of a file, unpacked where it is not yet. OutsizeError as of `unpack`."""
    found = cached(path)
    if not found.is_dir():
        unpack(path, found)
    return found


def config_of(file: GgufFile) -> DecoderConfig:
    """The model that a file's facts describe. OutsizeError for one that has no name here."""
    kin = file.fact("general.architecture", str)
    if kin not in _FAMILIES:
        raise OutsizeError(
            f"{file.path}: its architecture {kin!r} is not read; expected one of"
            f" {', '.join(_FAMILIES)}: load the model's Hugging Face directory"
        )
    for name in ("expert_count", "attention.sliding_window", "attention.logit_softcapping"):
        if file.facts.get(f"{kin}.{name}"):
            raise OutsizeError(f"{file.path}: {kin}.{name} is not read; load its directory")

    def whole(name: str, otherwise: int | None = None) -> int:
        found: int = file.fact(f"{kin}.{name}", int, otherwise)
        return found

    heads = whole("attention.head_count")
    size = whole("embedding_length")
    epsilon = file.fact(f"{kin}.attention.layer_norm_rms_epsilon", float)
    head = whole("attention.key_length", size // max(heads, 1))
    if whole("rope.dimension_count", head) != head or whole("attention.value_length", head) != head:
        raise OutsizeError(f"{file.path}: heads of {head} numbers that turn in part; not read")
    words = len(tokens(file)) or whole("vocab_size")
    source: dict[str, Any] = {
        "model_type": _FAMILIES[kin],
        "vocab_size": words,
        "hidden_size": size,
        "intermediate_size": whole("feed_forward_length"),
        "num_hidden_layers": whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": whole("attention.head_count_kv", heads),
        "head_dim": head,
        "max_position_embeddings": whole("context_length"),
        "rms_norm_eps": epsilon,
        "rope_theta": file.fact(f"{kin}.rope.freq_base", float, 10000.0),
        "tie_word_embeddings": "output.weight" not in file.spans,
        "hidden_act": "silu",
    }
    if kin == "llama":
        source["attention_bias"] = "blk.0.attn_q.bias" in file.spans
    if found := ends(file):
        source["eos_token_id"] = found if len(found) > 1 else found[0]
    start = file.facts.get("tokenizer.ggml.bos_token_id")
    source |= {"bos_token_id": start} if isinstance(start, int) else {}
    if (rope := _scaling(file, kin, head, source["rope_theta"])) is not None:
        source["rope_scaling"] = rope
    return parse(source)


def _scaling(file: GgufFile, kin: str, head: int, theta: float) -> dict[str, Any] | None:
    """How turns are stretched: said, or in Llama 3.1's way by a tensor of factors."""
    kind = file.facts.get(f"{kin}.rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": file.fact(f"{kin}.rope.scaling.factor", float)}
    if kind != "none":
        raise OutsizeError(f"{file.path}: {kin}.rope.scaling.type is {kind!r}, which is not read")
    span = file.spans.get(FACTORS)
    if span is None:
        return None
    factors = file.values(span).double()
    for factor in _LLAMA3:
        said = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": _TRAINED}  # fmt: skip
        if torch.allclose(_llama3(head, theta, factor), factors, rtol=1e-4):
            return said
    raise OutsizeError(f"{file.path}: {FACTORS} has factors of no rope that is read")


def _llama3(head: int, theta: float, factor: float) -> Tensor:
    """What Llama 3.1 divides the frequency of each pair by."""
    plain = Rope(head, theta)
    return factors_of(replace(plain, kind="llama3", factor=factor, trained=_TRAINED))


def _matrix(name: str, span: Span) -> bool:
    return name.startswith("blocks.") and len(span.shape) > 1


def _spans(file: GgufFile, model: Decoder) -> list[tuple[str, Span]]:
    """By name of a parameter its tensor. OutsizeError where some lack, are more, or have another
    shape."""
    found = list[tuple[str, Span]]()
    for name, parameter in model.named_parameters():
        theirs = named(name)
        span = file.spans.get(theirs)
        if span is None:
            raise OutsizeError(f"{file.path}: the tensor {theirs!r} is missing")
        if span.shape != tuple(parameter.shape):
            raise OutsizeError(
                f"{file.path}: tensor {theirs!r} has the shape {span.shape}; expected"
                f" {tuple(parameter.shape)}, by its facts"
            )
        found.append((name, span))
    extra = file.spans.keys() - {one.name for _, one in found} - {FACTORS}
    if extra:
        raise OutsizeError(f"{file.path}: the tensor {min(extra)!r} is unexpected")
    return found


def _write(
    file: GgufFile, model: Decoder, spans: dict[str, Span], dtype: torch.dtype, directory: Path
) -> None:
    config = model.config
    own = {name: x.detach().to("meta") for name, x in model.named_parameters()}

    def like(name: str) -> Tensor:
        return own[name] if own[name].dtype == torch.uint8 else own[name].to(dtype)

    def read(name: str) -> Tensor:
        span = spans[weight_of(name)]
        found = file.raw(span) if name.endswith(f".{CODES}") else file.values(span).to(dtype)
        return _turned(config, name, found)

    stored = merged(layout(config), like, read)
    files = write_groups(directory, ((WEIGHTS, *one) for one in stored), MAX_SHARD_BYTES)
    write_config(directory, config, dtype)
    write_json(directory / SUMS, sums_json(files))


def _turned(config: DecoderConfig, name: str, rows: Tensor) -> Tensor:
    """Rows of queries and keys in our order: halves that turn together one behind another."""
    part = name.split(".")[-2]
    if not FAMILIES[config.family][1] or ".attention." not in name or part not in "qk":
        return rows
    heads = config.heads if part == "q" else config.kv_heads
    halves: Tensor = rows.unflatten(0, (heads, -1, 2)).transpose(1, 2)
    return halves.reshape(rows.shape)
