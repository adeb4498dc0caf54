"""`outsize plan MODEL --hardware` with frozen parts: adapters, `train.only`, codes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outsize.errors import OutsizeError

if TYPE_CHECKING:
    from outsize.foresight.planning.asked import Asked
    from outsize.foresight.shape import Shape
    from outsize.hardware import Cluster
    from outsize.models.config import DecoderConfig

ADAPTERS, ONLY, CODES = "adapt.", "train.only", "weights"  # what freezes, and what may be codes


def freezes(key: str) -> bool:
    """Whether a key of a run says what is frozen, or how that is held."""
    return key.startswith(ADAPTERS) or key.partition(".")[0] == CODES or key.startswith(ONLY)


def tuned_of(
    name: str, cluster: Cluster, asked: Asked, sets: tuple[str, ...], written: bool
) -> tuple[Asked, Shape]:
    """A decoder of which parts are frozen, and what is asked of it, of axes that it can have. sets:
    the keys that say so; written: whether its plan is. OutsizeError for what is not planned."""
    from outsize.foresight.planning.asked import named
    from outsize.models.build import build
    from outsize.plan.file import digest_of
    from outsize.train.tuned import tuned

    if not cluster.alike:
        raise OutsizeError("frozen parts are planned on devices of one kind; expected one kind")
    config = _limited(_config(name), name, sets)
    shape = tuned(name, config, asked.sequence, asked.precision, cluster)
    module = shape.module
    assert module is not None
    if written:
        digest = digest_of((n, tuple(p.shape)) for n, p in build(config).named_parameters())
        shape = replace(shape, module=replace(module, digest=digest))
    for one in asked.conditions.required:
        why = module.left.get(one.name)
        if why and not one.holds(0 if one.name == "sequence-parallel" else 1):
            raise OutsizeError(f"{one} of {name}: {why}")
    none = {key: 0 if key == "sequence-parallel" else 1 for key in module.left}
    return replace(asked, conditions=asked.conditions.with_required(*named(none))), shape


def _limited(config: DecoderConfig, name: str, sets: tuple[str, ...]) -> DecoderConfig:
    """A model as a run of these keys trains it. OutsizeError for keys that nothing can be made of,
    for codes of which nothing is trained, and where nothing is."""
    from outsize.models.coding import asked as coded
    from outsize.models.names import adapter_layout
    from outsize.models.trained import trained
    from outsize.train.model import adapter_of, limited
    from outsize.train.resolve import resolve

    keys = resolve(None, sets).config
    adapter, said = adapter_of(keys), keys.technique(CODES)
    if said is not None and adapter is None:
        raise OutsizeError(
            f"{CODES} of {said.format} are frozen, and nothing else would be trained; set an"
            " adapter too (outsize keys adapt)"
        )
    made = replace(coded(config, None if said is None else said.format), adapter=adapter)
    if adapter is not None:
        adapter_layout(made)
    made = limited(made, keys)
    if not any(True for _ in trained(made)):
        raise OutsizeError(f"{name}: nothing is trained by {' and '.join(sets)}")
    return made


def _config(name: str) -> DecoderConfig:
    """Of a preset, of a config.json or the directory that has one, or of a published model."""
    from outsize.foresight.named import config_at, published, settings_in, shape_of
    from outsize.models.families import parse
    from outsize.models.presets import PRESETS

    path = config_at(name)
    if path is not None:
        return parse(settings_in(path))
    if name.lower() not in published() and name in PRESETS:
        return parse(PRESETS[name])
    return parse(_settings(name, shape_of(name)))


def _settings(name: str, shape: Shape) -> Mapping[str, Any]:
    """What a published model's config.json says of its sizes. OutsizeError for one of which more
    than sizes would have to be known."""
    sizes = {
        "num_hidden_layers": shape.layers, "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.n_groups,
        "head_dim": shape.d_head, "intermediate_size": shape.d_inner, "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
    }  # fmt: skip
    special = (shape.latent, shape.pattern, shape.window, shape.shared, shape.dense)
    if not shape.gated or any(special):
        raise OutsizeError(
            f"{name}: frozen parts are rehearsed, for which more than its sizes is asked; expected"
            " its config.json, or a directory that has one"
        )
    if not shape.experts:
        return {"model_type": "llama", **sizes}
    sizes["num_experts_per_tok"] = shape.active
    if name.lower().startswith("qwen3"):
        own = {"num_experts": shape.experts, "moe_intermediate_size": shape.expert_inner}
        return {"model_type": "qwen3_moe", **sizes, **own}
    own = {"num_local_experts": shape.experts, "intermediate_size": shape.expert_inner}
    return {"model_type": "mixtral", **sizes, **own}
