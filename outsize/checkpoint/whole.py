"""What reads the weights of a whole model says so where there is an adapter's directory alone."""

from __future__ import annotations

from pathlib import Path

import torch

from outsize.checkpoint.adapters import ADAPTER_CONFIG, mergeable, read_config
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
