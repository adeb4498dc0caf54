"""A decoder comes into being: as shapes on the meta device, then segment by segment with values.

Initial values are those of Hugging Face's models, drawn so that they depend on (seed, parameter
name, element index) only (outsize/models/random.py). Every module that owns parameters declares
what they start from (outsize/models/declared.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from outsize.errors import OutsizeError
from outsize.models.coding import CODES, SCALES, Format, decoded, encoded, plain, weight_of
from outsize.models.config import DecoderConfig
from outsize.models.declared import Initial, declarations
from outsize.models.decoder import Decoder
from outsize.models.linear import held, linears
from outsize.models.names import BESIDE, stays_float32
from outsize.models.random import fill_normal, fill_uniform

if TYPE_CHECKING:
    from outsize.models.adapter import Adapter, Begins

Fill = Callable[[str, Tensor], Tensor]
Segments = tuple[tuple[str, tuple[str, ...]], ...]

# Radford et al., 2019, section 2.3: projections into the residual stream start 1/sqrt(of how many
# there are) smaller. The other families' code at Hugging Face does not do this.
SCALED_BY_DEPTH = frozenset({"gpt2"})
REPEATED = 1 << 20  # numbers of a large parameter that are drawn where its values change nothing


def build(
    config: DecoderConfig,
    seed: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Decoder:
    """A decoder of `config` in `dtype`: with initial values on `device`, or, without a seed, on
    the meta device (shapes and dtypes, no memory).

    Peak memory is that of the model and a few megabytes. A router's correction is float32 at
    least.
    """
    with torch.device("meta"):
        model = Decoder(config)
    if seed is not None:
        _place(model, set(_names(model)), initial_fill(model, seed, device, dtype))
        return model

    def bare(name: str, x: Tensor) -> Tensor:
        # empty_like on meta imports sympy: a good part of a second before a worker is there.
        return torch.empty(x.shape, dtype=rest(name, dtype), device="meta")

    others = {name for name, x in model.named_parameters() if x.dtype != rest(name, dtype)}
    if others:
        _place(model, others, bare)
    return model


def shells(config: DecoderConfig, dtype: torch.dtype, device: torch.device | str) -> Decoder:
    """A decoder whose parameters have shape, dtype and device, but one element of memory each: for
    a job that fills its chunks one after the other and makes them the parameters' memory."""
    with torch.device("meta"):
        model = Decoder(config)

    def shell(name: str, x: Tensor) -> Tensor:
        return torch.empty((), dtype=rest(name, dtype), device=device).expand(x.shape)

    _place(model, set(_names(model)), shell)
    return model


def adapt(model: Decoder, adapter: Adapter, seed: int) -> Decoder:
    """The same model, frozen, with an adapter that begins with initial values, in the dtype and on
    the device of its weights. OutsizeError for one that has an adapter already."""
    every = dict(linears(model))
    attach(model, adapter, lambda: initial_draw(model, seed, lambda name: every[name].matrix()))
    return model


def attach(
    model: Decoder, adapter: Adapter, writing: Callable[[], Callable[[str, Tensor], None]]
) -> None:
    """Freeze a decoder and put an adapter beside it, in the dtype and on the device of its weights.
    writing: gives, once it is there, what writes the values of its parameters by name. OutsizeError
    for one that has an adapter."""
    if model.config.adapter is not None:
        raise OutsizeError("model: it has an adapter already; merge that one before, or leave it")
    like, before = model.prologue.tokens.weight, set(_names(model))
    without, model.config = model.config, replace(model.config, adapter=adapter)
    try:
        adapter.attach(model)
    except BaseException:
        model.config = without
        raise
    write = writing()

    def fill(name: str, parameter: Tensor) -> Tensor:
        out = torch.empty(parameter.shape, dtype=like.dtype, device=like.device)
        if not out.is_meta:
            write(name, out)
        return out

    _place(model, set(_names(model)) - before, fill)


def uncoded(model: Decoder) -> Decoder:
    """The same model, whose coded or factored weights are plain ones from now on, in its dtype."""
    dtype = model.prologue.tokens.weight.dtype
    if model.config.weights is not None:
        model.config.weights.detach(model)
        model.config = model.config.weights.left(model.config)
    for _, one in list(held(model)):
        if one.coded is not None:
            one.uncode(dtype)
    model.config = plain(model.config)
    return model


def rest(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of parameter `name` in a model of `dtype`."""
    if name.endswith((f".{CODES}", f".{SCALES}")):
        return torch.uint8
    return torch.promote_types(torch.float32, dtype) if stays_float32(name) else dtype


def segments(model: Decoder) -> Segments:
    """("prologue", parameter names), ("block 0", names), ..., ("epilogue", names), in the order in
    which the forward needs them. A tied weight is in the prologue only."""
    table: dict[str, list[str]] = {"prologue": []}
    table |= {f"block {i}": [] for i in range(len(model.blocks))}
    table["epilogue"] = []
    for name in _names(model):
        head, index, *_ = name.split(".")
        table[f"block {index}" if head == "blocks" else head].append(name)
    return tuple((segment, tuple(names)) for segment, names in table.items())


def materialise(model: Decoder, segment: str, fill: Fill) -> None:
    """Give the parameters of one of the model's segments their values.

    `fill(name, parameter)` gets a parameter as it is (on meta: its shape and dtype) and returns the
    tensor to take its place: its shape; any dtype and device. Tied weights stay one Parameter.
    """
    _place(model, set(dict(segments(model))[segment]), fill)


def initial_fill(
    model: Decoder, seed: int, device: torch.device | str, dtype: torch.dtype | None = None
) -> Fill:
    """A fill for `materialise` that makes initial values on `device`, in each parameter's dtype or
    in that which it has in a model of `dtype`."""
    draw = initial_draw(model, seed)

    def fill(name: str, parameter: Tensor) -> Tensor:
        kind = parameter.dtype if dtype is None else rest(name, dtype)
        # Not like it: to make that of a tensor without memory, PyTorch imports sympy.
        out = torch.empty(parameter.shape, dtype=kind, device=device)
        draw(name, out)
        return out

    return fill


def initial_draw(
    model: Decoder, seed: int, matrix: Callable[[str], Tensor] | None = None
) -> Callable[[str, Tensor], None]:
    """Writes initial values by parameter name into a tensor of the parameter's shape. matrix: gives
    the weight of a Linear, by its name, where what is beside it begins by that; drawn, where it is
    None."""
    initial = {weight_of(name): start for name, start in initial_values(model)}
    begins = dict(beginning(model))
    waiting: dict[str, Tensor] = {}  # begun with one that was asked for: they come together
    every = linears(model) if begins else ()
    whole = {name: (one.sizes, one.coded) for name, one in every}  # before it is cut

    def drawn(name: str) -> Tensor:
        sizes, coded = whole[name]
        out = torch.empty(sizes, dtype=torch.float64 if coded is None else torch.float32)
        written(f"{name}.weight", out)
        return out if coded is None else as_held(coded.format, out, name)

    def draw(name: str, out: Tensor) -> None:
        if name not in begins:
            written(name, out)
            return
        if name not in waiting:
            path, module = begins[name]
            values = module.begin((matrix or drawn)(linear_of(path)).detach())
            waiting.update({f"{path}.{leaf}": x for leaf, x in values.items()})
        out.copy_(waiting.pop(name))

    def written(name: str, out: Tensor) -> None:
        write_initial(initial[name], out, seed, name)

    return coded_draw(model, draw)


def repeated_draw(model: Decoder, seed: int) -> Callable[[str, Tensor], None]:
    """Writes values like initial ones by parameter name, for who asks how long work takes: of a
    large parameter a million drawn ones, time after time."""
    initial = {weight_of(name): start for name, start in initial_values(model)}

    def draw(name: str, out: Tensor) -> None:
        if out.numel() <= REPEATED or not initial[name].std:
            write_initial(initial[name], out, seed, name)
            return
        flat = out.view(-1)
        drawn = flat[:REPEATED]
        write_initial(initial[name], drawn, seed, name)
        for piece in flat[REPEATED:].split(REPEATED):
            piece.copy_(drawn[: len(piece)])

    return coded_draw(model, draw)


def coded_draw(
    model: Decoder, weight: Callable[[str, Tensor], None]
) -> Callable[[str, Tensor], None]:
    """Writes values by parameter name: of what is coded those of the weights that `weight` writes
    under its own name, in float32. model: whole."""
    every = {name: one for name, one in held(model) if one.coded is not None}
    waiting: dict[str, Tensor] = {}

    def draw(name: str, out: Tensor) -> None:
        module, _, leaf = name.rpartition(".")
        one = every.get(module)
        if one is None or one.coded is None or leaf not in (CODES, SCALES):
            weight(name, out)
            return
        if name not in waiting:
            drawn = torch.empty(sizes[module], dtype=torch.float32, device=out.device)
            weight(f"{module}.weight", drawn)
            made = encoded(one.coded.format, drawn, module)
            waiting.update({f"{module}.{leaf}": codes for leaf, codes in made.items()})
        out.copy_(waiting.pop(name))

    sizes = {name: one.sizes for name, one in every.items()}  # before it is cut
    return draw


def as_held(format: Format, weight: Tensor, name: str) -> Tensor:
    """A weight as codes give it back. name: of its Linear, for errors."""
    made = encoded(format, weight, name)
    return decoded(format, made[CODES], made.get(SCALES))


def write_initial(start: Initial, out: Tensor, seed: int, name: str) -> None:
    """Fill `out` with the initial values, in numbers, of a parameter of this name."""
    assert not isinstance(start.std, str), "said in numbers"
    if start.std:
        fill_normal(out, seed, name, std=start.std)
    elif start.alike is not None:
        common, columns = start.alike
        for i, row in enumerate(out):
            fill_uniform(row, seed, common, start.bound, i * columns)
    elif start.bound:
        fill_uniform(out, seed, name, start.bound)
    else:
        out.fill_(start.value)


def beginning(model: nn.Module) -> Iterator[tuple[str, tuple[str, Begins]]]:
    """The parameters that begin by a weight, with the module that says how and its name."""
    from outsize.models.adapter import Begins

    for path, module in model.named_modules():
        if BESIDE in f"{path}." and isinstance(module, Begins):
            yield from ((f"{path}.{leaf}", (path, module)) for leaf in module.begins)


def linear_of(name: str) -> str:
    """The Linear that a parameter or module of this name is beside."""
    return f"{name}.".partition(BESIDE)[0]


def initial_values(model: Decoder) -> Iterator[tuple[str, Initial]]:
    """What each parameter starts from, by name, in numbers."""
    std = model.config.init_std
    deep = std
    if model.config.family in SCALED_BY_DEPTH:
        deep /= math.sqrt(2 * len(model.blocks))
    numbers = {"model": std, "residual": deep}
    for name, declared in declarations(model):
        start = declared.initial
        yield name, replace(start, std=numbers[start.std]) if start.std in numbers else start


def _names(model: Decoder) -> Iterator[str]:
    """Parameter names in order; the first of those that a tied weight has."""
    return (name for name, _ in model.named_parameters())


def _place(model: Decoder, names: set[str], fill: Fill) -> None:
    """Replace the named parameters, one at a time, everywhere they are used."""
    made: dict[int, tuple[nn.Parameter, nn.Parameter | None]] = {}  # by the old one's id: both
    for prefix, module in model.named_modules():
        for leaf, old in list(module.named_parameters(recurse=False)):
            if id(old) not in made:  # under the first of the names that it has
                name = f"{prefix}.{leaf}" if prefix else leaf
                made[id(old)] = old, _filled(name, old, fill) if name in names else None
            new = made[id(old)][1]
            if new is not None:
                module.register_parameter(leaf, new)


def _filled(name: str, old: nn.Parameter, fill: Fill) -> nn.Parameter:
    value = fill(name, old)
    assert value.shape == old.shape, f"{name}: {value.shape}, not {old.shape}"
    return nn.Parameter(value, requires_grad=old.requires_grad)
