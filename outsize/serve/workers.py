"""The workers of a generation: forked here and watched, or started by torchrun on many machines.

Each has its part of the model and takes the same steps; what is printed, the first one prints.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from outsize import accelerator
from outsize.checkpoint import hub
from outsize.checkpoint.shards import INDEX, SUMS
from outsize.checkpoint.whole import check_whole, taken_apart
from outsize.collectives import Mesh, parse_mesh
from outsize.collectives.joined import number
from outsize.errors import OutsizeError
from outsize.hardware.host import cores
from outsize.kernels import native
from outsize.launch import Mailbox, Speaker, enter, run_here, run_there
from outsize.launch.heartbeat import Heartbeat
from outsize.launch.hosts import started
from outsize.plan.settings import NONE, Settings
from outsize.serve.files import Limits
from outsize.serve.load import Adapters, on_mesh
from outsize.serve.meshed import check_mesh, check_settings
from outsize.serve.model import Model
from outsize.torch_private import warm_fake_tensors
from outsize.train.workers import count_of, sized

# Generates; whether it is the first, which prints; the pulse of this worker.
Go = Callable[[Model, bool, Heartbeat], None]


@dataclass(frozen=True)
class Asked:
    """What was asked of all workers alike. mesh, workers: as they were said. facts: whatever else
    must be the same. limits: of this worker's memory, where there are any; settings: of the
    plan; device: its kind, of which each worker has one to itself; adapters: that the weights take
    up."""

    mesh: str | None
    workers: int | None
    facts: Mapping[str, str]
    limits: Limits | None = None
    settings: Settings = NONE
    device: str = "cpu"
    adapters: Adapters = ()

    def check(self) -> None:
        """OutsizeError for settings that do nothing on the mesh."""
        count = number(os.environ, "WORLD_SIZE") if started(os.environ) else None
        check_settings(self.settings, self.mesh_of(count))

    def mesh_of(self, count: int | None = None) -> Mesh:
        """All workers on the pipeline axis where the mesh is left out. count: that have started."""
        if self.workers is not None and self.workers < 1:
            raise OutsizeError(f"workers is {self.workers}; expected 1 or more")
        count = count_of(self.workers, count)
        if self.mesh is None:
            return Mesh(pipeline=count or 1)
        return sized(parse_mesh(self.mesh), count)


def several(asked: Asked) -> bool:
    """Whether there is more than one worker, started already or to be started."""
    if started(os.environ):
        return number(os.environ, "WORLD_SIZE") > 1
    return asked.mesh_of().size > 1


def _first(mesh: Mesh) -> Speaker:
    return Speaker()


def run_workers(
    asked: Asked, find: Callable[[], Path], go: Go, speaker: Callable[[Mesh], Speaker] = _first
) -> int:
    """Have go(model, first) on every worker; gives the exit code, as `outsize.launch.run_here`.

    find: the model's directory, asked of the first worker alone; speaker: of a mesh. OutsizeError
    for a mesh that the model does not fit on; of workers that torchrun has started the launcher
    says what is wrong.
    """
    if started(os.environ):
        there = speaker(asked.mesh_of(number(os.environ, "WORLD_SIZE")))
        run_there(lambda post: _work(asked, find, go, post), os.environ, there)
    directory = find()
    mesh = asked.mesh_of()
    if asked.limits is not None:
        check_whole(directory)
    check_mesh(hub.read_config(taken_apart(directory)[0]), mesh)
    native.library()  # compiled once for all of them, if need be
    warm_fake_tensors()  # imported once
    here = speaker(mesh)
    return run_here(mesh.size, lambda post: _work(asked, lambda: directory, go, post), here)


def _work(asked: Asked, find: Callable[[], Path], go: Go, post: Mailbox) -> int:
    """One worker's whole life. Nothing is to be saved: Ctrl-C ends it wherever it is, where
    Python's own handler may raise in the midst of waiting for others, and be lost there."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    mesh = asked.mesh_of(post.count)
    kind = accelerator.take(asked.device, post.here, post.near)
    facts = {
        "torch": torch.__version__,
        "device": kind,
        "adapters": repr(asked.adapters),
        **asked.facts,
    }
    worker_group = enter(post, mesh, facts, kind)
    worker_group.pulse.at("reading the weights")
    directory = Path(worker_group.told("model", lambda: str(find().resolve())))
    worker_group.same("weights", _fingerprint(taken_apart(directory)[0]))
    _share_cores(mesh, post.near)
    world, settings = worker_group.world, asked.settings
    place = accelerator.find(kind)
    with on_mesh(
        directory, world, device=place, limits=asked.limits, settings=settings,
        adapters=asked.adapters,
    ) as model:  # fmt: skip
        worker_group.pulse.at("generating")
        try:
            go(model, worker_group.first, worker_group.pulse)
        except BrokenPipeError:  # as of `... | head`, where click would say nothing in one process
            raise OutsizeError("standard output was closed before the text had ended") from None
    return 0


def _share_cores(mesh: Mesh, near: int) -> None:
    """Neighbours on the tensor axis compute at the same time; stages take turns."""
    if mesh.tensor > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores() // min(near, mesh.tensor)))


def _fingerprint(directory: Path) -> dict[str, str]:
    """What tells a model's files from others without reading weights."""
    names = (hub.CONFIG, INDEX, SUMS)
    files = (directory / name for name in names)
    return {
        path.name: hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
        for path in files
        if path.is_file()
    }
