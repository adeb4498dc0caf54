"""The values that a run begins with: drawn, of the model's directory, or of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from outsize.checkpoint.opened import Checkpoint
from outsize.models.build import initial_draw
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder
from outsize.models.names import adapter_layout
from outsize.runtime.job import Fill
from outsize.train.config import RunConfig
from outsize.train.filling import hub_fill
from outsize.train.state import weights_of


def first_values(model: Decoder, keys: RunConfig, found: Checkpoint | None) -> Fill:
    """Writes them by parameter name. model: before it is cut. found: the checkpoint that the run
    goes on from. What an adapter leaves as it is comes from the model's directory always."""
    config, directory = model.config, Path(keys.model.name).expanduser()
    drawn = keys.model.weights == "random"
    if config.adapter is None:
        if found is not None:
            return weights_of(found, config)
        return initial_draw(model, keys.train.seed) if drawn else hub_fill(directory, config)
    if found is not None:
        return beside(config, directory, weights_of(found, config))
    return beside(config, directory, initial_draw(model, keys.train.seed))


def beside(config: DecoderConfig, directory: Path, trained: Fill) -> Fill:
    """Writes the values of a model with an adapter: those that `trained` has, and of the rest those
    of the model's directory."""
    frozen = hub_fill(directory, config)
    own = {name for entry in adapter_layout(config) for name in entry.ours}

    def fill(name: str, out: Tensor) -> None:
        (trained if name in own else frozen)(name, out)

    return fill
