"""What requests of generation hold, predicted and counted, in this process or one of a crew."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

from outsize.collectives import Mesh, World
from outsize.decode.samplers import Sampling
from outsize.memory.ledger import Ledger
from outsize.plan.settings import NONE
from outsize.serve import meshed
from outsize.serve.load import on_mesh
from outsize.serve.model import Model
from outsize.serve.prompts import Weighed

DRAWN = Sampling(0.9, 20, 0.9, seed=3)


def counted(model: Model, prompt: int, sampling: Sampling) -> tuple[int, int]:
    """Bytes predicted, and counted."""
    predicted = model.peak(prompt, 6, sampling)
    with Ledger() as ledger:
        for parameter in model.parameters():
            ledger.see(parameter)
        model.generate([7 * i % 61 for i in range(prompt)], 6, sampling)
    return predicted, ledger.peak + (0 if model.home is None else model.home.buffers)


def counted_on_mesh(world: World, path: Path) -> list[tuple[int, int]]:
    """Of a short and of a long prompt, on one of the workers of a mesh."""
    with on_mesh(path, world, settings=NONE.having({"overlap": 0})) as model:
        return [counted(model, prompt, DRAWN) for prompt in (3, 200)]


def counted_in_halves(world: World, path: Path) -> tuple[int, int]:
    """Of a prompt in halves, whatever the machine's clocks say."""
    with (
        mock.patch.object(meshed, "weighed", lambda way, *_: Weighed(2.0, 1.0, way.meaning)),
        on_mesh(path, world) as model,
    ):
        found = counted(model, 400, DRAWN)
        assert "halves" in str(model.home) or world.mesh.tensor == 1 or model.config.rewired
        return found


def mesh_of(world: World) -> Mesh:
    return world.mesh
