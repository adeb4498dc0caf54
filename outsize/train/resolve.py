"""A run's file and `--set`s into one RunConfig, remembering for every value where it came from."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from outsize.data.files import is_data
from outsize.errors import OutsizeError
from outsize.optim import OPTIMIZERS, SGD, Optimizer, check_approximate
from outsize.optim.parse import parse as parse_optimizer
from outsize.registry import Setting, refuse_shared
from outsize.texts import read_text
from outsize.train.config import (
    MOVED,
    RENAMED,
    SHORT,
    UNSAID,
    RunConfig,
    check,
    config_of,
    full_name,
    leaf,
    leaves,
    technique_leaves,
)
from outsize.train.other_trainers import here
from outsize.typed import dump_yaml, listed, load_yaml, place, read, unknown

RUN = "run.yaml"  # in the directory of a run: all of its values
SET = "--set"
DEFAULT = "default"
DERIVED = "derived: "
PASSES = "train.epochs.count"
_PASSES = PASSES.removesuffix(".count")
_LENGTHS = ("train.steps", "train.tokens", "train.minutes")
_BETAS = "optimizer.betas"


@dataclass(frozen=True)
class Resolved:
    """Values by full key name; `origins` says where those that are not defaults came from."""

    values: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def config(self) -> RunConfig:
        """The values by section."""
        return config_of(self.values)

    def get(self, name: str) -> Any:
        """The value of a key, or its default."""
        return self.values[name] if name in self.values else _leaf(name).default

    def given(self, name: str) -> bool:
        """Whether somebody said it (a file, --set, or a derivation)."""
        return name in self.values

    def said(self, key: str) -> bool:
        """Whether anybody said that a technique is on or off, or anything of it."""
        return any(name == key or name.startswith(f"{key}.") for name in self.values)

    def typed(self, key: str) -> bool:
        """Whether --set said it, or a setting of it."""
        return any(
            origin == SET and (name == key or name.startswith(f"{key}."))
            for name, origin in self.origins.items()
        )

    def without(self, keys: Collection[str]) -> Resolved:
        """The same as if nobody had said these, nor settings of them."""
        kept = {
            name: value
            for name, value in self.values.items()
            if not any(name == key or name.startswith(f"{key}.") for key in keys)
        }
        return Resolved(kept, {n: origin for n, origin in self.origins.items() if n in kept})

    def is_derived(self, name: str) -> bool:
        """Whether its value was filled in rather than said."""
        return self.origins.get(name, "").startswith(DERIVED)

    def with_value(self, name: str, value: Any, origin: str) -> Resolved:
        """The same with one more value. OutsizeError for a number out of its range."""
        check(name, value, origin)
        return Resolved({**self.values, name: value}, {**self.origins, name: origin})

    def under(self, said: Resolved) -> Resolved:
        """The same with whatever was said besides laid over it."""
        return Resolved({**self.values, **said.values}, {**self.origins, **said.origins})

    def derive(self, name: str, value: Any, reason: str) -> Resolved:
        """The same with an open value filled in; what is not open stays."""
        if self.get(name) is not None:
            return self
        return self.with_value(name, value, f"{DERIVED}{reason}")

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(key, value, where it came from, what it means) of every key, in order."""
        return [
            (name, shown(self.get(name)), self.origins.get(name, DEFAULT), key.meaning)
            for name, key in self._keys()
        ]

    def _keys(self) -> Iterator[tuple[str, Setting]]:
        """The keys of every run, and those of techniques that are said."""
        yield from leaves().items()
        yield from ((n, key) for n, key in technique_leaves().items() if self._counts(n))

    def _counts(self, name: str) -> bool:
        """Whether what is said of a technique's key counts: one that is off has no settings, and
        settings say by themselves that it is on. So a run's file reads as it was written."""
        if name not in self.values or self.values.get(name.rpartition(".")[0]) is False:
            return False
        implied = any(other.startswith(f"{name}.") for other in self.values)
        return not (implied and self.values[name] is True)

    def to_yaml(self) -> str:
        """A run's file that says every value."""
        nested: dict[str, Any] = {}
        for name, _ in self._keys():
            *sections, key = name.split(".")
            value = self.get(name)
            value = list(value) if isinstance(value, tuple) else value
            here = nested
            for section in sections:
                inner = here.get(section)
                here[section] = inner if isinstance(inner, dict) else {}
                here = here[section]
            here[key] = value
        return dump_yaml(nested)


def resolve(path: str | Path | None, sets: Iterable[str] = ()) -> Resolved:
    """The values of a run's file (none: all defaults), then of "key=value" texts.

    OutsizeError, one line with the place, for a file that cannot be read, an unknown key, a wrong
    type.
    """
    resolved = Resolved()
    if path is not None:
        resolved = apply_text(resolved, _content(Path(path)), Path(path).name)
    for text in sets:
        resolved = apply_set(resolved, text)
    return _one_optimizer(_one_length(resolved))


def values_of(target: str | None, sets: Iterable[str] = ()) -> Resolved:
    """The values of a run's file, of a run's directory, or of a run of a preset or of a model's
    directory; then of "key=value" texts."""
    if target is None:
        return resolve(None, sets)
    path = Path(target)
    if (path / RUN).is_file():
        return recorded_values(path).under(resolve(None, sets))
    if is_file(target):
        return resolve(path, sets)
    return resolve(None, (f"model.name={target}", *sets))


def is_file(target: str) -> bool:
    """Whether a target is a run's file: else it is the name of a model, or a directory."""
    path = Path(target)
    return path.is_file() or path.suffix in (".yaml", ".yml")


def recorded_values(directory: Path) -> Resolved:
    """What the run in `directory` was started with. OutsizeError if there is none."""
    path = directory / RUN
    if not path.is_file():
        raise OutsizeError(
            f"no run in {directory}: {RUN} is missing; expected the output directory of a run"
        )
    found = apply_text(Resolved(), read_text(path), str(path))
    return found.with_value("output", str(directory), "--resume")


def as_sets(values: Mapping[str, object]) -> list[str]:
    """The values as "key=value" texts, those that are None left out."""
    said = {name: value for name, value in values.items() if value is not None}
    return [f"{name}={json.dumps(value)}" for name, value in said.items()]


def apply_text(resolved: Resolved, text: str, source: str) -> Resolved:
    """Add the values of a file's text."""
    found = load_yaml(text, source)
    return resolved if found is None else apply_values(resolved, found, source)


def apply_values(resolved: Resolved, found: Any, source: str) -> Resolved:
    """Add values that are nested as in a file."""
    if not isinstance(found, dict):
        sections = sorted({name.partition(".")[0] for name in (*leaves(), *RENAMED)})
        raise OutsizeError(f"{source}: {found!r}; expected a mapping of {', '.join(sections)}")
    for name, value in _flatten(found, source):
        _check_switch(name, value, source)
        kind = _leaf(name).kind
        read_value = read(kind, listed(kind, value), source, name)
        resolved = resolved.with_value(name, read_value, source)
    return resolved


def _check_switch(name: str, value: object, source: str) -> None:
    """OutsizeError for what neither switches a technique on or off nor is its settings."""
    found = technique_leaves()
    if name in found and found[name].kind is bool and not isinstance(value, bool):
        own = [key.removeprefix(f"{name}.") for key in found if key.startswith(f"{name}.")]
        if own:
            raise OutsizeError(
                f"{place(source, name)}: {value!r}; expected true, false, or a mapping of"
                f" {', '.join(own)}"
            )


def apply_set(resolved: Resolved, text: str) -> Resolved:
    """Add one "key=value", the value being YAML (or, for a text, as it stands)."""
    said, equals, raw = text.partition("=")
    name = SHORT.get(said.strip(), said.strip())
    name = RENAMED.get(name, name)
    if not equals:
        raise OutsizeError(f"{SET} {text!r}: expected key=value")
    found = leaf(name)
    if found is None and not _keys(name):
        raise _unknown(name, SET)
    # A star is a pattern's (train.only=*.bias), where YAML has an alias.
    value = raw if raw.startswith("*") else load_yaml(raw, f"{SET} {name}")
    if isinstance(value, dict) and set(value) <= set(_keys(said.strip())):
        name = said.strip()  # data={path: text}, where data=text would do
        found = None
    if found is None or (isinstance(value, dict) and name in technique_leaves()):
        for section in reversed(name.split(".")):  # as a file says it
            value = {section: value}
        return apply_values(resolved, value, SET)
    name = full_name(name, value)
    kind = _leaf(name).kind
    try:
        read_value = read(kind, listed(kind, value), SET, name)
    except OutsizeError:
        try:  # a text that looks like something else: output=2024
            read_value = read(kind, raw, SET, name)
        except OutsizeError:
            read_value = read(kind, value, SET, name)
    return resolved.with_value(name, read_value, SET)


def _content(path: Path) -> str:
    text = "" if is_data(path) else read_text(path, "expected a run's file, YAML in UTF-8")
    if is_data(path) or (path.suffix == ".json" and text.lstrip().startswith("[")):
        raise OutsizeError(
            f"{path} is data; expected a run's file (YAML), a preset or a model: outsize"
            f" new sft --data {path} writes such a file, outsize train MODEL --set data={path} runs"
        )
    return text


def _flatten(found: Any, source: str, inside: str = "") -> Iterator[tuple[str, Any]]:
    """(full key, plain value) of a nested mapping. inside: the section that it is, as "train."."""
    for key, value in found.items():
        name = f"{inside}{key}"
        name = RENAMED.get(name, name)
        if name in MOVED and value == UNSAID[name]:
            continue
        name = MOVED.get(name, name)
        technique = name in technique_leaves()
        if isinstance(value, dict) and (technique or _keys(name)):
            if technique:
                yield name, True
            yield from _flatten(value, source, f"{name}.")
        elif leaf(name) is not None:
            yield full_name(name, value), value
        elif not _keys(name):
            raise _unknown(name, source)
        elif value is not None and name in SHORT:
            yield SHORT[name], value
        elif value is not None:
            keys, ours = ", ".join(_keys(name)), here(name)
            also = f"; {value!r} itself is {ours}" if ours else ""
            raise OutsizeError(
                f"{place(source, name)}: {value!r}; expected a mapping of {keys}{also}"
            )


def _leaf(name: str) -> Setting:
    found = leaf(name)
    assert found is not None, name
    return found


def _keys(section: str) -> tuple[str, ...]:
    every = (*leaves(), *technique_leaves(), *RENAMED)
    found = (n.removeprefix(f"{section}.") for n in every if n.startswith(f"{section}."))
    return tuple(dict.fromkeys(name.partition(".")[0] for name in found))


def _unknown(name: str, source: str) -> OutsizeError:
    """The error of an unknown key, with the nearest: in its section, else anywhere."""
    if name in MOVED:
        return OutsizeError(f"{place(source, name)}: unknown key; it is {MOVED[name]} now")
    ours = here(name) or here(name.partition(".")[0])
    if ours is not None:
        return OutsizeError(f"{place(source, name)}: unknown key; here it is {ours}")
    section, _, key = name.rpartition(".")
    while section and not _keys(section):
        section, _, key = section.rpartition(".")
    inside, every = section and f"{section}.", (*leaves(), *technique_leaves())
    homes = [full for full in every if full.startswith(inside) and full.endswith(f".{key}")]
    if homes:
        meant = repr(homes[0]) if len(homes) == 1 else f"one of {', '.join(homes)}"
        return OutsizeError(f"{place(source, name)}: unknown key; did you mean {meant}?")
    if section:  # the innermost that there is knows the nearest
        return unknown(key, _keys(section), source, section)
    outer = tuple({full.partition(".")[0] for full in every})
    return unknown(name, outer, source, "")


def lengths(resolved: Resolved) -> list[str]:
    """The keys by which somebody says how long a run is."""
    said = [name for name in _LENGTHS if resolved.given(name) and resolved.get(name) is not None]
    return said + [_PASSES] * (_PASSES in resolved.config.techniques)


def length_now(recorded: Resolved, resolved: Resolved, said: Collection[str]) -> Resolved:
    """The values of a run that goes on, with its length left open where that is of epochs and what
    was said changes their steps. said: the keys that somebody said. OutsizeError for two lengths.
    """
    if _PASSES not in resolved.config.techniques:
        return resolved
    if "train.steps" in said:
        if PASSES in said:
            raise OutsizeError(
                f"train.steps and {_PASSES} are given together; expected one of them to say how"
                " long"
            )
        return resolved.without([_PASSES])
    changed = (name for name in said if resolved.get(name) != recorded.get(name))
    if any(name.startswith((_PASSES, "train.batch_tokens", "data.")) for name in changed):
        return resolved.without(["train.steps"])
    return resolved


def _one_length(resolved: Resolved) -> Resolved:
    """The length that --set says stands for those of the file. OutsizeError for two that remain."""
    said = lengths(resolved)
    typed = [name for name in said if resolved.typed(name)]
    if typed:
        resolved, said = resolved.without(set(said) - set(typed)), typed
    if len(said) > 1:
        raise OutsizeError(
            f"{' and '.join(said)} are given together; expected one of them to say how long"
        )
    return resolved


def _one_optimizer(resolved: Resolved) -> Resolved:
    """Refuse settings of an optimizer that make no sense, or are another one's, and techniques that
    change the same thing as others of the run."""
    config = resolved.config
    own = config.optimizer
    refuse_shared((own.name, *config.plan.approximate, *config.techniques))
    others = [name for name, _ in OPTIMIZERS.items() if name != own.name]
    for name in filter(config.techniques.__contains__, others):
        raise OutsizeError(
            f"{name} is set, and optimizer.name is {own.name}; leave it out, or set optimizer.name"
            f" to {name}"
        )
    if config.train.clip == 0:
        raise OutsizeError(
            "train.clip is 0, and no gradient would move a weight; expected more than 0, or null to"
            " leave gradients as they are"
        )
    made = optimizer_of(config)
    check_approximate(made, config.plan.approximate)
    said = config.technique(own.name) is not None
    if not isinstance(made, SGD) or said or not resolved.given(_BETAS):
        return resolved
    hint = f"{resolved.origins[_BETAS]}: for sgd write sgd.momentum: {made.momentum:g} instead"
    return Resolved(resolved.values, {**resolved.origins, _BETAS: hint})


def optimizer_of(config: RunConfig) -> Optimizer:
    """The optimizer of a run; its learning rate is 0 while it is open."""
    own = config.optimizer
    settings, warmup = config.technique(own.name), config.learning_rate.warmup or 0
    return parse_optimizer(own.name, own.lr or 0.0, own.weight_decay, own.betas, settings, warmup)


def shown(value: Any) -> str:
    """A value as people read it."""
    if value is None:
        return "-"
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
