"""Where the values of a run's first step come from, written parameter by parameter into a job.

The model has no memory of its own before: a job makes its chunks one by one, asks for the values of
each and puts them where they rest, so that starting takes no more than training does.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from torch import Tensor

from outsize.checkpoint.hub import check_tied_head, describe
from outsize.models.coding import BESIDE, CODES, PIECE
from outsize.models.config import DecoderConfig
from outsize.models.names import Stored, layout
from outsize.runtime.job import Fill
from outsize.schedule.starting import Filling


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


def filling_of(directory: Path | None, config: DecoderConfig) -> Filling:
    """What a job holds beside a parameter while its values come from a directory's files, or (None)
    are drawn."""
    if directory is None:
        return Filling()
    entries = [entry for entry in layout(config) if not entry.unchanged]
    if not entries:
        return Filling()
    found = describe(directory, config)
    shapes = {name: parameter.shape for name, parameter in found.model.named_parameters()}

    def size(entry: Stored) -> int:
        spans = (found.entry(other)[1] for other in entry.theirs)
        stored = sum(span.stop - span.start for span in spans)
        if config.coding is None or not entry.ours[0].endswith(f".{CODES}"):
            return 2 * stored  # as stored, and converted
        codes = sum(shapes[name].numel() for name in entry.ours)
        return stored + codes + BESIDE * min(PIECE, stored)

    return Filling(converted={name: size(entry) for entry in entries for name in entry.ours})
