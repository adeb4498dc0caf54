"""What reads the weights of a whole model, where there is an adapter's directory alone: it has them
take the adapter up while it reads, or says that it cannot."""

from __future__ import annotations

from pathlib import Path

import torch

from outsize.checkpoint.adapters import ADAPTER_CONFIG, described, mergeable, read_config
from outsize.errors import OutsizeError
from outsize.models.decoder import Decoder


def check_whole(directory: Path) -> None:
    """OutsizeError for an adapter's directory: with what gives a whole model, where weights can
    take that adapter up, and else with where it is used."""
    if not (directory / ADAPTER_CONFIG).is_file():
        return
    with torch.device("meta"):
        merges = mergeable(Decoder(read_config(directory)))
    remedy = (
        f"outsize merge {directory} --into NEW writes one"
        if merges
        else "no weight can take this one up: use it in memory on one worker, without memory, mesh"
        " or workers"
    )
    raise OutsizeError(f"{directory} holds an adapter alone; expected a whole model: {remedy}")


def taken_apart(directory: Path) -> tuple[Path, tuple[tuple[Path, float], ...]]:
    """Where the weights of a model lie, and the adapter that they take up while they are read, if
    the directory is an adapter's. OutsizeError, as of `check_whole`, where they cannot."""
    if not (directory / ADAPTER_CONFIG).is_file():
        return directory, ()
    config = read_config(directory)
    with torch.device("meta"):
        merges = config.coding is None and mergeable(Decoder(config))
    if not merges:
        check_whole(directory)
    return described(directory)[1], ((directory, 1.0),)
