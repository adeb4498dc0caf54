"""What a request of generation will hold, found before it runs: its steps are played on tensors
without bytes, by the engine that plays them later, under the ledger that counts real ones.

A layer of each kind is played once; what a token draws from is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from outsize.collectives import Mesh, World, along
from outsize.collectives.pretend import PretendWorld
from outsize.decode.cache import CachedPast, StateCache, state_bytes
from outsize.decode.generate import Request
from outsize.decode.samplers import Sampler, Sampling, drawn
from outsize.memory.ledger import Ledger
from outsize.models.build import materialise, segments
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder, typed
from outsize.models.linear import Embedding
from outsize.parallel.tensor.decoder import split
from outsize.runtime.session import Session
from outsize.schedule import Kind
from outsize.torch_private import FakeTensorMode

LEAST_SLICE = 64  # prompt tokens fed at once: fewer would save little and read the weights often
OTHERWISE = 64  # bytes an element of a vocabulary, where a sampler of the user's own draws from it
SCALARS = 4096  # bytes: numbers of one element that the steps pass about
_LONE = Mesh()
_SPREAD = 1e4  # of logits that are drawn from: nearly all tokens are dropped, by top_p too

Fed = tuple[Tensor, tuple[int, ...], CachedPast | None]  # positions, bounds, what came before


@dataclass(frozen=True)
class Held:
    """What a worker holds of a model. dtypes: by parameter; mesh, rank: of all workers; here: by
    segment (prologue, blocks, epilogue) whether it is this worker's; stored: of the token embedding
    whose rows are read from files, its dtype there."""

    config: DecoderConfig
    dtypes: Mapping[str, torch.dtype]
    mesh: Mesh = _LONE
    rank: int = 0
    here: tuple[bool, ...] = ()
    stored: torch.dtype | None = None

    def has(self, segment: int) -> bool:
        return not self.here or self.here[segment]

    @property
    def last(self) -> bool:
        """Whether the head is this worker's."""
        return self.has(len(self.config.layers) + 1)

    def plays(self, stage: int, last: int) -> bool:
        """Whether a stage of a model with one layer of each kind is this worker's."""
        if stage in (0, last):
            return self.last if stage else self.has(0)
        return not self.config.rewired or self.has(stage)


@dataclass(frozen=True)
class Needs:
    """Bytes besides weights: the cache of what tokens leave, the work while a step runs and a token
    is drawn. slice: prompt tokens fed in one step besides the first."""

    cache: int
    work: int
    slice: int


def needs(held: Held, request: Request, length: int) -> Needs:
    """Where a prompt is fed `length` tokens at once after the first one."""
    first = min(len(request.ids), 1 + length)
    steps = {(0, first), (request.capacity - 1, 1)}
    if len(request.ids) > first:  # a later slice, after all the others
        steps.add((len(request.ids) - first, first))
    with _faked(held) as (fake, world, layers):
        cache = sum(
            times * state_bytes(block.mixer, fake.prologue.tokens.weight.dtype, request.capacity)
            for block, times in zip(typed(fake.blocks), layers, strict=True)
        )
        work = max(_step(held, fake, world, request.capacity, *step) for step in steps)
    if len(request.ids) > first and not held.last:  # what was handed on may not have gone yet
        work += first * held.config.hidden * fake.prologue.tokens.weight.dtype.itemsize
    if held.last and not held.mesh.index("tensor", held.rank):
        work = max(work, _drawing(held, request.sampler))
    return Needs(cache, work + SCALARS, length)


def resident(model: Decoder) -> Held:
    """Of a model that is in memory as a whole."""
    return Held(model.config, {name: x.dtype for name, x in model.named_parameters()})


def needs_of_rows(held: Held, rows: int, length: int) -> int:
    """Most bytes besides weights while rows of `length` tokens go through, to all their logits."""
    bounds = tuple(range(0, rows * length + 1, length))
    with _faked(held) as (fake, world, _):
        positions = partial(torch.arange, length)
        return SCALARS + _peak(
            held, fake, world, None, lambda: (positions().repeat(rows), bounds, None)
        )


@contextmanager
def _faked(held: Held) -> Iterator[tuple[Decoder, World, list[int]]]:
    """A model without bytes that has one of this worker's layers of each kind, and how often each
    comes; in a world that has the tensor axis alone."""
    config, kinds = held.config, dict[object, list[int]]()
    for index, facts in enumerate(config.layers):
        if held.has(index + 1) or config.rewired:  # what those are given differs
            kinds.setdefault(index if config.rewired else facts, []).append(index)
    few = replace(config, layers=tuple(config.layers[where[0]] for where in kinds.values()))
    names = {f"blocks.{new}.": f"blocks.{old[0]}." for new, old in enumerate(kinds.values())}
    world = PretendWorld(Mesh(tensor=held.mesh.tensor), held.mesh.index("tensor", held.rank))
    with FakeTensorMode():
        with torch.device("meta"):
            fake = Decoder(few)

        def fill(name: str, parameter: Tensor) -> Tensor:
            for new, old in names.items():
                if name.startswith(new):
                    name = old + name.removeprefix(new)
                    break
            return torch.empty(parameter.shape, dtype=held.dtypes[name], device="cpu")

        for segment, _ in segments(fake):
            materialise(fake, segment, fill)
        split(fake, along(world, "tensor"))
        if held.stored is not None:
            fake.prologue.tokens.lookup = partial(_read, held.stored)
        yield fake.requires_grad_(False), world, list(map(len, kinds.values()))


def _read(stored: torch.dtype, table: Embedding, ids_T: Tensor) -> Tensor:
    """Rows of a token embedding as they are read from files; ids_T has no numbers."""
    whole, index_T = table.weight, torch.zeros_like(ids_T)
    raw = torch.empty(min(len(ids_T), len(whole)), whole.shape[1], dtype=stored)
    return nn.functional.embedding(index_T, raw.to(whole.dtype))


def _step(held: Held, fake: Decoder, world: World, capacity: int, start: int, count: int) -> int:
    """Most bytes that a step of `count` tokens after `start` ones has, but for the cache."""
    cache = StateCache(1, capacity)

    def fed(first: int, tokens: int) -> Fed:
        cache.lengths[0] = first
        past = cache.extend([0], [tokens])
        return past.positions(), past.bounds, past

    _peak(held, fake, world, None, lambda: fed(0, 1))  # its buffers are there before
    return _peak(held, fake, world, cache, lambda: fed(start, count))


def _peak(
    held: Held, fake: Decoder, world: World, cache: StateCache | None, fed: Callable[[], Fed]
) -> int:
    """Most bytes that a step makes beside the model and the cache, over this worker's actions."""
    there = [] if cache is None else [x for each in cache.layers for x in cache.buffers(each)]
    with Ledger() as ledger, Session(fake) as session:
        for x in (*fake.parameters(), *there):
            ledger.see(x)
        before, peak = ledger.total, 0
        session.watch.ledger = ledger
        positions_T, bounds, past = fed()
        loaded = session.steps.begin(torch.zeros_like(positions_T), positions_T, bounds, past)
        session.engine.begin(loaded)
        for step in loaded.steps:
            if step.action.kind is not Kind.SAMPLE:
                event = session.engine.alone(step)
                if held.plays(step.action.stage, len(loaded.steps) - 2):
                    peak = max(peak, event.peak - before)
    return peak


def _drawing(held: Held, sampler: Sampler) -> int:
    """Bytes while a token is drawn, its logits included."""
    dtype = held.dtypes["prologue.tokens.weight"]
    if not isinstance(sampler, Sampling):  # who knows what it keeps
        return held.config.vocab * (OTHERWISE + dtype.itemsize)
    with Ledger() as ledger:
        drawn(torch.linspace(0, _SPREAD, held.config.vocab).to(dtype), sampler, 0, False)
    return ledger.peak
