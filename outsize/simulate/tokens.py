"""What a request of generation will hold, found before it runs: its steps are played on tensors
without bytes, by the engine that plays them later, under the ledger that counts real ones.

A layer of each kind is played once; what a token draws from is drawn. Seconds are found by taking
a token, and some of a prompt, through a few stages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from operator import sub
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from outsize import accelerator
from outsize.collectives import Mesh, along
from outsize.decode.generate import Request
from outsize.decode.paged import PAGE, PagedCache, PagedPast, Part, pages_of, state_bytes
from outsize.decode.samplers import Sampler, Sampling, drawn
from outsize.kernels import rows
from outsize.memory.ledger import Ledger, in_grains
from outsize.models.build import materialise, segments
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder, typed
from outsize.models.linear import Embedding
from outsize.plan.settings import NONE, Settings
from outsize.runtime.session import Session
from outsize.schedule import Kind
from outsize.simulate.kept import kept

if TYPE_CHECKING:
    from outsize.parallel.tensor.beside import Prompts

LEAST_SLICE = 64  # prompt tokens fed at once: fewer would save little and read the weights often
OTHERWISE = 64  # bytes an element of a vocabulary, where a sampler of the user's own draws from it
SCALARS = 4096  # bytes: numbers of one element that the steps pass about
TIMED = 4  # stages whose computation is timed
HOST = torch.device("cpu")
_LONE = Mesh()
_SPREAD = 1e4  # of logits that are drawn from: nearly all tokens are dropped, by top_p too

Fed = tuple[Tensor, tuple[int, ...], PagedPast | None]  # positions, bounds, what came before


@dataclass(frozen=True, eq=False)
class Held:
    """What a worker holds of a model; equal to itself alone. dtypes: by parameter; mesh, rank: of
    all workers; here: by segment (prologue, blocks, epilogue) whether it is this worker's; stored:
    of the token embedding whose rows are read from files, its dtype there. device: where they
    are. settings: of the plan; beside: the sums of prompts are taken beside what is computed where
    they can be."""

    config: DecoderConfig
    dtypes: Mapping[str, torch.dtype]
    mesh: Mesh = _LONE
    rank: int = 0
    here: tuple[bool, ...] = ()
    stored: torch.dtype | None = None
    device: torch.device = HOST
    settings: Settings = NONE
    beside: bool = False

    @cached_property
    def grain(self) -> int:
        """Bytes of which the device gives whole multiples."""
        return accelerator.grain(self.device)

    def ledger(self) -> Ledger:
        """Counts what is there."""
        return Ledger(device=self.device.type, grain=self.grain)

    def has(self, segment: int) -> bool:
        return not self.here or self.here[segment]

    @property
    def handed(self) -> float:
        """Features of a token that this worker's last stage hands on."""
        most, wiring = max(s for s, here in enumerate(self.here) if here), self.config.wiring
        wide = 1.0 if wiring is None or not most else wiring.width(most - 1, self.mesh.tensor)
        return wide * self.config.hidden

    @property
    def last(self) -> bool:
        """Whether the head is this worker's."""
        return self.has(len(self.config.layers) + 1)

    def plays(self, stage: int, last: int) -> bool:
        """Whether a stage of a model with one layer of each kind is this worker's."""
        if stage in (0, last):
            return self.last if stage else self.has(0)
        return not (self.config.rewired or self.config.sided) or self.has(stage)


@dataclass(frozen=True)
class Needs:
    """Bytes besides weights: the cache of what tokens leave, the work while a step runs and a token
    is drawn. slice: prompt tokens fed in one step besides the first."""

    cache: int
    work: int
    slice: int


@dataclass(frozen=True)
class Share:
    """Bytes on one worker's device. weights: of those that are there, or of the pool that they pass
    through; buffers: to read files through."""

    weights: int
    needs: Needs
    buffers: int = 0

    @property
    def peak(self) -> int:
        """Of all tensors, at most."""
        return self.weights + self.buffers + self.needs.cache + self.needs.work


def needs(held: Held, request: Request, length: int) -> Needs:
    """Where a prompt is fed `length` tokens at once after the first one. Found once for requests as
    long as one another."""
    sampler = request.sampler if isinstance(request.sampler, Sampling) else _unknown
    alike = Request((0,) * len(request.ids), request.max_new_tokens, sampler)
    return _known(held, alike, length)


def _unknown(logits_V: Tensor, index: int) -> int:
    """Stands for any sampler of the user's own."""
    raise AssertionError("nothing is drawn")


@lru_cache(maxsize=16)
def _known(held: Held, request: Request, length: int) -> Needs:
    about = len(request.ids), request.max_new_tokens, request.sampler
    key = held, held.grain, *about, length
    return kept(Needs, key, partial(_needs, held, request, length))


def _needs(held: Held, request: Request, length: int) -> Needs:
    first = min(len(request.ids), 1 + length)
    steps = {(0, first), (request.capacity - 1, 1)}
    if len(request.ids) > first:  # a later slice, after all the others
        steps.add((len(request.ids) - first, first))
    with _faked(held) as (fake, way, layers):
        dtype = fake.prologue.tokens.weight.dtype
        sizes = {
            index: state_bytes(block.mixer, dtype, request.capacity, held.grain)
            for block, here in zip(typed(fake.blocks), layers, strict=True)
            for index in here
        }
        cache = sum(sizes.values())
        behind = [sum(s for i, s in sizes.items() if i > max(here, default=-1)) for here in layers]
        work = 0
        for start, count in steps:
            peaks = _step(held, fake, way, request.capacity, start, count)
            if start == 0:  # while a layer runs first, those behind it have kept nothing yet
                peaks = list(map(sub, peaks, (cache, *behind, 0)))
            work = max(work, *peaks)
    if len(request.ids) > first and not held.last:  # what was handed on may not have gone yet
        work += int(first * held.handed * dtype.itemsize)
    if held.last and not held.mesh.index("tensor", held.rank):
        work = max(work, _drawing(held, request.sampler))
    return Needs(cache, work + SCALARS, length)


class Pace(NamedTuple):
    """seconds: that tokens took through some stages; bytes: of their weights."""

    seconds: float
    bytes: int

    def whole(self, model: Decoder, here: Collection[int] | None = None) -> float:
        """Seconds through all stages, or those `here`; 0 where there was none to time."""
        stages = range(len(model.blocks) + 2) if here is None else here
        whole = sum(_weights(model, stage) for stage in stages if stage)
        return whole * self.seconds / self.bytes if self.bytes else 0.0


class Seconds(NamedTuple):
    """Of one token, and of the prompt before the first."""

    token: float
    prompt: float


def probed(request: Request, length: int) -> int:
    """Tokens of a prompt, fed as in `needs`, that are timed for all of it."""
    return min(len(request.ids), 1 + length, LEAST_SLICE)


def seconds(
    request: Request,
    length: int,
    token: float,
    some: float,
    reading: float = 0.0,
    slowest: float = 1.0,
) -> Seconds:
    """Where a token, and `probed` tokens of the prompt, take so long through all stages. reading:
    seconds of the files in every step; slowest: the part of a step that the worker has that keeps
    the others of a pipeline waiting."""
    count = len(request.ids)
    steps = -(-count // (1 + length))
    step = max(reading, some * count / probed(request, length) / steps)
    return Seconds(max(reading, token), step * (1 + (steps - 1) * slowest))


def timed(model: Decoder, here: Collection[int]) -> list[int]:
    """Which of the stages `here` are timed for all."""
    # The first block's input is as wide as hidden states however the others are wired.
    taken = {1} if model.config.rewired else set(range(1, len(model.blocks) + 2))
    return sorted(taken & set(here))[:TIMED]


@torch.no_grad()
@rows.alone()
def pace(model: Decoder, here: Collection[int], tokens: int = 1) -> Pace:
    """Of a few of the stages `here`, whose weights are. The workers of a tensor axis all ask."""
    x_TD = model.prologue.tokens.weight.new_zeros(tokens, model.config.hidden)
    context = model.context(torch.arange(tokens, device=x_TD.device), (0, tokens))
    last, stages = len(model.blocks) + 1, timed(model, here)

    def run(stage: int) -> float:
        begin = time.perf_counter()
        if stage < last:
            model.blocks[stage - 1](x_TD, context)
        else:
            model.epilogue.logits(model.epilogue(x_TD, context)[-1:])
        accelerator.settle(x_TD.device)
        return time.perf_counter() - begin

    spent = sum(min(run(stage), run(stage)) for stage in stages)
    return Pace(spent, sum(_weights(model, stage) for stage in stages))


def _weights(model: Decoder, stage: int) -> int:
    """Bytes of a stage behind the prologue, in memory or not."""
    part = [*model.blocks, model.epilogue][stage - 1]
    return sum(x.nbytes for x in part.parameters())


def resident(model: Decoder) -> Held:
    """Of a model that is in memory as a whole."""
    dtypes = {name: x.dtype for name, x in model.named_parameters()}
    return Held(model.config, dtypes, device=model.prologue.tokens.weight.device)


def needs_of_rows(held: Held, count: int, length: int) -> int:
    """Most bytes besides weights while `count` rows of `length` tokens go through, to all their
    logits."""
    key = held, held.grain, count, length
    return kept(int, key, partial(_needs_of_rows, held, count, length))


def _needs_of_rows(held: Held, count: int, length: int) -> int:
    bounds = tuple(range(0, count * length + 1, length))
    with _faked(held) as (fake, _, _):
        positions = partial(torch.arange, length, device=held.device)
        peaks = partial(_peaks, held, fake, None, None)
        return SCALARS + max(peaks(lambda: (positions().repeat(count), bounds, None)))


@contextmanager
def _faked(held: Held) -> Iterator[tuple[Decoder, Prompts | None, list[list[int]]]]:
    """A model without bytes that has one of this worker's layers of each kind, how its prompts take
    their sums, if not at once, and which layers of each kind are here; in a world that has the
    tensor axis alone."""
    from outsize.collectives.pretend import PretendWorld
    from outsize.parallel.tensor.beside import beside_of, prompts_of
    from outsize.parallel.tensor.decoder import split
    from outsize.simulate.fake import FakeMode

    config, kinds = held.config, dict[object, list[int]]()
    every = bool(config.rewired) or config.sided
    mine = [i for i in range(len(config.layers)) if held.has(i + 1) or every]
    for index in mine:
        sort: object = config.layers[index]
        if every:  # what they are given differs
            sort = index
        elif held.beside:  # of the first one what it is given stays
            sort = (sort, index == mine[0])
        kinds.setdefault(sort, []).append(index)
    few = replace(config, layers=tuple(config.layers[where[0]] for where in kinds.values()))
    names = {f"blocks.{new}.": f"blocks.{old[0]}." for new, old in enumerate(kinds.values())}
    world = PretendWorld(Mesh(tensor=held.mesh.tensor), held.mesh.index("tensor", held.rank))
    with FakeMode():
        with torch.device("meta"):
            fake = Decoder(few)

        def fill(name: str, parameter: Tensor) -> Tensor:
            for new, old in names.items():
                if name.startswith(new):
                    name = old + name.removeprefix(new)
                    break
            return torch.empty(parameter.shape, dtype=held.dtypes[name], device=held.device)

        for segment, _ in segments(fake):
            materialise(fake, segment, fill)
        way = prompts_of(world, config, held.settings) if held.beside else None
        beside = beside_of(world, held.settings) or way
        split(fake, along(world, "tensor"), beside=beside)
        if held.stored is not None:
            tokens = fake.prologue.tokens
            tokens.lookup, tokens.on_host = partial(_read, held.stored), True
        here = [[index for index in where if held.has(index + 1)] for where in kinds.values()]
        yield fake.requires_grad_(False), way, here


def _read(stored: torch.dtype, table: Embedding, ids_T: Tensor) -> Tensor:
    """Rows of a token embedding as they are read from files; ids_T has no numbers."""
    whole, index_T = table.weight, torch.zeros_like(ids_T)
    raw = torch.empty(min(len(ids_T), len(whole)), whole.shape[1], dtype=stored)
    rows = accelerator.sent(raw.to(whole.dtype), whole.device)
    return nn.functional.embedding(accelerator.sent(index_T, whole.device), rows)


def _step(
    held: Held, fake: Decoder, way: Prompts | None, capacity: int, start: int, count: int
) -> list[int]:
    """By stage, most bytes that a step of `count` tokens after `start` ones has, but for the cache,
    which is there as a whole."""
    pages = range(pages_of(capacity))
    cache = PagedCache(len(pages), PAGE, 1)

    def fed(first: int, tokens: int) -> Fed:
        past = PagedPast(cache, (Part(pages, first, tokens, 0, 0),))
        return past.positions(held.device), past.bounds, past

    with torch.no_grad(), rows.alone():
        _peaks(held, fake, way, None, lambda: fed(0, 1))  # its buffers are there before
        return _peaks(held, fake, way, cache, lambda: fed(start, count))


def _peaks(
    held: Held,
    fake: Decoder,
    way: Prompts | None,
    cache: PagedCache | None,
    fed: Callable[[], Fed],
) -> list[int]:
    """Most bytes that each of a step's stages makes beside the model and the cache; 0 for those of
    other workers."""
    there = [] if cache is None else cache.tensors
    with held.ledger() as ledger, Session(fake) as session:
        for x in (*fake.parameters(), *there):
            ledger.see(x)
        before, peaks = ledger.total, list[int]()
        session.watch.ledger = ledger
        session.steps.prompts = way
        session.steps.leaving = () if held.last else (len(fake.blocks) - 1,)
        positions_T, bounds, past = fed()
        ids_T = torch.zeros(positions_T.shape, dtype=torch.int64)
        loaded = session.steps.begin(ids_T, positions_T, bounds, past)
        session.engine.begin(loaded)
        for step in loaded.steps:
            if step.action.kind is not Kind.SAMPLE:
                event = session.engine.alone(step)
                here = held.plays(step.action.stage, len(loaded.steps) - 2)
                peaks.append(event.peak - before if here else 0)
    return peaks


def _drawing(held: Held, sampler: Sampler) -> int:
    """Bytes while a token is drawn, its logits included."""
    dtype = held.dtypes["prologue.tokens.weight"]
    if accelerator.queues(held.device):  # what is drawn from comes to the host
        return in_grains(held.config.vocab * dtype.itemsize, held.grain)
    if not isinstance(sampler, Sampling):  # who knows what it keeps
        return held.config.vocab * (OTHERWISE + dtype.itemsize)
    with torch.no_grad(), Ledger() as ledger:
        drawn(torch.linspace(0, _SPREAD, held.config.vocab).to(dtype), sampler, 0, False)
    return ledger.peak
