"""How native parameters rest in Hugging Face files: names, fusions, transposes, stacks.

A family declares the names of its modules (`Names` in config.py); this turns a declaration into
a list of `Stored`, one for each tensor or group of tensors that must be read together. It is made
from the decoder itself, so that no parameter can be forgotten.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from outsize.errors import OutsizeError
from outsize.models.coding import CODES, SCALES, Coding, decoded, encoded, plain
from outsize.models.config import DecoderConfig, Fused
from outsize.models.declared import Declared, declarations
from outsize.models.decoder import Decoder

Convert = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]

PEFT = "base_model.model."  # before the names of a model's modules in peft's files
LEAVES = (CODES, SCALES)
BESIDE = ".beside."  # in the name of a parameter, behind that of the Linear it is beside
AROUND = "_around."  # the same, behind that of the branch it is around


@dataclass(frozen=True)
class Stored:
    """Some native parameters and the stored tensors that hold them.

    split makes native tensors from stored ones, merge the exact inverse; both keep dtype and
    device, both are linear (they map gradients as they map weights), and split may return views.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    split: Convert
    merge: Convert

    @property
    def unchanged(self) -> bool:
        """The one stored tensor is the native one."""
        return self.split is _same


def layout(config: DecoderConfig) -> tuple[Stored, ...]:
    """All stored tensors of a model in its order; a tied head and an adapter's are not listed."""
    shapes, declared = _known(config)
    weights = {} if config.coding is None else _known(plain(config))[0]
    done: set[str] = set()
    stored: list[Stored] = []
    for name in shapes:
        if name not in done and declared[name].file is None:
            entry = _stored(config, name, shapes) if _leaf(name) not in LEAVES else None
            entry = entry or _coded(config, name, shapes, weights)
            stored.append(entry)
            done.update(entry.ours)
    return tuple(stored)


def adapter_layout(config: DecoderConfig) -> tuple[Stored, ...]:
    """All stored tensors of a model's adapter, as peft names them. OutsizeError for an adapter of
    what the family's files hold fused."""
    shapes, declared = _known(config)
    files = ((name, declared[name].file) for name in shapes)
    named = {
        name: in_files(file, partial(_scope_in_files, config, name))
        for name, file in files
        if file is not None
    }
    return joined(named, shapes, declared)


def in_files(file: str, scope: Callable[[], str]) -> str:
    """The name in files of an adapter's parameter that declares `file`. scope: that of what it
    belongs to."""
    return file[1:] if file.startswith("/") else f"{PEFT}{scope()}.{file}"


def _scope_in_files(config: DecoderConfig, name: str) -> str:
    """The full name in files of what a parameter of an adapter belongs to."""
    full, around, _ = name.partition(AROUND)
    if not around:
        return stored_module(config, name)
    _, layer, branch = full.split(".")
    names = {theirs for ours, theirs in config.names.block.items() if ours.startswith(f"{branch}.")}
    names |= {f.theirs for f in config.names.fused if f.ours[0].startswith(f"{branch}.")}
    first = {one.partition(".")[0] for one in names if "." in one}
    own = first.pop() if len(first) == 1 and all("." in one for one in names) else branch
    return f"{config.names.prefix.format(i=layer)}{own}.around"


def joined(
    named: Mapping[str, str], shapes: Mapping[str, torch.Size], declared: Mapping[str, Declared]
) -> tuple[Stored, ...]:
    """Of an adapter's parameters, by their names in files: those of one name lie in one tensor."""
    found: dict[str, list[str]] = {}
    for ours, theirs in named.items():
        found.setdefault(theirs, []).append(ours)

    def entry(theirs: str, ours: Sequence[str]) -> Stored:
        if len(ours) == 1:
            return Stored((ours[0],), (theirs,), _same, _same)
        if declared[ours[0]].nested:
            inside = [tuple(map(slice, shapes[name])) for name in ours]
            return Stored(
                tuple(ours), (theirs,), lambda x: tuple(x[0][cut] for cut in inside), _widest
            )
        dim = declared[ours[0]].joined
        sizes = [shapes[name][dim] for name in ours]
        return Stored(
            tuple(ours), (theirs,), lambda x: x[0].split(sizes, dim), lambda x: (_cat(x, dim),)
        )

    return tuple(entry(theirs, ours) for theirs, ours in found.items())


def _known(config: DecoderConfig) -> tuple[dict[str, torch.Size], dict[str, Declared]]:
    """Shapes of the parameters, and what is declared of them."""
    with torch.device("meta"):
        model = Decoder(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return shapes, dict(declarations(model))


def stored_module(config: DecoderConfig, name: str) -> str:
    """The full name in files of the Linear that parameter `name` is beside, or belongs to.
    OutsizeError for one that lies there with others."""
    full, alone = module_in_files(config, name)
    if not alone:
        scope, module = _module(config, name)
        whole = full.removeprefix(config.names.prefix.format(i=scope))
        raise OutsizeError(
            f"model: files of {config.family} hold {module} with others in {whole}, and an adapter"
            " of one of them has no name there; leave it out of the adapter's targets"
        )
    return full


def module_in_files(config: DecoderConfig, name: str) -> tuple[str, bool]:
    """The same, and whether the Linear has that name alone."""
    scope, module = _module(config, name)
    if scope is None:
        return config.names.outer[module], True
    fused = next((f.theirs for f in config.names.fused if module in f.ours), None)
    own = config.names.block[module] if fused is None else fused
    return config.names.prefix.format(i=scope) + own, fused is None


def _module(config: DecoderConfig, name: str) -> tuple[int | None, str]:
    """The layer, or None, and the Linear that parameter `name` is beside, or belongs to."""
    scope, module, _ = _parts(name.replace(BESIDE, "."))
    while module and not _is_stored(config, scope, module):
        module = module.rpartition(".")[0]
    return scope, module


def _is_stored(config: DecoderConfig, scope: int | None, module: str) -> bool:
    if scope is None:
        return module in config.names.outer
    return module in config.names.block or any(module in f.ours for f in config.names.fused)


def _stored(config: DecoderConfig, name: str, shapes: dict[str, torch.Size]) -> Stored:
    scope, module, leaf = _parts(name)
    names = config.names
    if scope is None:
        return Stored((name,), (f"{names.outer.get(module, module)}.{leaf}",), _same, _same)
    prefix = names.prefix.format(i=scope)
    fused = next((f for f in names.fused if module in f.ours), None)
    if fused is not None:
        ours = tuple(f"blocks.{scope}.{part}.{leaf}" for part in fused.ours)
        transposed = fused.theirs in names.transposed and leaf == "weight"
        split, merge = _fusion(config, fused, [shapes[o][0] for o in ours], transposed)
        return Stored(ours, (f"{prefix}{fused.theirs}.{leaf}",), split, merge)
    if module.startswith("mlp.experts"):
        pattern = prefix + names.block[f"{module}.{leaf}"]
        theirs = tuple(pattern.format(e=e) for e in range(shapes[name][0]))
        return Stored((name,), theirs, _stack, _unstack)
    full = f"{module}.{leaf}"
    if full in names.block:  # a parameter whose last name differs too
        return Stored((name,), (prefix + names.block[full],), _same, _same)
    their_module = names.block.get(module, module)  # what no family knows is called as here
    if their_module in names.transposed and leaf == "weight":
        return Stored((name,), (f"{prefix}{their_module}.{leaf}",), _transpose, _transpose)
    return Stored((name,), (f"{prefix}{their_module}.{leaf}",), _same, _same)


def _coded(
    config: DecoderConfig,
    name: str,
    shapes: Mapping[str, torch.Size],
    weights: dict[str, torch.Size],
) -> Stored:
    """Codes, which rest as they are, or are made of the weights that rest there. weights: shapes of
    the plain model's."""
    assert config.coding is not None, "there are codes"
    module = name.rpartition(".")[0]
    if config.coding.stored:
        scope, inside, _ = _parts(name)
        their = config.names.block.get(inside, inside)
        leaves = [leaf for leaf in LEAVES if f"{module}.{leaf}" in shapes]
        ours, theirs = ([f"{one}.{leaf}" for leaf in leaves] for one in (module, their))
        prefix = config.names.prefix.format(i=scope)
        check = _checked(config.coding, name)
        return Stored(tuple(ours), tuple(f"{prefix}{one}" for one in theirs), check, _same)
    entry, form = _stored(config, f"{module}.weight", weights), config.coding.of(module)
    modules = [one.rpartition(".")[0] for one in entry.ours]
    ours = [f"{one}.{leaf}" for one in modules for leaf in LEAVES if f"{one}.{leaf}" in shapes]

    def split(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        made: list[Tensor] = []
        for one, weight in zip(modules, entry.split(tensors), strict=True):
            made += encoded(form, weight, one).values()
        return tuple(made)

    def merge(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        each = len(tensors) // len(modules)
        parts = [tensors[i : i + each] for i in range(0, len(tensors), each)]
        return entry.merge(tuple(decoded(form, x[0], x[1] if each > 1 else None) for x in parts))

    return Stored(tuple(ours), entry.theirs, split, merge)


def _checked(coding: Coding, name: str) -> Convert:
    """Codes as they rest; OutsizeError where their scales are not finite."""

    def split(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        codes, *shared = tensors
        real = codes.dtype == torch.uint8 and not codes.is_meta
        if real and not coding.format.finite(codes, shared[0] if shared else None):
            raise OutsizeError(
                f"{name}: its scales are not finite: the files are damaged, or of another format;"
                " convert the model again"
            )
        return tensors

    return split


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _parts(name: str) -> tuple[int | None, str, str]:
    """(layer or None, module path inside its scope, parameter)."""
    path = name.split(".")
    if path[0] == "blocks":
        return int(path[1]), ".".join(path[2:-1]), path[-1]
    return None, ".".join(path[:-1]), path[-1]


def _same(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tensors


def _widest(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The one whose first rows and columns the others are."""
    return (max(tensors, key=Tensor.numel),)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """torch.cat, which on the meta device is a reference kernel that imports torch.compile."""
    first = tensors[0]
    if not first.is_meta:
        return torch.cat(tuple(tensors), dim)
    shape = list(first.shape)
    shape[dim] = sum(x.shape[dim] for x in tensors)
    return first.new_empty(shape)


def _transpose(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.t().contiguous() for x in tensors)


def _stack(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (torch.stack(tensors),)


def _unstack(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tensors[0].unbind(0)


def _fusion(
    config: DecoderConfig, fused: Fused, rows: Sequence[int], transposed: bool
) -> tuple[Convert, Convert]:
    heads, parts = config.heads, len(fused.ours)

    def split(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (whole,) = tensors
        whole = whole.t() if transposed else whole
        if fused.how == "rows":
            return tuple(whole.split(list(rows)))
        by_head = whole.unflatten(0, (heads, parts, -1))
        return tuple(by_head[:, i].flatten(0, 1) for i in range(parts))

    def merge(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if fused.how == "rows":
            whole = _cat(tensors)
        else:
            whole = _cat([x.unflatten(0, (heads, 1, -1)) for x in tensors], 1).flatten(0, 2)
        return (whole.t().contiguous() if transposed else whole,)

    return split, merge


def alternatives(config: DecoderConfig, theirs: str) -> tuple[str, ...]:
    """Other names under which files in the wild hold the stored tensor `theirs`."""
    names = config.names
    found = [names.aliases[theirs]] if theirs in names.aliases else []
    if names.base and theirs.startswith(names.base):
        found.append(theirs.removeprefix(names.base))
    return tuple(found)


def ignorable(config: DecoderConfig, theirs: str) -> bool:
    """Whether a stored tensor that `layout` does not list is known to be no parameter: masks and
    tables of old files, a second copy of a tied head, extra prediction layers."""
    if config.tied and theirs == f"{config.names.outer['epilogue.head']}.weight":
        return True
    return any(re.search(pattern, theirs) for pattern in config.names.ignored)


def stays_float32(ours: str) -> bool:
    """Whether a native parameter keeps float32 whatever dtype the model is built or loaded in:
    a router's correction bias moves in steps below a half precision's resolution."""
    return ours.endswith(".router.correction")
