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
from outsize.runtime.session import Session
from outsize.serve.asks import Room
from outsize.serve.drafts import MOST
from outsize.serve.files import InFiles
from outsize.serve.model import Model
from outsize.simulate.tokens import Held, Needs, Seconds, needs, pace, probed, resident, seconds

PAGE = 16  # tokens: fewer would be longer tables, more would share less
CONTEXT = 8192  # tokens of a request where nothing is said and the model has as many positions
PROMPT = 512  # tokens whose time to the first new one is foretold
_SHARE = 0.5  # of the memory that is left, which pages may have where nothing is said
_CACHE = 0.25  # of a budget that does not hold all weights, which pages may have


@dataclass(frozen=True)
class Wanted:
    """What is said of serving; None: what follows from the model and the machine. queue: tokens of
    waiting requests; drafts: whether steps look at drafts."""

    context: int | None = None
    requests: int = 16
    budget: int = 512
    queue: int | None = None
    drafts: bool = False


@dataclass(frozen=True)
class Served:
    """What a model will be served with. session: what plays the steps where weights stay in files;
    weights: bytes on the device; cache, work: bytes; alone: of a prompt of so many tokens and a
    token, where nobody else asks; notes: what differs from what one may expect."""

    room: Room
    session: Session | None
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


@dataclass(frozen=True)
class _Sizes:
    """Bytes: of a page, of all slots, of a step's work; pages that a request, and as many as may go
    at once, need."""

    page: int
    slots: int
    work: int
    least: int
    enough: int


def served(model: Model, wanted: Wanted) -> Served:
    """OutsizeError where the memory is too small, with what is missing."""
    home = model.home
    assert home is None or isinstance(home, InFiles), "on one worker"
    held = resident(model) if home is None else home.budget.held
    context = _context(model, wanted.context)
    budget, dtype = min(wanted.budget, context), held.dtypes["prologue.tokens.weight"]
    left = [one for block in typed(model.blocks) for one in block.mixer.states(dtype)]
    sizes = _sizes(held, left, wanted, context, budget)
    pages = _pages(home, sizes, context)
    found = Needs(pages * sizes.page + sizes.slots, sizes.work, budget - 1)
    session = None if home is None else home.ready_for(found, pages * PAGE)
    prompt = min(PROMPT, context)
    asked = Request((0,) * prompt, 1, Sampling())
    if home is None:
        weights = sum(x.nbytes for x in {id(x): x for x in model.parameters()}.values())
        alone, notes = _alone(model, asked, budget), _notes(model, left)
    else:
        assert home.outlook is not None, "it is ready"
        with rows.alone():
            alone = home.foretold(asked)
        weights = home.outlook.share.weights + home.outlook.share.buffers
        notes = (*_notes(model, left), *_staying(home))
    queue = wanted.queue if wanted.queue is not None else 4 * pages * PAGE
    room = Room(pages, PAGE, wanted.requests, budget, queue, context)
    return Served(room, session, weights, found.cache, found.work, alone, prompt, notes)


def _sizes(
    held: Held, left: Sequence[StateSpec], wanted: Wanted, context: int, budget: int
) -> _Sizes:
    asked = Request((0,) * budget, 1, Sampling(1.0))
    drawn = min(budget + wanted.requests, wanted.requests * (1 + wanted.drafts * MOST))
    logits = drawn * held.config.vocab * held.dtypes["prologue.tokens.weight"].itemsize
    least = math.ceil(context / PAGE)
    return _Sizes(
        page=sum(one.bytes(PAGE) for one in left if one.per == "token"),
        slots=(wanted.requests + 1) * sum(one.bytes(1) for one in left if one.per == "sequence"),
        work=needs(held, asked, budget).work + logits,
        least=least,
        enough=least * wanted.requests,
    )


def _pages(home: InFiles | None, sizes: _Sizes, context: int) -> int:
    """As many as all requests may fill, where there is room for them."""
    if not sizes.page:
        return sizes.enough
    if home is None:
        free = int(_SHARE * host.memory().available) - sizes.work - sizes.slots
        if free < sizes.least * sizes.page:
            raise OutsizeError(
                f"{format_bytes(max(free, 0))} may be had for the cache, and one request of"
                f" {context:,} tokens takes {format_bytes(sizes.least * sizes.page)}: serve with a"
                " smaller --context"
            )
        return min(sizes.enough, free // sizes.page)
    whole = home.budget.left(Needs(sizes.slots, sizes.work, 0))
    every = home.budget.pool(Needs(0, 0, 0)) if whole > 0 else 0  # of all weights, or nearly so
    beside = (whole - every) // sizes.page
    if beside >= sizes.least:
        return min(sizes.enough, beside)
    share = int(_CACHE * home.budget.memory) // sizes.page
    return min(sizes.enough, max(sizes.least, share))


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


def _alone(model: Model, asked: Request, budget: int) -> Seconds:
    """By timing a token, and some of a prompt, through a few stages."""
    stages = range(len(model.blocks) + 2)
    with rows.alone():
        token, some = (
            pace(model, stages, count).whole(model) for count in (1, probed(asked, budget))
        )
    return seconds(asked, budget - 1, token, some)


def _staying(home: InFiles) -> tuple[str, ...]:
    """What is read in every step."""
    assert home.outlook is not None, "it is ready"
    layout, rate = home.outlook.layout, home.outlook.read_rate
    if not layout.read:
        return ()
    return (
        f"of {format_bytes(home.outlook.weights)} of weights {format_bytes(layout.read)} stay in"
        f" their files and are read in each step, whatever it feeds, at {format_bytes(rate)}/s",
    )


def _notes(model: Model, left: Sequence[StateSpec]) -> tuple[str, ...]:
    """What is not bit for bit the same whatever else is asked."""
    weight = model.prologue.tokens.weight
    if not native.reads(weight):
        return (
            f"approximate: tokens are those of a request alone to rounding, in {weight.dtype}"
            f" on {weight.device.type} without this machine's own kernels",
        )
    if any(one.per == "sequence" for one in left):
        return ("approximate: recurrent states go through slices of prompts to rounding",)
    return ()
