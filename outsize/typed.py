"""Plain values, as YAML gives them, read into the types that dataclasses declare.

What is not known or has the wrong type is refused with its place: "run.yaml: train.stpes: unknown
key; did you mean 'steps'?". YAML reads 3e-4 as a string; here it is the number that was meant.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Hashable, Mapping
from typing import Any

import yaml

from outsize.errors import OutsizeError, nearest


class Written:
    """A value that is written as something else than its fields."""

    def written(self) -> Any:
        """It as YAML has it."""
        raise NotImplementedError

    @classmethod
    def read(cls, value: Any) -> Any:
        """What `written` gave."""
        raise NotImplementedError


class Open:
    """A dataclass that has other keys in a file than its fields."""

    @classmethod
    def hints(cls) -> dict[str, Any]:
        """The type of each key; each is a keyword of the class and an attribute."""
        raise NotImplementedError


def load_yaml(text: str, source: str) -> Any:
    """YAML as plain values. OutsizeError, naming `source`, for what is not YAML or names a key
    twice."""
    try:
        return yaml.load(text, _Quick)
    except (yaml.YAMLError, UnicodeEncodeError):
        pass  # PyYAML's own shows the line that it cannot read
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise OutsizeError(f"{source}: not YAML: {' '.join(str(error).split())}") from None


# libyaml's, ten times as fast, where PyYAML was built with it.
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def dump_yaml(value: Any, **said: Any) -> str:
    """Plain values as YAML, keys in the order that they have. said: as yaml.dump has it."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, **said)
    return text


class _Once(yaml.constructor.SafeConstructor):
    """A mapping that says a key twice would otherwise keep the second in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} occurs twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Loader(_Once, yaml.SafeLoader):
    """In Python alone."""


# As said of _Dumper; its errors show no lines.
_Quick: Any = type("_Quick", (_Once, getattr(yaml, "CSafeLoader", yaml.SafeLoader)), {})


def read(kind: Any, value: Any, source: str, path: str = "") -> Any:
    """`value` as the annotated type `kind`: a dataclass, tuple, Literal, union or plain type.

    OutsizeError names `source` and `path`, the place of the value in it.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Written):
        return kind.read(read(Mapping[str, int], value, source, path))
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, source, path)
    if origin in (typing.Union, types.UnionType):
        return _union(args, value, source, path)
    if origin is typing.Literal:
        if value not in args:
            known = ", ".join(map(str, args))
            raise OutsizeError(f"{place(source, path)}: {value!r}; expected one of {known}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong(kind, value, source, path)
        if args[-1] is not Ellipsis and len(value) != len(args):
            raise _wrong(kind, value, source, path)
        kinds = [args[0]] * len(value) if args[-1] is Ellipsis else args
        return tuple(
            read(one, item, source, f"{path}[{i}]")
            for i, (one, item) in enumerate(zip(kinds, value, strict=True))
        )
    if origin is Mapping:
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise _wrong(kind, value, source, path)
        return {k: read(args[1], v, source, _join(path, k)) for k, v in value.items()}
    found = _number(kind, value) if kind in (int, float) else value
    if not isinstance(found, kind) or (kind is not bool and isinstance(found, bool)):
        raise _wrong(kind, value, source, path)
    return found


def listed(kind: Any, value: Any) -> Any:
    """The value, or the list of it alone where it is a text and only lists of texts are expected:
    what people say who know of one."""
    args = typing.get_args(kind) if typing.get_origin(kind) is not tuple else (kind,)
    return (
        [value] if isinstance(value, str) and tuple[str, ...] in args and str not in args else value
    )


def plain(value: Any, defaults: bool = True) -> Any:
    """A value as YAML and JSON can say it, without tuples and classes; `read` gives back an equal
    one. defaults: fields at their default are said too."""
    if isinstance(value, Written):
        return value.written()
    if isinstance(value, Open):
        return {name: plain(getattr(value, name), defaults) for name in value.hints()}
    if dataclasses.is_dataclass(value):
        said = (f for f in dataclasses.fields(value) if defaults or not _at_default(value, f))
        return {field.name: plain(getattr(value, field.name), defaults) for field in said}
    if isinstance(value, Mapping):
        return {key: plain(item, defaults) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item, defaults) for item in value]
    return value


def _at_default(value: Any, field: dataclasses.Field[Any]) -> bool:
    own, factory = getattr(value, field.name), field.default_factory
    return bool(own == (field.default if factory is dataclasses.MISSING else factory()))


def place(source: str, path: str) -> str:
    """ "run.yaml: train.steps"."""
    return f"{source}: {path}" if path else source


def describe(kind: Any) -> str:
    """A type as a person reads it."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("nothing" if a is type(None) else describe(a) for a in args)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, args))
    if origin is tuple and args[-1] is not Ellipsis:
        return f"a list of {len(args)}, each {describe(args[0])}"
    if origin is tuple:
        return f"a list, each {describe(args[0])}"
    if origin is Mapping:
        return f"names, each with {describe(args[1])}"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return names.get(kind, getattr(kind, "__name__", str(kind)))


def _wrong(kind: Any, value: Any, source: str, path: str) -> OutsizeError:
    finite = "a finite number" if value in (math.inf, -math.inf) or value != value else None
    return OutsizeError(f"{place(source, path)}: {value!r}; expected {finite or describe(kind)}")


def _number(kind: type, value: Any) -> Any:
    """The number that `value` stands for, or `value` itself where it stands for none."""
    if isinstance(value, str) and "e" in value.lower():
        try:
            value = float(value)
        except ValueError:
            return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return value if isinstance(value, int) else str(value)
    if kind is int:
        return int(value) if value == int(value) else value
    return float(value)


def _union(args: tuple[Any, ...], value: Any, source: str, path: str) -> Any:
    if value is None and type(None) in args:
        return None
    first: OutsizeError | None = None
    for one in args:
        if one is not type(None):
            try:
                return read(one, value, source, path)
            except OutsizeError as error:
                first = first or error
    assert first is not None
    if len([one for one in args if one is not type(None)]) > 1:
        raise _wrong(typing.Union[args], value, source, path)  # noqa: UP007
    raise first


@functools.cache
def _hints(kind: Any) -> Mapping[str, Any]:
    """The types of a dataclass's fields; to read them anew takes longer than what they read."""
    return typing.get_type_hints(kind)


def _dataclass(kind: Any, value: Any, source: str, path: str) -> Any:
    if not isinstance(value, dict):
        keys = ", ".join(_hints(kind))
        raise OutsizeError(f"{place(source, path)}: {value!r}; expected a mapping of {keys}")
    hints = kind.hints() if issubclass(kind, Open) else _hints(kind)
    for key in value:
        if key not in hints:
            raise unknown(key, tuple(hints), source, path)
    required = {
        f.name
        for f in dataclasses.fields(kind)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    for key in sorted(required - set(value)):
        raise OutsizeError(
            f"{place(source, _join(path, key))}: missing; expected {describe(hints[key])}"
        )
    read_values = {k: read(hints[k], v, source, _join(path, k)) for k, v in value.items()}
    try:
        return kind(**read_values)
    except OutsizeError as error:  # what the class itself refuses does not know its place
        where = place(source, path)
        raise (
            error if str(error).startswith(where) else OutsizeError(f"{where}: {error}")
        ) from None


def unknown(key: Any, known: tuple[str, ...], source: str, path: str) -> OutsizeError:
    """The error of a key that is not among the known ones of the mapping at `path`."""
    where = place(source, _join(path, str(key)))
    return OutsizeError(f"{where}: unknown key{nearest(str(key), known)}")


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
