"""Models by name or config.json, as shapes: no weights are read and nothing is built."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from outsize.errors import OutsizeError, nearest
from outsize.foresight.runs import data
from outsize.foresight.shape import PARTS, Latent, Recurrent, Shape, read_shape
from outsize.models.presets import PRESETS
from outsize.texts import read_text

GATED = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma", "gemma2",
    "gemma3_text", "phi3", "deepseek_v2", "deepseek_v3", "kimi_k2", "gpt_oss", "olmo2", "olmoe",
    "glm4",
)  # fmt: skip
PLAIN = ("gpt2", "gpt_neox", "opt", "bloom", "mpt", "falcon", "phi", "starcoder2", "gpt_bigcode")
MIXED = ("nemotron_h",)  # layers of one part each, some with recurrent states
# What a config.json leaves out where it is the family's default: embedding and head are one, one
# head of keys and values serves all others, every second layer sees a window.
TIED = (
    "gpt2", "opt", "bloom", "mpt", "falcon", "starcoder2", "gpt_bigcode", "gemma", "gemma2",
    "gemma3_text",
)  # fmt: skip
SHARED_KEYS = ("falcon", "gpt_bigcode")
WINDOWED = ("gpt_oss", "gemma2")
CAPPED = ("final_logit_softcapping", "logit_scale", "logits_scaling", "dim_model_base")
# Names of one thing in config.json files of different families.
NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab": ("vocab_size",),
    "inner": ("intermediate_size", "n_inner", "ffn_dim"),
    "groups": ("num_key_value_heads", "n_head_kv", "num_kv_heads"),
    "head": ("head_dim",),
    "experts": ("n_routed_experts", "num_local_experts", "num_experts"),
    "active": ("num_experts_per_tok",),
    "expert_inner": ("moe_intermediate_size",),
    "dense": ("first_k_dense_replace",),
}
STATES = (
    "mamba_num_heads",
    "mamba_head_dim",
    "ssm_state_size",
    "n_groups",
)  # as Recurrent has them
WORDS = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}


@cache
def published() -> Mapping[str, Any]:
    """Published models: name, source and shape."""
    read: Mapping[str, Any] = yaml.safe_load(data("published.yaml"))
    return read


def is_factory(target: str | None) -> bool:
    """Whether a target is "import.path:factory"."""
    return target is not None and ":" in target and not Path(target).exists()


def shape_of(name: str) -> Shape:
    """A shape from the name of a published model or a preset, a config.json, or a directory that
    has one. Raises OutsizeError with the nearest name, or naming what a file lacks."""
    path = config_at(name)
    if path is not None:
        return from_config(settings_in(path), str(path))
    if name.lower() in published():
        return read_shape(published()[name.lower()]["shape"], name)
    if name in PRESETS:
        return from_config(PRESETS[name], name)
    known = (*published(), *PRESETS)
    raise OutsizeError(f"model {name!r} is unknown{nearest(name.lower(), known)}")


def from_config(values: Mapping[str, Any], what: str) -> Shape:
    """A shape from the values of a config.json."""
    kind = str(values.get("model_type", ""))
    known = (*GATED, *PLAIN, *MIXED)
    if kind not in known:
        raise OutsizeError(f"{what}: model_type {kind!r} is unknown{nearest(kind, known)}")
    found = {
        key: value
        for key, names in NAMES.items()
        if (value := _value(values, names, what)) is not None
    }
    for key in ("layers", "hidden", "heads", "vocab"):
        if key not in found:
            raise OutsizeError(f"{what}: {NAMES[key][0]!r} is missing; expected its number")
    made: dict[str, Any] = {**found, "gated": kind in GATED}
    made["tied"] = bool(values.get("tie_word_embeddings", kind in TIED))
    _heads(made, values, kind, what)
    if kind in GATED and not {"inner", "expert_inner"} & set(made):
        raise OutsizeError(f"{what}: 'intermediate_size' is missing; expected its number")
    if kind in WINDOWED:
        made["window"] = _value(values, ("sliding_window",), what) or 0
    if "experts" in made and "expert_inner" not in made:
        made["expert_inner"] = made.get("inner", 0)
    made["capped"] = any(values.get(name) not in (None, 1.0) for name in CAPPED)
    shared = int(values.get("n_shared_experts") or 0) * int(made.get("expert_inner", 0))
    shared = int(
        values.get("shared_expert_intermediate_size")
        or values.get("moe_shared_expert_intermediate_size")
        or shared
    )
    made["shared"] = shared
    if values.get("kv_lora_rank"):
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
        made["latent"] = Latent(*(int(values.get(n) or 0) for n in (*names, "v_head_dim")))
    return Shape(**{**made, **(_mixed(values, what) if kind in MIXED else {})})


def _heads(made: dict[str, Any], values: Mapping[str, Any], kind: str, what: str) -> None:
    """Heads of keys and values as the family has them, and sizes that are whole numbers."""
    if kind in SHARED_KEYS and not values.get("new_decoder_architecture"):
        made["groups"] = 1 if values.get("multi_query", True) else made["heads"]
    hidden, heads, groups = made["hidden"], made["heads"], made.get("groups") or made["heads"]
    if heads and not made.get("head") and not values.get("kv_lora_rank") and hidden % heads:
        raise OutsizeError(f"{what}: hidden size {hidden} is no multiple of {heads} heads")
    if heads % groups:
        raise OutsizeError(
            f"{what}: {heads} heads over {groups} of keys and values; expected a multiple"
        )


def _mixed(values: Mapping[str, Any], what: str) -> dict[str, Any]:
    """What a model with recurrent states has besides: its pattern as a string, or as a list of
    words."""
    pattern = values.get("hybrid_override_pattern")
    if pattern is None:
        words = values.get("layers_block_type")
        if not isinstance(words, list) or not all(word in WORDS for word in words):
            raise OutsizeError(
                f"{what}: 'hybrid_override_pattern' is missing; expected a letter of "
                f"{''.join(PARTS)} for each layer"
            )
        pattern = "".join(WORDS[word] for word in words)
    sizes = [size for name in STATES if (size := _value(values, (name,), what)) is not None]
    whole = len(sizes) == len(STATES)
    if "M" in str(pattern) and not whole:
        said = f"{', '.join(STATES[:-1])} and {STATES[-1]}"
        raise OutsizeError(f"{what}: a layer with a recurrent state needs {said}")
    return {
        "pattern": str(pattern),
        "recurrent": Recurrent(*sizes) if whole else None,
        "expert_hidden": _value(values, ("moe_latent_size",), what) or 0,
    }


def _value(values: Mapping[str, Any], names: tuple[str, ...], what: str) -> int | None:
    for name in names:
        value = values.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise OutsizeError(f"{what}: {name} is {value!r}; expected a count")
        return value
    return None


def config_at(name: str) -> Path | None:
    """The config.json that a name is, or that a directory of it has; None where it is neither."""
    path = Path(name)
    if name and path.is_dir():
        return path / "config.json"
    return path if path.suffix == ".json" or path.is_file() else None


def settings_in(path: Path) -> Mapping[str, Any]:
    """The values of a config.json. OutsizeError for what is none."""
    text = read_text(path, "name a published model, a preset or a config.json")
    try:
        values = json.loads(text)
    except ValueError as error:
        asked = "expected a config.json, or the name of a published model or a preset"
        if path.suffix in (".yaml", ".yml"):
            asked += "; a run's or a plan's model goes by its name, its values in --set KEY=VALUE"
        raise OutsizeError(f"{path}: not JSON: {error}; {asked}") from None
    if not isinstance(values, dict):
        raise OutsizeError(f"{path}: expected an object of settings")
    inner = values.get("text_config")
    return inner if isinstance(inner, dict) and "vocab_size" not in values else values
