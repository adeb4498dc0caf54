"""Which Linears of a model an adapter_config.json of peft names, and of which rank each is."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from outsize.errors import OutsizeError
from outsize.models.adapter import Adapted, Adapter, Naming, Part
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder
from outsize.models.linear import linears
from outsize.models.names import module_in_files
from outsize.models.targets import FILE, OnLinears, attach, inside, named, number, some

TARGETS = "target_modules"
RANKS, ALPHAS = "rank_pattern", "alpha_pattern"
_LAYERS, _LISTS, _NOT = "layers_to_transform", "layers_pattern", "exclude_modules"
_PATTERNS = {"r": RANKS, "lora_alpha": ALPHAS, "alpha": ALPHAS}  # of a field, where it differs


@dataclass(frozen=True)
class OfDecoder:
    """The Naming of a decoder."""

    config: DecoderConfig

    @cached_property
    def _files(self) -> Mapping[str, str]:
        """The names in files of its Linears, by their own."""
        with torch.device("meta"):
            names = [name for name, _ in linears(Decoder(self.config))]
        return {name: module_in_files(self.config, f"{name}.weight")[0] for name in names}

    def __call__(self, said: Mapping[str, Any]) -> tuple[str, ...]:
        return self.targets(self.chosen(said, TARGETS))

    def chosen(self, said: Mapping[str, Any], key: str) -> Sequence[str]:
        return selected(said, key, self._files, "weight of the blocks; expected some that are")

    def targets(self, names: Collection[str]) -> tuple[str, ...]:
        """By what they are in a block, where they are in all blocks."""
        left = {inside(name) for name in self._files.keys() - names}
        own = {inside(name) for name in names} - left
        return (*sorted(own), *(x for x in self._files if x in names and inside(x) in left))

    def called(self, name: str) -> str:
        return self._files[name]


def selected(
    said: Mapping[str, Any], key: str, names: Mapping[str, str], what: str
) -> Sequence[str]:
    """Of own names, by which there are names in files, those that an adapter_config.json names in
    its field `key`. OutsizeError for none: no `what`."""
    wanted, left = said.get(key), said.get(_NOT) or []
    if not isinstance(left, str | list):
        raise OutsizeError(f"{FILE}: {_NOT} is {left!r}; expected names, or an expression of them")
    found = [
        own for own, full in names.items()
        if named(full, wanted) and _in_layers(said, full, wanted) and not named(full, left)
    ]  # fmt: skip
    if not found:
        more = "".join(f", {k} {said[k]!r}" for k in (_LAYERS, _LISTS, _NOT) if said.get(k))
        raise OutsizeError(f"{FILE}: {key} is {wanted!r}{more}, which names no {what}")
    return found


def _in_layers(said: Mapping[str, Any], full: str, wanted: object) -> bool:
    """Whether a module that is named is in the layers that are meant, if only some are: the first
    number in its name says which it is in, behind one of the names of lists where these are said.
    OutsizeError for layers beside an expression, which says them itself."""
    layers, lists = said.get(_LAYERS), said.get(_LISTS) or [r"[^.]*"]
    if layers is None or layers == [] or (isinstance(wanted, list) and full in wanted):
        return True
    layers = [layers] if isinstance(layers, int) else layers
    whole = isinstance(layers, list) and all(type(one) is int for one in layers)
    lists = [lists] if isinstance(lists, str) else lists
    if not whole or not isinstance(lists, list) or not isinstance(wanted, list):
        raise OutsizeError(
            f"{FILE}: {_LAYERS} is {said[_LAYERS]!r} beside {_LISTS} {said.get(_LISTS)!r} and"
            f" {TARGETS} {wanted!r}; expected numbers of layers, names of lists, and a list"
        )
    before = r".*?\." if _LISTS not in said or not said[_LISTS] else r"(?:^|.*?\.)"
    found = (_match(rf"{before}{one}\.(\d+)\.", full, _LISTS) for one in lists)
    first = next((one for one in found if one is not None), None)
    return first is not None and int(first[1]) in layers


def _match(expression: str, full: str, key: str) -> re.Match[str] | None:
    try:
        return re.match(expression, full)
    except re.error as error:
        raise OutsizeError(
            f"{FILE}: {key} has an entry that is no regular expression ({error}); expected one"
        ) from None


def of_ranks(
    said: Mapping[str, Any],
    naming: Naming,
    alpha: str,
    make: Callable[[int, float, tuple[str, ...]], OnLinears],
) -> Adapter:
    """The adapter of rank r and what `alpha` calls its alpha, by `make` of these and targets; of
    several, where patterns of names say others for some of the Linears. OutsizeError for patterns
    that are none."""
    plain: tuple[int, float] = number(said, "r"), number(said, alpha, float)
    names = {own: naming.called(own) for own in naming.chosen(said, TARGETS)}
    ranks = _by_pattern(said, RANKS, int, names.values())
    alphas = _by_pattern(said, ALPHAS, float, names.values())
    groups = dict[tuple[int, float], list[str]]()
    for own, full in names.items():
        both = ranks.get(full, plain[0]), alphas.get(full, plain[1])
        groups.setdefault(both, []).append(own)
    each = [make(*both, naming.targets(some)) for both, some in groups.items()]
    return each[0] if len(each) == 1 else Several(tuple(each))


def _by_pattern(
    said: Mapping[str, Any], key: str, kind: type, names: Collection[str]
) -> dict[str, Any]:
    """What the first pattern that is the end of a name, from a dot on, says of it. A pattern of
    none is of no use, and a warning says so."""
    patterns, found, used = said.get(key) or {}, dict[str, Any](), set[str]()
    if not isinstance(patterns, dict):
        raise OutsizeError(f"{FILE}: {key} is {patterns!r}; expected numbers by patterns of names")
    for full in names:
        ends = (p for p in patterns if _match(rf"(.*\.)?({p})$", full, key) is not None)
        if (first := next(ends, None)) is not None:
            found[full] = number({f"{key}: {first}": patterns[first]}, f"{key}: {first}", kind)
            used.add(first)
    if idle := [one for one in patterns if one not in used]:
        warnings.warn(
            f"{FILE}: {key} has {some(map(repr, idle))}, which names nothing that is adapted",
            stacklevel=2,
        )
    return found


@dataclass(frozen=True)
class Several:
    """An adapter of settings of one method, each for Linears of its own."""

    each: tuple[OnLinears, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part for one in self.each for part in one.parts)

    def attach(self, model: nn.Module) -> None:
        attach(model, self.parts)

    def to_json(self, adapted: Adapted) -> dict[str, Any]:
        """What the first says, of all Linears; and by patterns where others say otherwise."""
        made = self.each[0].to_json(adapted)
        for one in self.each[1:]:
            theirs, names = one.to_json(adapted), list(_names(one, adapted))
            for field, key in _PATTERNS.items():
                if theirs.get(field) != made.get(field):
                    made.setdefault(key, {}).update(dict.fromkeys(names, theirs[field]))
        return made


def _names(one: OnLinears, adapted: Adapted) -> Iterator[str]:
    """Patterns for peft of the Linears that one of several adapters names."""
    for name, target in adapted.targets.items():
        if target in one.targets:
            yield f"{'^' if adapted.paths else ''}{re.escape(name)}"
