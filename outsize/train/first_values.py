"""Where the values of a run's first step come from, written parameter by parameter into a job.

The model has no memory of its own before: a job makes its chunks one by one, asks for the values of
each and puts them where they rest, so that starting takes no more than training does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from outsize.checkpoint.hub import Described, check_tied_head, describe
from outsize.models.build import beginning, linear_of
from outsize.models.coding import BESIDE, CODES, PIECE, SCALES, decoded
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder
from outsize.models.linear import linears
from outsize.models.names import Stored, layout
from outsize.runtime.job import Fill
from outsize.schedule.starting import Filling
from outsize.train.base import may_lie


class Read(Protocol):
    """Gives a stored tensor by its name in Hugging Face's files."""

    def __call__(self, name: str, out: Tensor | None = None) -> Tensor:
        """Into `out`, of any dtype, or newly allocated."""


def filling(stored: Iterable[Stored], read: Read) -> Fill:
    """Writes native parameters from stored tensors: straight into their place where they are the
    same, else by way of the tensors of one entry."""
    entries = {name: entry for entry in stored for name in entry.ours}
    waiting: dict[str, Tensor] = {}  # split with one that was asked for: they come together

    def fill(name: str, out: Tensor) -> None:
        entry = entries[name]
        if entry.unchanged:
            read(entry.theirs[0], out)
            return
        if name not in waiting:
            theirs = tuple(read(other) for other in entry.theirs)
            waiting.update(zip(entry.ours, entry.split(theirs), strict=True))
        out.copy_(waiting.pop(name))

    return fill


def hub_fill(directory: Path, config: DecoderConfig) -> Fill:
    """Writes the weights of a Hugging Face directory. OutsizeError, naming file and tensor, for
    weights that are missing, unexpected, misshapen or damaged."""
    found = describe(directory, config)
    tokens = found.names[f"{config.names.outer['prologue.tokens']}.weight"]
    check_tied_head(found.shards, config, lambda: found.shards.read(tokens))

    def read(name: str, out: Tensor | None = None) -> Tensor:
        return found.shards.read(found.names[name], out)

    return filling(found.stored, read)


def reading(directory: Path, config: DecoderConfig) -> Callable[[str], Tensor]:
    """Gives the weights of the Linears of a Hugging Face directory by these' names, float32 at
    least, as they are held. Nothing is read before one is asked for."""

    @cache
    def known() -> tuple[Described, dict[str, Stored]]:
        found = describe(directory, config)
        return found, {name: entry for entry in found.stored for name in entry.ours}

    def weight(name: str) -> Tensor:
        found, entries = known()
        entry = entries.get(f"{name}.weight") or entries[f"{name}.{CODES}"]
        theirs = tuple(found.shards.read(found.names[other]) for other in entry.theirs)
        made = dict(zip(entry.ours, entry.split(theirs), strict=True))
        if (weight := made.get(f"{name}.weight")) is not None:
            return weight.to(torch.promote_types(weight.dtype, torch.float32))
        assert config.coding is not None, "it has codes"
        return decoded(
            config.coding.of(name), made[f"{name}.{CODES}"], made.get(f"{name}.{SCALES}")
        )

    return weight


def filling_of(directory: Path | None, config: DecoderConfig) -> Filling:
    """What a job holds beside a parameter while its values come from a directory's files, or (None)
    are drawn."""
    if directory is None:
        return Filling()
    entries = [entry for entry in layout(config) if not entry.unchanged]
    begun = {} if config.adapter is None else _begun(config)
    if not entries and config.adapter is None:
        return Filling(converted=begun)
    found = describe(directory, config)
    stays = {} if config.adapter is None else may_lie(found)
    shapes = {name: parameter.shape for name, parameter in found.model.named_parameters()}

    def size(entry: Stored) -> int:
        spans = (found.entry(other)[1] for other in entry.theirs)
        stored = sum(span.stop - span.start for span in spans)
        if config.coding is None or not entry.ours[0].endswith(f".{CODES}"):
            return 2 * stored  # as stored, and converted
        codes = sum(shapes[name].numel() for name in entry.ours)
        return stored + codes + BESIDE * min(PIECE, stored)

    converted = {n: size(entry) for entry in entries for n in entry.ours} | begun
    return Filling(converted=converted, lying=stays)


def _begun(config: DecoderConfig) -> dict[str, int]:
    """By parameter that begins by a weight, the bytes of what it is made from, in float32."""
    with torch.device("meta"):
        model = Decoder(config)
    every = dict(linears(model))
    return {
        name: 4 * module.room * prod(every[linear_of(name)].sizes)
        for name, (_, module) in beginning(model)
    }
