"""A GGUF file unpacked into a Hugging Face directory: its facts as a config.json, its tokenizer,
its tensors one at a time.

Where all matrices of blocks are of one type of codes they stay these codes, byte for byte (rows of
queries and keys in our order). Where types are mixed, as llama.cpp's usual files have them, they
become numbers. What is handed over as FILE.gguf is unpacked once, beside the caches of data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outsize.checkpoint.contents import WEIGHTS, merged, write_groups
from outsize.checkpoint.gguf import FACTORS, FLOATS, factors_of
from outsize.checkpoint.gguf_file import GgufFile, Span, coder, open_gguf
from outsize.checkpoint.gguf_names import FAMILIES, SLOW, Kin, grouped, scale, shape_of
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

CACHE = Path("~/.cache/outsize/gguf")
# By architecture; Mixtral's is llama's, with experts.
_FAMILIES = {
    kin.name: family for family, kin in FAMILIES.items() if family not in ("mistral", "mixtral")
}
# What ropes of Llama 3.1 and its kin have: positions before they were stretched (8,192, or those of
# another model), and factors, for where the factor itself is none of the numbers.
_TRAINED = (8192, *(2**power for power in range(4, 21) if power != 13))
_LLAMA3 = (8.0, 32.0, 1.0, 2.0, 4.0, 16.0)


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
    plain = single in FLOATS or config.experts is not None  # whose codes are read as numbers
    if single is not None and not plain and dtype is None:
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
    experts = file.fact(f"{kin}.expert_count", int, 0)
    family = "mixtral" if kin == "llama" and experts else _FAMILIES[kin]
    own = FAMILIES[family]
    unread = [] if own.period or kin == "phi3" else ["attention.sliding_window"]
    unread += [] if own.capped else ["attn_logit_softcapping", "final_logit_softcapping"]
    for name in (*unread, *([] if own.experts else ["expert_count"]), "expert_shared_count"):
        if file.facts.get(f"{kin}.{name}"):
            raise OutsizeError(f"{file.path}: {kin}.{name} is not read; load its directory")
    return parse(_source(file, family, own))


class _Facts:
    """Facts of an architecture by the rest of their names."""

    def __init__(self, file: GgufFile, kin: Kin) -> None:
        self.file, self.kin = file, kin

    def whole(self, name: str, otherwise: int | None = None) -> int:
        found: int = self.file.fact(f"{self.kin.name}.{name}", int, otherwise)
        return found

    def real(self, name: str, otherwise: float | None = None) -> float:
        found: float = self.file.fact(f"{self.kin.name}.{name}", float, otherwise)
        return found


def _source(file: GgufFile, family: str, kin: Kin) -> dict[str, Any]:
    """What a config.json of the model would say."""
    facts = _Facts(file, kin)
    heads, size = facts.whole("attention.head_count"), facts.whole("embedding_length")
    head = facts.whole("attention.key_length", size // max(heads, 1))
    turned = facts.whole("rope.dimension_count", head)
    odd = turned != head and family != "phi3"
    if odd or facts.whole("attention.value_length", head) != head:
        raise OutsizeError(f"{file.path}: heads of {head} numbers that turn in part; not read")
    theta = facts.real("rope.freq_base", 10000.0)
    source: dict[str, Any] = {
        "model_type": family,
        "vocab_size": len(tokens(file)) or facts.whole("vocab_size"),
        "hidden_size": size,
        "intermediate_size": facts.whole("feed_forward_length"),
        "num_hidden_layers": facts.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.whole("attention.head_count_kv", heads),
        "head_dim": head,
        "max_position_embeddings": facts.whole("context_length"),
        "rope_theta": theta,
        "tie_word_embeddings": "output.weight" not in file.spans,
        "hidden_act": kin.activation,
    }
    layer = kin.biased  # whose norms are those of layers
    eps = facts.real(f"attention.layer_norm_{'' if layer else 'rms_'}epsilon")
    source["norm_epsilon" if layer else "rms_norm_eps"] = eps
    if found := ends(file):
        source["eos_token_id"] = found if len(found) > 1 else found[0]
    start = file.facts.get("tokenizer.ggml.bos_token_id")
    source |= {"bos_token_id": start} if isinstance(start, int) else {}
    if (rope := _scaling(file, kin.name, head, theta)) is not None:
        source["rope_scaling"] = rope
    return _particular(facts, source, turned / max(head, 1))


_GPT2 = {
    "vocab_size": "vocab_size", "hidden_size": "n_embd", "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head", "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions", "norm_epsilon": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}  # fmt: skip
_ALIKE = ("model_type", "tie_word_embeddings", "eos_token_id", "bos_token_id")


def _particular(facts: _Facts, source: dict[str, Any], part: float) -> dict[str, Any]:
    """With what a family alone says. part: of a head's numbers that turn."""
    kin, spans = facts.kin, facts.file.spans
    match source["model_type"]:
        case "llama":
            source["attention_bias"] = "blk.0.attn_q.bias" in spans
            source["mlp_bias"] = "blk.0.ffn_up.bias" in spans
        case "gpt2":
            alike = {key: source[key] for key in _ALIKE if key in source}
            return alike | {theirs: source[ours] for ours, theirs in _GPT2.items()}
        case "phi3":
            source |= {"partial_rotary_factor": part, "pad_token_id": None}  # else 32000, no id
            source["original_max_position_embeddings"] = source["max_position_embeddings"]
            source["sliding_window"] = facts.whole("attention.sliding_window", 0) or None
        case "starcoder2":
            source["sliding_window"] = None
        case "mixtral":
            source["num_local_experts"] = facts.whole("expert_count")
            source["num_experts_per_tok"] = facts.whole("expert_used_count")
        case "qwen3_moe":
            source |= {"num_experts": facts.whole("expert_count"), "norm_topk_prob": True}
            source["num_experts_per_tok"] = facts.whole("expert_used_count")
            source["moe_intermediate_size"] = facts.whole("expert_feed_forward_length")
        case "gemma2" | "gemma3_text":
            layers, size = source["num_hidden_layers"], source["hidden_size"]
            heads, head = max(source["num_attention_heads"], 1), source["head_dim"]
            source["query_pre_attn_scalar"] = scale(kin, layers, size, heads, head)
            source["sliding_window"] = facts.whole("attention.sliding_window")
            source |= {} if kin.capped else {"rope_local_base_freq": SLOW}
            if kin.capped:
                source["attn_logit_softcapping"] = facts.real("attn_logit_softcapping", 50.0)
                source["final_logit_softcapping"] = facts.real("final_logit_softcapping", 30.0)
    return source


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
    for trained, factor in product(_TRAINED, (float(factors.max()), *_LLAMA3)):
        if torch.allclose(_llama3(head, theta, factor, trained), factors, rtol=1e-4):
            return {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": trained,
            }  # fmt: skip
    raise OutsizeError(f"{file.path}: {FACTORS} has factors of no rope that is read")


def _llama3(head: int, theta: float, factor: float, trained: int) -> Tensor:
    """What Llama 3.1 divides the frequency of each pair by."""
    plain = Rope(head, theta)
    return factors_of(replace(plain, kind="llama3", factor=factor, trained=trained))


def _matrix(name: str, span: Span) -> bool:
    return name.startswith("blocks.") and len(span.shape) > 1 and ".router." not in name


def _spans(file: GgufFile, model: Decoder) -> Iterator[tuple[str, Span]]:
    """By name of a parameter its tensor, or its rows of one. OutsizeError where some lack, are
    more, or have another shape."""
    groups = grouped(model)
    for theirs, held in groups.items():
        span = file.spans.get(theirs)
        if span is None:
            raise OutsizeError(f"{file.path}: the tensor {theirs!r} is missing")
        if span.shape != shape_of(held):
            raise OutsizeError(
                f"{file.path}: tensor {theirs!r} has the shape {span.shape}; expected"
                f" {shape_of(held)}, by its facts"
            )
        row, start = span.bytes // span.shape[0], span.start
        for name, parameter in held:
            rows = parameter.shape[0]
            yield name, replace(span, shape=tuple(parameter.shape), start=start, bytes=rows * row)
            start += rows * row
    extra = file.spans.keys() - groups.keys() - {FACTORS}
    if extra:
        raise OutsizeError(f"{file.path}: the tensor {min(extra)!r} is unexpected")


def _write(
    file: GgufFile, model: Decoder, spans: dict[str, Span], dtype: torch.dtype, directory: Path
) -> None:
    config = model.config
    own = {name: x.detach().to("meta") for name, x in model.named_parameters()}

    def like(name: str) -> Tensor:
        return own[name] if own[name].dtype == torch.uint8 else own[name].to(dtype)

    def read(name: str) -> Tensor:
        span = spans[weight_of(name)]
        codes = name.endswith(f".{CODES}")
        found = _as_here(config, name, file.raw(span) if codes else file.values(span))
        return found if codes else found.to(dtype)

    stored = merged(layout(config), like, read)
    files = write_groups(directory, ((WEIGHTS, *one) for one in stored), MAX_SHARD_BYTES)
    write_config(directory, config, dtype)
    write_json(directory / SUMS, sums_json(files))


def _as_here(config: DecoderConfig, name: str, value: Tensor) -> Tensor:
    """Rows of queries and keys with halves that turn together one behind another; norms that are
    there what they multiply by less 1, where they multiply by 1 + weight."""
    module = name.split(".")[-2]
    if module.endswith("norm") and config.norm.unit == 0:
        return value - 1
    if not FAMILIES[config.family].paired or ".attention." not in name or module not in "qk":
        return value
    heads = config.heads if module == "q" else config.kv_heads
    halves: Tensor = value.unflatten(0, (heads, -1, 2)).transpose(1, 2)
    return halves.reshape(value.shape)
