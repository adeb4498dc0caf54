"""Several adapters at once, which the weights of a plain model take up: of one in memory, or of
files while they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from outsize.checkpoint import hub
from outsize.checkpoint.adapters import check_mergeable, put, remove
from outsize.errors import OutsizeError
from outsize.models.adapter import Beside
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder
from outsize.models.linear import Linear

Weighted = Sequence[tuple[float, Mapping[str, Beside]]]  # what each adapter counts, by Linear


@torch.no_grad()
def combine(model: Decoder, adapters: Sequence[tuple[str | Path, float]]) -> None:
    """Have the weights of a plain decoder take up what several adapters change, each times its
    weight: W + the sum of weight * (W as the adapter has it - W). Beside the adapters one weight is
    in memory twice at a time. OutsizeError as of `put`, and for an adapter that changes nothing;
    the model is then as it was."""
    linears = {name: one for name, one in model.named_modules() if isinstance(one, Linear)}
    found = _besides(model, adapters)
    for (path, _), (_, besides) in zip(adapters, found, strict=True):
        if not any(_changes(linears[name], beside) for name, beside in besides.items()):
            raise OutsizeError(f"{path}: the adapter changes no output; expected a trained one")
    for name, one in linears.items():
        one.weight.copy_(_taken_up(found, f"{name}.weight", one.weight))
        if one.bias is not None:
            one.bias.copy_(_taken_up(found, f"{name}.bias", one.bias))
    model.taken_up = True


def combined(
    found: hub.Described, adapters: Sequence[tuple[str | Path, float]], form: Decoder
) -> hub.Described:
    """The same files, whose weights take up what adapters change while they are read, as `combine`
    has it. form: a plain decoder in the dtype and on the device of what is read, whose own values
    nobody asks for. OutsizeError as of `put`, and for weights that are codes."""
    check_plain(found.model.config)
    besides = _besides(form, adapters)

    @torch.no_grad()
    def changed(name: str, value: Tensor) -> Tensor:
        return _taken_up(besides, name, value).to(value.dtype)

    return replace(found, changed=changed)


def check_plain(config: DecoderConfig) -> None:
    """OutsizeError for a model of codes."""
    if config.coding is not None:
        raise OutsizeError(
            f"--adapter: the weights are {config.coding.format.name}, which take up no adapter;"
            " leave --weights out, give the adapter's own directory in the place of its base, or"
            " convert what outsize merge writes"
        )


def _besides(model: Decoder, adapters: Sequence[tuple[str | Path, float]]) -> Weighted:
    """What each is beside a plain decoder's Linears, which are then without."""
    linears = {name: one for name, one in model.named_modules() if isinstance(one, Linear)}
    found: list[tuple[float, Mapping[str, Beside]]] = []
    for path, weight in adapters:
        put(model, path)
        besides = {n: one.beside for n, one in linears.items() if one.beside is not None}
        try:
            check_mergeable(model)
        finally:
            remove(model)
        found.append((weight, besides))
    return found


def _taken_up(found: Weighted, name: str, value: Tensor) -> Tensor:
    """A parameter of a plain decoder, by its name, with what adapters change of it, in float32 at
    least where one does."""
    linear, _, part = name.rpartition(".")
    own = [(weight, besides[linear]) for weight, besides in found if linear in besides]
    if not own or part not in ("weight", "bias"):
        return value
    wide = value.to(torch.promote_types(value.dtype, torch.float32))
    if part == "weight":
        return wide + sum(weight * (each.merged(wide) - wide) for weight, each in own)
    return wide + sum(weight * (each.shift(wide) - wide) for weight, each in own)


def _changes(one: Linear, beside: Beside) -> bool:
    """Whether what is beside a Linear changes what it gives."""
    wide = one.weight.to(torch.promote_types(one.weight.dtype, torch.float32))
    return not torch.equal(beside.merged(wide), wide)
