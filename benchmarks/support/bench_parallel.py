"""The layouts that are contested, and how both sides of a contest are told and started."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from support.contender_parallel import Task
from support.figures_parallel import Bout, Side
from support.job_data import write_rows, write_weights
from support.volume_parallel import volume
from support.worlds_parallel import Spot, World, in_turns

from outsize.models.families import parse
from outsize.models.presets import PRESETS

OURS = "support.ours_parallel"


@dataclass(frozen=True)
class Contest:
    """A layout and who else has it. shards: whether parameters, gradients and optimizer states are
    cut over the data axis."""

    title: str
    module: str
    data: int = 1
    tensor: int = 1
    sequence_parallel: bool = False
    shards: tuple[bool, bool, bool] = (False, False, False)

    @property
    def size(self) -> int:
        return self.data * self.tensor


ALL = (True, True, True)
CONTESTS = {
    "data": Contest("DDP", "peers.ddp", 2),
    "fully-sharded": Contest("FSDP2", "peers.sharded", 2, shards=ALL),
    "tensor": Contest("DTensor", "peers.sharded", tensor=2),
    "tensor-sequence": Contest("DTensor, sequence", "peers.sharded", 1, 2, True),
    "sharded-tensor": Contest("FSDP2 x DTensor", "peers.sharded", 2, 2, True, ALL),
    "zero-1": Contest("DeepSpeed 1", "peers.zero", 2, shards=(False, False, True)),
    "zero-2": Contest("DeepSpeed 2", "peers.zero", 2, shards=(False, True, True)),
    "zero-3": Contest("DeepSpeed 3", "peers.zero", 2, shards=ALL),
}


@dataclass(frozen=True)
class Bench:
    """One run of this program. steps: of each contender, of which `warm` do not count."""

    preset: str
    rows: int
    sequence: int
    steps: int
    warm: int
    zero_python: str
    cache: Path
    folder: Path

    def prepare(self) -> None:
        """The weights, as both sides read them, and the rows."""
        config = parse(PRESETS[self.preset])
        write_rows(
            self.folder / "rows.npy", self.cache, self.steps, self.rows, self.sequence, config.vocab
        )
        write_weights(self.folder / "weights", config)
        torch.save(self.parameters(), self.folder / "state.pt")

    def parameters(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "weights" / "model.safetensors")

    def task(self, contest: Contest, host: tuple[str, ...] = ()) -> Task:
        data, cut = contest.data, contest.shards
        return Task(
            weights=str(self.folder / "weights"),
            state=str(self.folder / "state.pt"),
            config=dict(PRESETS[self.preset]),
            rows=str(self.folder / "rows.npy"),
            threads=1,
            lr=3e-4,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.1,
            clip=1.0,
            data=data,
            tensor=contest.tensor,
            sequence_parallel=contest.sequence_parallel,
            shards=(data if cut[0] else 1, data if cut[1] else 1, data if cut[2] else 1),
            host=host,
        )

    def world(self, module: str, task: Task, spot: Spot) -> World:
        path = self.folder / f"{module}.json"
        path.write_text(json.dumps(asdict(task)), encoding="utf-8")
        python = self.zero_python if module == "peers.zero" else sys.executable
        return World(module, path, spot, python)

    @contextmanager
    def ready(self, modules: tuple[str, ...], task: Task, spot: Spot) -> Iterator[list[World]]:
        """The worlds, ready for their first step. DeepSpeed's workers wait for one another for ever
        at one start in some ten; whoever is not there in time gets a second chance."""
        with ExitStack() as stack:
            for chance in (1, 2):
                worlds = stack.enter_context(started(self, modules, task, spot))
                try:
                    for world in worlds:
                        world.ready()
                    break
                except SystemExit as error:
                    print(f"start {chance} failed: {error}", flush=True)
                    stack.close()
                    if chance == 2:
                        raise
            yield worlds

    def bout(
        self, name: str, contest: Contest, modules: tuple[str, ...], spot: Spot, task: Task
    ) -> Bout:
        """A contest. modules: the peer's, and ours if it takes part."""
        with self.ready(modules, task, spot) as worlds:
            in_turns(worlds, self.steps)
            sides = [Side(w.seconds[self.warm :], w.losses, w.end()) for w in worlds]
        bytes_of = volume(task, self.parameters(), self.rows, self.sequence)
        ours = sides[1] if len(sides) > 1 else None
        return Bout(name, contest.title, contest.size, sides[0], ours, bytes_of)


@contextmanager
def started(
    bench: Bench, modules: tuple[str, ...], task: Task, spot: Spot
) -> Iterator[list[World]]:
    """The worlds, which are gone afterwards whatever happens."""
    worlds: list[World] = []
    try:
        for module in modules:
            worlds.append(bench.world(module, task, spot))
        yield worlds
    finally:
        for world in worlds:
            world.stop()
