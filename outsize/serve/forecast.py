"""What `outsize generate` would hold and take, while no weight is read: `outsize plan` asks.

Bytes are those that a request is served with (meshed.py, files.py). Seconds are those of a few
stages with random weights and, where weights stay in files, of reading as many.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date

import torch
from torch import Tensor

from outsize.checkpoint.adapters import model_directory
from outsize.checkpoint.hub import Described, describe, read_config, supposed
from outsize.checkpoint.whole import check_whole
from outsize.collectives import Mesh, along
from outsize.collectives.pretend import PretendWorld
from outsize.decode.generate import PREFILL_TOKENS, Request, check_request
from outsize.hardware.disk import disk_rates
from outsize.memory.stored import StoredFiles, operations
from outsize.models.build import build, materialise, segments
from outsize.models.coding import asked
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder
from outsize.models.families import parse
from outsize.models.names import layout
from outsize.models.presets import SHAPES
from outsize.parallel.tensor.decoder import split
from outsize.parallel.tensor.units import cuts_of
from outsize.runtime.tokens.cycle import Layout, layout_of
from outsize.runtime.tokens.parts import Mine
from outsize.runtime.tokens.source import Outline, outline
from outsize.serve.budget import Budget, over_stages
from outsize.serve.meshed import Division
from outsize.serve.shells import held, shells
from outsize.simulate.tokens import Pace, Seconds, Share, needs, pace, probed, seconds, timed


@dataclass(frozen=True)
class TokenForecast:
    """shares: bytes by stage of the pipeline, on the first worker of a tensor axis, who draws;
    read: bytes of files in every step, of the worker that reads most."""

    shares: Sequence[Share]
    seconds: Seconds
    read: int = 0

    @property
    def held(self) -> dict[str, list[int]]:
        """Bytes of each kind, by stage."""
        return {
            "weights": [share.weights for share in self.shares],
            "buffers": [share.buffers for share in self.shares],
            "cache": [share.needs.cache for share in self.shares],
            "work": [share.needs.work for share in self.shares],
            "peak": [share.peak for share in self.shares],
        }


def described(name: str, weights: str | None = None) -> Described:
    """The model of a directory, or of a preset: one without weights as if it had been saved.
    weights: what they are held as (outsize/models/coding.py). OutsizeError for what is neither, and
    for an adapter."""
    if SHAPES.find(name) is not None:
        return _supposed(parse({**SHAPES.get(name)}), weights)
    directory = model_directory(name)
    check_whole(directory)
    if any(directory.glob("model*.safetensors*")):
        return describe(directory, asked(read_config(directory), weights, "--weights"))
    return _supposed(read_config(directory), weights)


def _supposed(config: DecoderConfig, weights: str | None) -> Described:
    """Files in the model's own numbers, and what is made of them."""
    coded, found = asked(config, weights, "--weights"), supposed(config)
    if coded.coding is config.coding:
        return found
    return replace(found, model=build(coded), stored=layout(coded))


@dataclass(frozen=True)
class Spread:
    """A described model on the workers of a mesh, while none of its weights is there."""

    found: Described
    dtypes: Mapping[str, torch.dtype]
    division: Division

    @classmethod
    def of(cls, found: Described, mesh: Mesh, dtype: torch.dtype | None = None) -> Spread:
        """dtype: None: that of the files. OutsizeError for a mesh that the model does not fit
        on."""
        dtypes = found.dtypes(dtype)
        return cls(found, dtypes, Division.of(found.model, dtypes, mesh))

    @property
    def mesh(self) -> Mesh:
        return self.division.held[0].mesh

    def in_memory(self, request: Request, length: int) -> Seconds:
        """Of workers that have their weights in memory. length: of slices of the prompt."""
        stages = [self.division.stages(turn) for turn in range(self.mesh.pipeline)]
        one, some = self._computing(stages, probed(request, length))
        return seconds(request, length, one, some, slowest=self.division.slowest)

    def budgets(
        self, memory: int, dtype: torch.dtype | None = None
    ) -> list[tuple[Outline, Budget]]:
        """By stage of the pipeline, what is read and what of it may stay in so many bytes."""
        cuts = cuts_of(self.found.model, self.mesh.tensor, 0, sequence_parallel=False)
        made = []
        for one in self.division.held:
            known = outline(self.found, dtype, Mine(cuts, one.here))
            made.append((known, Budget(memory, replace(one, stored=known.table.dtype), known)))
        return made

    def from_files(
        self, turn: int, known: Outline, lies: Layout, request: Request, length: int
    ) -> Seconds:
        """Of a stage of the pipeline whose weights lie so; all workers read from one disk."""
        part = self.division.weights[turn] / sum(self.division.weights)
        one, some = self._computing([lies.filled], probed(request, length))
        rate = read_rate(known, timed(self.found.model, lies.filled)) / self.mesh.size
        return seconds(request, length, one * part, some * part, lies.read / rate)

    def _computing(self, stages: Sequence[Collection[int]], tokens: int) -> list[float]:
        """Seconds of one token and of so many. stages: by worker of the pipeline, those it has."""
        model = shells(self.found, self.dtypes, torch.device("cpu"))
        split(model, along(PretendWorld(Mesh(tensor=self.mesh.tensor)), "tensor"))
        spent, weights = [0.0, 0.0], 0
        for here in stages:
            give(model, timed(model, here), _random)
            for index, count in enumerate((1, tokens)):
                one = pace(model, here, count)
                spent[index] += one.seconds
            weights += one.bytes
            give(model, timed(model, here), _shell)
        return [Pace(each, weights).whole(model) for each in spent]


def forecast(
    found: Described, request: Request, mesh: Mesh, memory: int | None = None
) -> TokenForecast:
    """Of generating with a model on a mesh, each worker within `memory` bytes where they are given;
    but for what sums over a tensor axis take. Workers within memory are taken to read from one
    disk. OutsizeError as of `outsize generate`."""
    check_request(found.model, request.ids, request.max_new_tokens)
    spread = Spread.of(found, mesh)
    if memory is not None:
        return _from_files(spread, request, memory)
    shares = [spread.division.share(request, turn) for turn in range(mesh.pipeline)]
    return TokenForecast(shares, spread.in_memory(request, PREFILL_TOKENS))


def _from_files(spread: Spread, request: Request, memory: int) -> TokenForecast:
    budgets = spread.budgets(memory)
    rooms = [budget.room(request) for _, budget in budgets]
    if (worst := max(rooms, key=lambda room: room.missing)).missing:
        raise worst.refusal(request.capacity)
    length = min(room.slice for room in rooms)
    shares, spent, most = list[Share](), list[Seconds](), 0
    for turn, (known, budget) in enumerate(budgets):
        asked = needs(budget.held, request, length)
        lies = layout_of(known, budget.pool(asked))
        shares.append(budget.share(lies, asked))
        spent.append(spread.from_files(turn, known, lies, request, length))
        most = max(most, lies.read)
    steps = -(-len(request.ids) // (1 + length))
    return TokenForecast(shares, over_stages(spent, steps), most)


def give(model: Decoder, stages: Collection[int], value: Callable[[Tensor], Tensor]) -> None:
    """Give the parameters that some stages compute with other values."""
    names = held(model, [stage in stages for stage in range(len(model.blocks) + 2)])

    def fill(name: str, x: Tensor) -> Tensor:
        return value(x) if name in names else x.detach()

    for segment, inside in segments(model):
        if not names.isdisjoint(inside):
            materialise(model, segment, fill)


def _random(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype).uniform_(-0.02, 0.02)


def _shell(x: Tensor) -> Tensor:
    return x.new_zeros(()).expand(x.shape)


def read_rate(known: Outline, stages: Collection[int]) -> float:
    """Bytes a second of reading some stages; of this folder's disk, where none lies in a file as
    it is used."""
    copies = [[c for part in known.stages[s].parts for c in part.copies] for s in stages]
    paths = {copy.path for each in copies for copy in each}
    if not paths or not all(path.is_file() for path in paths):
        return disk_rates(".", date.today().isoformat())[0].value
    files, spent = StoredFiles(paths, known.buffers), 0.0
    try:
        for stage, each in zip(stages, copies, strict=True):
            room = torch.empty(known.stages[stage].bytes, dtype=torch.uint8)
            begin = time.perf_counter()
            files.read(operations(each, known.buffers.bytes), room)
            spent += time.perf_counter() - begin
        return files.bytes_read / spent
    finally:
        files.close()
