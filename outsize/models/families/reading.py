"""Reading config.json: typed, with defaults, refusing by name and value what is not supported.

`rope` understands both layouts: rope_theta and rope_scaling beside each other, and the newer
rope_parameters that holds both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from outsize.errors import OutsizeError, nearest
from outsize.models.config import Rope, RopeKind
from outsize.models.mlp import ACTIVATIONS

Config = Mapping[str, Any]

_TRAINED = "original_max_position_embeddings"
_ROPE_KEYS = frozenset(
    (
        *("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
        *("type", "rope_type", "rope_theta", "partial_rotary_factor", "attention_factor"),
        *(_TRAINED, "mscale", "mscale_all_dim", "truncate"),
        *("short_factor", "long_factor"),
    )
)
_ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


def refuse(key: str, value: object, expected: str) -> OutsizeError:
    """The error for a value in config.json that cannot be honoured."""
    return OutsizeError(f"config.json: {key} = {value!r} is not supported; expected {expected}")


MOST_LAYERS = 100_000


def _typed(
    config: Config, key: str, default: Any, fits: Callable[[Any], bool], *expected: str
) -> Any:
    """A value that fits; `default` where it is missing or null. expected: what is said of one that
    does not; and of one that is missing, where there is no default."""
    value = config.get(key)
    value = default if value is None else value
    if value is None and len(expected) > 1:
        raise OutsizeError(f"config.json: {key} is missing; expected {expected[1]}")
    if value is not None and not fits(value):
        raise OutsizeError(f"config.json: {key} = {value!r}; expected {expected[0]}")
    return value


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return _whole(value) or (isinstance(value, float) and math.isfinite(value))


def integer(config: Config, key: str, default: int | None = None) -> int:
    """A positive integer; a missing or null one is `default`, or an error without a default."""
    said = "a positive integer"
    return int(_typed(config, key, default, lambda x: _whole(x) and x > 0, said, said))


def layers(config: Config, key: str) -> int:
    """How many layers there are; so many that a list of them can be made."""
    value = integer(config, key)
    if value > MOST_LAYERS:
        raise OutsizeError(f"config.json: {key} = {value}; expected at most {MOST_LAYERS} layers")
    return value


def number(config: Config, key: str, default: float | None = None) -> float:
    """A finite number; a missing or null one is `default`, or an error without a default."""
    return float(_typed(config, key, default, _number, "a finite number", "a number"))


def flag(config: Config, key: str, default: bool) -> bool:
    """true or false; a missing or null one is `default`."""
    return bool(_typed(config, key, default, lambda x: isinstance(x, bool), "true or false"))


def optional(config: Config, key: str) -> float | None:
    """A number above zero; None where it is null or missing."""
    value = _typed(config, key, None, lambda x: _number(x) and x > 0, "a number above 0, or null")
    return None if value is None else float(value)


def count(config: Config, key: str) -> int:
    """An integer from 0 on."""
    said = "an integer from 0 on"
    return int(_typed(config, key, None, lambda x: _whole(x) and x >= 0, said, said))


def window(config: Config) -> int | None:
    """sliding_window, tokens that a query sees including itself; null for none."""
    return None if config.get("sliding_window") is None else integer(config, "sliding_window")


def activation(config: Config, key: str) -> str:
    """The name of an activation function that there is."""
    value = config.get(key)
    if not isinstance(value, str) or value not in ACTIVATIONS:
        raise refuse(key, value, f"one of {', '.join(sorted(ACTIVATIONS))}")
    return value


def only(config: Config, key: str, allowed: Any, why: str) -> None:
    """Refuse any value of `key` but a missing one, null and `allowed`."""
    value = config.get(key)
    if value is not None and value != allowed:
        raise refuse(key, value, f"{allowed!r}: {why}")


def divided(config: Config, size_key: str, parts_key: str) -> int:
    """size / parts, where it is whole."""
    size, parts = integer(config, size_key), integer(config, parts_key)
    if size % parts:
        raise OutsizeError(
            f"config.json: {size_key} = {size} is not a multiple of {parts_key} = {parts}"
        )
    return size // parts


def table(config: Config, key: str) -> Config:
    """An object; empty where it is null or missing."""
    found = _typed(config, key, {}, lambda x: isinstance(x, Mapping), "an object or null")
    return cast(Config, found)


def either(config: Config, *keys: str) -> str:
    """Which of several names for one fact the config uses; the last where it uses none."""
    return next((key for key in keys if config.get(key) is not None), keys[-1])


def rope_parameters(
    config: Config, theta: str = "rope_theta", partial: str = "partial_rotary_factor"
) -> dict[str, Any]:
    """The flat parameters of a model with one rope, from either layout; `theta` and `partial` are
    the keys that hold these in the older one."""
    merged = dict(table(config, "rope_scaling") or table(config, "rope_parameters"))
    if merged.get("rope_theta") is None:
        merged["rope_theta"] = config.get(theta)
    if merged.get("partial_rotary_factor") is None:
        merged["partial_rotary_factor"] = config.get(partial)
    return merged


def rope_kind(parameters: Config) -> str:
    """The kind of scaling, under its new or old key."""
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


def rope(config: Config, parameters: Config, head_size: int, partial: bool = False) -> Rope:
    """A Rope from its parameters. `partial`: whether the family may rotate a part of a head.

    Raises OutsizeError for an unknown kind or key, or a missing parameter of the kind.
    """
    unknown = sorted(set(parameters) - _ROPE_KEYS)
    if unknown:
        key = unknown[0]
        raise refuse(f"rope key {key}", parameters[key], f"none{nearest(key, sorted(_ROPE_KEYS))}")
    kind = rope_kind(parameters)
    if kind not in _ROPE_KINDS:
        raise refuse("rope_type", kind, f"one of {', '.join(_ROPE_KINDS)}")
    part = number(parameters, "partial_rotary_factor", 1.0)
    if not 0 < part <= 1 or (part != 1 and not partial):
        raise refuse("partial_rotary_factor", part, "a part in (0, 1]" if partial else "1")
    dim = int(head_size * part)
    if dim % 2 or dim == 0:
        raise refuse("rotated features of a head", dim, "an even number above 0")
    facts = Rope(dim, number(parameters, "rope_theta"), cast(RopeKind, kind))
    return _with_scaling(config, parameters, facts)


def _with_scaling(config: Config, parameters: Config, facts: Rope) -> Rope:
    longest = integer(config, "max_position_embeddings")
    # Beside the rope's own parameters it wins over one among them, as in transformers.
    trained = integer(config, _TRAINED, integer(parameters, _TRAINED, longest))
    match facts.kind:
        case "linear":
            return replace(facts, factor=number(parameters, "factor"))
        case "dynamic":
            return replace(facts, factor=number(parameters, "factor"), trained=longest)
        case "yarn":
            factor = number(parameters, "factor", longest / trained)
            return replace(
                facts,
                factor=factor,
                trained=trained,
                amplitude=_yarn_amplitude(parameters, factor),
                fast=number(parameters, "beta_fast", 32),
                slow=number(parameters, "beta_slow", 1),
                truncate=flag(parameters, "truncate", True),
            )
        case "longrope":
            factor = number(parameters, "factor", longest / trained)
            grown = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
            return replace(
                facts,
                factor=factor,
                trained=trained,
                amplitude=number(parameters, "attention_factor", grown),
                short_factors=_factors(parameters, "short_factor", facts.dim // 2),
                long_factors=_factors(parameters, "long_factor", facts.dim // 2),
            )
        case "llama3":
            return replace(
                facts,
                factor=number(parameters, "factor"),
                trained=trained,
                low=number(parameters, "low_freq_factor"),
                high=number(parameters, "high_freq_factor"),
            )
        case _:
            return facts


def yarn_mscale(factor: float, weight: float) -> float:
    """YaRN's temperature for a context grown by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn_amplitude(parameters: Config, factor: float) -> float:
    given = optional(parameters, "attention_factor")
    if given is not None:
        return given
    one = number(parameters, "mscale", 0)
    all_dims = number(parameters, "mscale_all_dim", 0)
    if one and all_dims:
        return yarn_mscale(factor, one) / yarn_mscale(factor, all_dims)
    return yarn_mscale(factor, 1)


def _factors(parameters: Config, key: str, count: int) -> tuple[float, ...]:
    values = parameters.get(key)
    if not isinstance(values, list | tuple) or len(values) != count:
        got = f"{len(values)} numbers" if isinstance(values, list | tuple) else repr(values)
        raise OutsizeError(f"config.json: {key} has {got}; expected a list of {count} numbers")
    return tuple(number({key: value}, key) for value in values)
