"""A model that generates on the workers of a mesh: each reads its own part of the files.

The pipeline axis has runs of segments (prologue, blocks, epilogue), cut so that the worker with
most bytes has least of them; the tensor axis shares every one of them. Keys and values lie where
the blocks are. Every other parameter has its shape and no memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from outsize.checkpoint.hub import WEIGHT_DTYPES, Described, check_tied_head, describe
from outsize.collectives import Lone, Mesh, World, along, from_environment
from outsize.collectives.joined import Backend
from outsize.errors import OutsizeError, counted
from outsize.memory.sizes import format_bytes
from outsize.models.build import build, materialise, rest, segments
from outsize.models.config import DecoderConfig
from outsize.models.cuts import Cut
from outsize.models.decoder import Decoder
from outsize.parallel.tensor.decoder import split
from outsize.parallel.tensor.rewired import check_ways
from outsize.parallel.tensor.units import check, cuts_of
from outsize.runtime.spread_tokens import SpreadTokens
from outsize.schedule.place import looped, one_way
from outsize.search.partition import Cost, partition

TOKENS = "prologue.tokens.weight"


class Meshed:
    """The model in a Hugging Face directory, of which this worker of `world` holds a part. All
    workers make one, and ask it for the same texts in the same order.

    dtype None keeps that of the files. Peak memory is the part and two stored tensors. Use it in a
    `with`, or close it. OutsizeError as of `load`, and for a mesh that the model does not fit on.
    """

    def __init__(
        self,
        path: Path,
        world: World,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if dtype not in (None, *WEIGHT_DTYPES):
            known = ", ".join(map(str, WEIGHT_DTYPES))
            raise OutsizeError(f"dtype = {dtype!r}, expected None or one of {known}")
        found = describe(path)
        check_mesh(found.model.config, world.mesh)
        dtypes = _dtypes(found, dtype)
        self.mesh = world.mesh
        self.bytes = sum(segment_bytes(found.model, dtypes, Mesh()))
        self.sizes = segment_bytes(found.model, dtypes, self.mesh)
        self.turns = turns_of(self.sizes, self.mesh.pipeline)
        self.decoder = _shells(found, dtypes, torch.device(device or "cpu"))
        cuts = split(self.decoder, along(world, "tensor"))
        here = world.mesh.index("pipeline", world.rank)
        held = _held(found.model, [turn == here for turn in self.turns])
        _read(self.decoder, found, held, cuts, dtype)
        self.spread = SpreadTokens(self.decoder, world, self.turns)
        self._stack = ExitStack()
        self._stack.enter_context(self.spread)

    @classmethod
    def joined(
        cls,
        path: Path,
        mesh: Mesh,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Meshed:
        """On the workers that torchrun has started, whom this one meets and in the end leaves."""
        if mesh.size == 1:
            return cls(path, Lone(), dtype, device)
        backend: Backend = "nccl" if torch.device(device or "cpu").type == "cuda" else "gloo"
        world = from_environment(mesh, os.environ, backend)
        try:
            made = cls(path, world, dtype, device)
        except BaseException:
            world.close()
            raise
        made._stack.callback(world.close)
        return made

    @property
    def config(self) -> DecoderConfig:
        return self.decoder.config

    @property
    def origin(self) -> Path | None:
        return self.decoder.origin

    def __str__(self) -> str:
        held = [0] * self.mesh.pipeline
        for size, turn in zip(self.sizes, self.turns, strict=True):
            held[turn] += size
        each = " of each stage" if len(held) > 1 else ""
        return (
            f"weights {format_bytes(self.bytes)} on {self.mesh}; a worker{each} holds"
            f" {', '.join(map(format_bytes, held))}"
        )

    def close(self) -> None:
        """Leave the other workers, once everything has gone to them."""
        self._stack.close()

    def __enter__(self) -> Meshed:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, value, trace)


def check_mesh(config: DecoderConfig, mesh: Mesh) -> None:
    """OutsizeError for a mesh that cannot generate with a model, with the nearest that can."""
    for axis in (axis.name for axis in mesh.axes if axis.batch):
        raise OutsizeError(
            f"mesh: {axis} is {mesh[axis]}, but a prompt has nothing to split over that axis;"
            f" expected pipeline and tensor, for instance pipeline={mesh[axis]}"
        )
    most = len(config.layers) + 2
    if mesh.pipeline > most:
        raise OutsizeError(
            f"mesh: pipeline is {mesh.pipeline}, but the model has {most} segments (prologue,"
            f" {counted(most - 2, 'block')}, epilogue) and a worker needs one at least; the"
            " nearest that works"
            f" is pipeline={most}"
        )
    check(config, mesh.tensor)
    check_ways(config.ways, mesh.tensor, sequence_parallel=False)


def segment_bytes(model: Decoder, dtypes: Mapping[str, torch.dtype], mesh: Mesh) -> list[int]:
    """Bytes of each segment's weights on the first worker of the tensor axis. Of a pipeline both
    ends have the table of a tied head."""
    cuts = cuts_of(model, mesh.tensor, 0, sequence_parallel=False)
    sizes = {name: prod(cut.local) * dtypes[name].itemsize for name, cut in cuts.items()}
    found = [sum(sizes[name] for name in names) for _, names in segments(model)]
    if model.config.tied and mesh.pipeline > 1:
        found[-1] += sizes[TOKENS]
    return found


def turns_of(sizes: Sequence[int], workers: int) -> list[int]:
    """By segment, which of the workers of a pipeline has it: that with most bytes has least."""
    costs = [Cost(float(size)) for size in sizes]
    cuts = partition(costs, one_way(workers, looped(workers, 1), 1))
    return [sum(cut <= segment for cut in cuts) for segment in range(len(sizes))]


def _dtypes(found: Described, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """What each parameter rests in."""
    return {
        name: rest(name, dtype or found.entry(entry.theirs[0])[1].dtype)
        for entry in found.stored
        for name in entry.ours
    }


def _shells(found: Described, dtypes: Mapping[str, torch.dtype], device: torch.device) -> Decoder:
    """A decoder whose parameters have one element of memory each, not a number: who computes with
    what is not here sees it."""
    model = build(found.model.config)
    model.origin = found.model.origin

    def shell(name: str, x: Tensor) -> Tensor:
        return torch.full((), float("nan"), dtype=dtypes[name], device=device).expand(x.shape)

    for segment, _ in segments(model):
        materialise(model, segment, shell)
    return model.requires_grad_(False)


def _held(model: Decoder, here: Sequence[bool]) -> set[str]:
    """Names of the parameters that the segments of this worker compute with."""
    table = segments(model)
    names = {name for mine, (_, ns) in zip(here, table, strict=True) if mine for name in ns}
    return names | ({TOKENS} if here[-1] and model.config.tied else set())


def _read(
    model: Decoder,
    found: Described,
    held: set[str],
    cuts: Mapping[str, Cut],
    dtype: torch.dtype | None,
) -> None:
    """Read what this worker has: of each parameter its part alone stays."""
    wholes = dict(found.model.named_parameters())
    device = next(model.parameters()).device
    read = found.fill(dtype, device)

    def fill(name: str, part: Tensor) -> Tensor:
        if name not in held:
            return part.detach()
        whole = read(name, wholes[name])
        if name == TOKENS:
            check_tied_head(found.shards, found.model.config, lambda: whole)
        cut = cuts[name]
        if cut.dim is None:
            return whole
        return cut.of(whole).clone(memory_format=torch.contiguous_format)

    for segment, names in segments(model):
        if not held.isdisjoint(names):
            materialise(model, segment, fill)
