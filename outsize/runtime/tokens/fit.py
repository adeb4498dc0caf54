"""How much of a memory budget is left for weights: what generation needs besides, found by playing
its steps on tensors without bytes under the ledger that counts real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outsize.decode.cache import StateCache, state_bytes
from outsize.errors import OutsizeError, counted
from outsize.memory.ledger import Ledger
from outsize.memory.sizes import format_bytes
from outsize.models.build import materialise, segments
from outsize.models.decoder import Decoder, typed
from outsize.models.seams import Past
from outsize.runtime.tokens.parts import TOKENS
from outsize.runtime.tokens.player import apply_stage
from outsize.runtime.tokens.source import Source
from outsize.torch_private import FakeTensorMode

LEAST_SLICE = 64  # prompt tokens fed at once: fewer would save little and read the weights often
# Of a vocabulary, in bytes an element, while a token is drawn: scores in float64, sorted, cumulated
# and their copies (decode/samplers.py); the likeliest alone needs a mask.
DRAWN, LIKELIEST = 64, 2
SCALARS = 4096  # bytes: numbers of one element that the steps pass about


@dataclass(frozen=True)
class Request:
    """A prompt of `prompt` tokens, up to `new` ones behind it; drawn: not just the likeliest."""

    prompt: int
    new: int
    drawn: bool = True

    @property
    def capacity(self) -> int:
        """Tokens whose keys and values are kept."""
        return self.prompt + max(self.new - 1, 0)


@dataclass(frozen=True)
class Fit:
    """bytes of the budget: cache of what tokens leave, work while a step runs and a token is drawn,
    pool at most. slice: prompt tokens fed in one step besides the first."""

    cache: int
    work: int
    pool: int
    slice: int


def fit(
    model: Decoder, source: Source, memory: int, request: Request, least: int, most: int
) -> Fit:
    """What of `memory` bytes the pool may have, with the longest slices of the prompt that leave
    `least` bytes for it. OutsizeError with what is missing where none do.
    """
    length = most
    while True:
        cache, work = needs(model, source, request, length)
        left = memory - cache - work - source.bytes_held
        if left >= least:
            return Fit(cache, work, left, length)
        if length <= LEAST_SLICE or request.prompt <= LEAST_SLICE:
            break
        length = max(LEAST_SLICE, min(length, request.prompt) // 2)
    raise OutsizeError(
        f"--memory {format_bytes(memory)}: {counted(least - left, 'byte', ',')} missing; the"
        " layers at work need"
        f" {least:,} bytes, the cache of {counted(request.capacity, 'token', ',')} {cache:,}, a"
        " step"
        f" {work + source.bytes_held:,}: give {memory + least - left:,} bytes, or fewer tokens"
    )


def needs(model: Decoder, source: Source, request: Request, length: int) -> tuple[int, int]:
    """(bytes of the cache, most bytes of a step besides weights and cache) where a prompt is fed
    `length` tokens at once after the first one."""
    first = min(request.prompt, 1 + length)
    steps = {(0, first), (request.capacity - 1, 1)}
    if request.prompt > first:  # a later slice, after all the others
        steps.add((request.prompt - first, first))
    with FakeTensorMode():
        fake, layers = _fake(model, source)
        measured = _Measured(fake, layers, request.capacity)
        work = max(measured.play(start, count) for start, count in steps)
    drawing = model.config.vocab * (DRAWN if request.drawn else LIKELIEST)
    return measured.bytes, max(work, drawing) + SCALARS


def needs_of_rows(model: Decoder, source: Source, rows: int, length: int) -> int:
    """Most bytes besides weights while rows of `length` tokens go through, to all their logits."""
    with FakeTensorMode():
        fake, layers = _fake(model, source)
        bounds = tuple(range(0, rows * length + 1, length))
        positions = torch.arange(length).repeat(rows)
        return SCALARS + _peak(fake, (), lambda: play_fake(fake, layers, positions, bounds, None))


def _fake(model: Decoder, source: Source) -> tuple[Decoder, dict[int, int]]:
    """A model without bytes that has one layer of each kind, and how often each comes."""
    kinds: dict[object, list[int]] = {}
    for index, facts in enumerate(model.config.layers):
        kinds.setdefault(facts, []).append(index)
    layers = {where[0]: len(where) for where in kinds.values()}
    with torch.device("meta"):
        fake = Decoder(model.config)
    held = {part.name: part.dtype for stage in source.stages for part in stage.parts}
    held[TOKENS] = source.table.target

    def fill(name: str, parameter: Tensor) -> Tensor:
        return torch.empty(parameter.shape, dtype=held[name], device="cpu")

    wanted = {"prologue", "epilogue", *(f"block {i}" for i in layers)}
    for segment, _ in segments(fake):
        if segment in wanted:
            materialise(fake, segment, fill)
    return fake, layers


class _Measured:
    """Steps of a model without bytes."""

    def __init__(self, model: Decoder, layers: dict[int, int], capacity: int) -> None:
        self.model, self.layers, self.capacity = model, layers, capacity
        self.bytes = 0  # of the cache of all layers

    def play(self, start: int, count: int) -> int:
        """Most bytes that a step of `count` tokens after `start` ones has, but for the cache."""
        cache = StateCache(1, self.capacity)
        self._step(cache, 1)  # its buffers are there before the step is measured
        dtype = self.model.prologue.tokens.weight.dtype
        sizes = {
            block.layer: state_bytes(block.mixer, dtype, self.capacity)
            for block in typed(self.model.blocks)
            if block.layer in self.layers
        }
        self.bytes = sum(sizes[layer] * times for layer, times in self.layers.items())
        cache.lengths[0] = start
        there = [x for layer in cache.layers for x in cache.buffers(layer)]
        return _peak(self.model, there, lambda: self._step(cache, count))

    def _step(self, cache: StateCache, count: int) -> None:
        past = cache.extend([0], [count])
        play_fake(self.model, self.layers, past.positions(), past.bounds, past)


def _peak(model: Decoder, there: Iterable[Tensor], work: Callable[[], None]) -> int:
    """Most bytes that work makes beside the model and the tensors that are there already."""
    with Ledger() as ledger:
        for x in (*model.parameters(), *there):
            if not x.is_meta:
                ledger.see(x)
        before = ledger.total
        ledger.reset_peak()
        work()
    return ledger.peak - before


def play_fake(
    model: Decoder,
    layers: Collection[int],
    positions_T: Tensor,
    bounds: tuple[int, ...],
    past: Past | None,
) -> None:
    """A step through a fake model, as outsize/runtime/tokens/reading.py plays it."""
    context = model.context(positions_T, bounds, past=past)
    whole = model.prologue.tokens.weight
    rows = min(len(positions_T), len(whole))
    small = nn.Parameter(whole.new_empty(rows, whole.shape[1]), requires_grad=False)
    model.prologue.tokens.weight = small
    ids_T = torch.zeros_like(positions_T)  # there throughout, as who asked for the step has it
    with torch.no_grad():
        carry = apply_stage(model, 0, ids_T, context)
        model.prologue.tokens.weight = whole
        del small
        for layer in layers:
            carry = apply_stage(model, layer + 1, carry, context)
        apply_stage(model, len(model.blocks) + 1, carry, context, last=past is not None)
