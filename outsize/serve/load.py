"""A model that is not in memory as a whole: opened on one worker, or on those of a mesh."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from outsize import accelerator
from outsize.checkpoint.adapters import tokenizer_directory
from outsize.checkpoint.combining import combined
from outsize.checkpoint.hub import CONFIG, describe, read_config
from outsize.checkpoint.whole import check_whole, taken_apart
from outsize.collectives import Lone, Mesh, World, from_environment
from outsize.errors import OutsizeError
from outsize.models.coding import asked
from outsize.plan.settings import NONE, Settings
from outsize.serve.files import InFiles, Limits
from outsize.serve.meshed import OnMesh
from outsize.serve.model import Model
from outsize.serve.shells import shells

Adapters = Sequence[tuple[str | Path, float]]


def on_mesh(
    path: Path,
    world: World,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    leave: Callable[[], None] | None = None,
    limits: Limits | None = None,
    settings: Settings = NONE,
    weights: str | None = None,
    adapters: Adapters = (),
) -> Model:
    """The model in a Hugging Face directory on this worker of `world`; with limits its part stays
    in the files. leave: called in the end. settings: of the plan. weights: what
    the blocks' are held as; None: as they lie. adapters: directories of some, and what each counts,
    which the weights take up, as they do that of an adapter's directory. OutsizeError for one that
    they cannot, and for any within limits."""
    if limits is not None:
        check_whole(path)
    base, own = taken_apart(path)
    found = describe(base, asked(read_config(base), weights, "weights"))
    if adapters := (*own, *adapters):
        if limits is not None:
            raise OutsizeError(
                "--adapter is for weights in memory; merge it (outsize merge) before"
            )
        form = shells(found, found.dtypes(dtype), accelerator.named(device))
        found = combined(found, adapters, form)
        found.model.origin = path if (path / CONFIG).is_file() else base
        found.model.words = tokenizer_directory(path)
    home: OnMesh | InFiles
    if limits is None:
        home = OnMesh(found, world, dtype, device, leave, settings)
    else:
        home = InFiles(found, limits, dtype, device, world, leave, settings)
    return Model(home.model, home)


def opened(
    path: Path,
    mesh: Mesh,
    limits: Limits | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    weights: str | None = None,
) -> Model:
    """On one worker, or on those that torchrun has started, whom this one meets and in the end
    leaves."""
    if mesh.size == 1:
        return on_mesh(path, Lone(), dtype, device, None, limits, weights=weights)
    world = from_environment(mesh, os.environ, torch.device(device or "cpu").type)
    try:
        return on_mesh(path, world, dtype, device, world.close, limits, weights=weights)
    except BaseException:
        world.close()
        raise
