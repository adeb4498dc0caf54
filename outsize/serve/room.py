"""What serving has room for, and how long a token takes: known before the first request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outsize.decode.generate import Request
from outsize.decode.samplers import Sampling
from outsize.errors import OutsizeError, counted
from outsize.hardware import host
from outsize.kernels import native, rows
from outsize.memory.sizes import format_bytes
from outsize.models.decoder import typed
from outsize.models.seams import StateSpec
from outsize.serve.asks import Room
from outsize.serve.model import Model
from outsize.simulate.tokens import Seconds, needs, pace, probed, resident, seconds

PAGE = 16  # tokens: fewer would be longer tables, more would share less
CONTEXT = 8192  # tokens of a request where nothing is said and the model has as many positions
PROMPT = 512  # tokens whose time to the first new one is foretold
_SHARE = 0.5  # of the memory that is left, which pages may have where nothing is said


@dataclass(frozen=True)
class Wanted:
    """What is said of serving; None: what follows from the model and the machine. memory: bytes of
    all tensors; queue: tokens of waiting requests."""

    memory: int | None = None
    context: int | None = None
    requests: int = 16
    budget: int = 512
    queue: int | None = None


@dataclass(frozen=True)
class Served:
    """What a model will be served with. weights, cache, work: bytes; alone: of a prompt of PROMPT
    tokens and a token, where nobody else asks; notes: what differs from what one may expect."""

    room: Room
    weights: int
    cache: int
    work: int
    alone: Seconds
    prompt: int
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        room, whole = self.room, self.weights + self.cache + self.work
        return [
            f"weights {format_bytes(self.weights)}; cache {format_bytes(self.cache)} for"
            f" {room.pages * room.page:,} tokens in pages of {room.page}; a step of at most"
            f" {counted(room.budget, 'token')} works in {format_bytes(self.work)}:"
            f" {format_bytes(whole)} in all, Python and PyTorch on top",
            f"up to {counted(room.slots, 'request')} at once, of {room.context:,} tokens each;"
            f" {room.queue:,} tokens may wait; alone, a prompt of {self.prompt} takes about"
            f" {self.alone.prompt:.3g} s to its first token, each further one"
            f" {self.alone.token:.3g} s",
            *self.notes,
        ]


def served(model: Model, wanted: Wanted) -> Served:
    """OutsizeError where the memory is too small, with what is missing."""
    context = _context(model, wanted.context)
    dtype = model.prologue.tokens.weight.dtype
    left = [one for block in typed(model.blocks) for one in block.mixer.states(dtype)]
    page = sum(one.bytes(PAGE) for one in left if one.per == "token")
    slots = (wanted.requests + 1) * sum(one.bytes(1) for one in left if one.per == "sequence")
    weights = sum(x.nbytes for x in {id(x): x for x in model.parameters()}.values())
    budget = min(wanted.budget, context)
    asked = Request((0,) * budget, 1, Sampling(1.0))
    logits = wanted.requests * model.config.vocab * dtype.itemsize
    work = needs(resident(model), asked, budget).work + logits
    enough = wanted.requests * math.ceil(context / PAGE)
    least = math.ceil(context / PAGE)
    if wanted.memory is None:
        free = int(_SHARE * host.memory().available) - work - slots
        pages = min(enough, max(free // page, 0)) if page else enough
        missing = (least - pages) * page
    else:
        free = wanted.memory - weights - work - slots
        pages = min(enough, max(free // page, 0)) if page else enough
        missing = max(-free, 0) + (least - pages) * page if free < least * page else 0
    if missing > 0:
        raise OutsizeError(
            f"--memory: {format_bytes(missing)} missing; weights take {format_bytes(weights)}, a"
            f" step {format_bytes(work)} and the cache of one request of {context:,} tokens"
            f" {format_bytes(least * page + slots)}: give {weights + work + slots + least * page:,}"
            " bytes, or a smaller --context"
        )
    queue = wanted.queue if wanted.queue is not None else 4 * pages * PAGE
    room = Room(pages, PAGE, wanted.requests, budget, queue, context)
    prompt = min(PROMPT, context)
    return Served(room, weights, pages * page + slots, work, _alone(model, prompt, budget), prompt,
                  _notes(model, left))  # fmt: skip


def _context(model: Model, said: int | None) -> int:
    config = model.config
    known = config.source.get("max_position_embeddings")
    most = config.learned_positions - config.position_offset if config.learned_positions else known
    if said is None:
        return min(CONTEXT, most) if isinstance(most, int) and most > 0 else CONTEXT
    if said < 1:
        raise OutsizeError(f"--context {said}; expected 1 token or more")
    if isinstance(most, int) and said > most:
        raise OutsizeError(f"--context {said:,}; this model has {most:,} positions")
    return said


def _alone(model: Model, prompt: int, budget: int) -> Seconds:
    """By timing a token, and some of a prompt, through a few stages."""
    stages, asked = range(len(model.blocks) + 2), Request((0,) * prompt, 1, Sampling())
    with rows.alone():
        token, some = (
            pace(model, stages, count).whole(model) for count in (1, probed(asked, budget))
        )
    return seconds(asked, budget - 1, token, some)


def _notes(model: Model, left: Sequence[StateSpec]) -> tuple[str, ...]:
    """What is not bit for bit the same whatever else is asked."""
    weight = model.prologue.tokens.weight
    if not native.reads(weight):
        return (f"approximate: tokens are those of a request alone to rounding, in {weight.dtype}"
                f" on {weight.device.type} without this machine's own kernels",)  # fmt: skip
    if any(one.per == "sequence" for one in left):
        return ("approximate: recurrent states go through slices of prompts to rounding",)
    return ()
