"""Patterns of parameters' names: "blocks.*.attention" is all that lies in such modules, "*.bias"
all biases. A star stands for any text, dots too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from outsize.errors import OutsizeError, nearest

if TYPE_CHECKING:
    from outsize.models.config import DecoderConfig


@runtime_checkable
class Limiting(Protocol):
    """Settings of a technique that say which parameters of a decoder are trained."""

    def limited(self, config: DecoderConfig) -> DecoderConfig:
        """The decoder with fewer of them, or the same. OutsizeError for what it does not have."""


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern names a parameter, or a module that it is in."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def refuse_idle(patterns: Iterable[str], names: Iterable[str], key: str) -> None:
    """OutsizeError for a pattern that names none of these parameters. key: that said it."""
    every = tuple(names)
    for pattern in patterns:
        if not any(matches(name, pattern) for name in every):
            owners = dict.fromkeys(_of_each(name.rpartition(".")[0]) for name in every)
            raise OutsizeError(
                f"{key}: {pattern!r} names no parameter that is trained"
                f"{nearest(pattern, tuple(owners))}; expected a pattern of names as {every[0]}"
            )


def _of_each(name: str) -> str:
    """The pattern of a module of each block, from the name of one: blocks.*.mlp."""
    first, *others = name.split(".")
    return ".".join([first, *("*" if one.isdigit() else one for one in others)])


def rate_of(name: str, rates: Mapping[str, float]) -> float:
    """The factor on a parameter's learning rate: the product of those of its patterns."""
    return prod(factor for pattern, factor in rates.items() if matches(name, pattern))
