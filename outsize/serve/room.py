"""What serving has room for, and how long a token takes: known before the first request."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard, cast
from zlib import crc32

from outsize.collectives import Lone, Mesh, World
from outsize.collectives.world import steady, told
from outsize.decode import caches
from outsize.decode.generate import Request
from outsize.decode.paged import PAGE
from outsize.decode.runs import singly
from outsize.decode.samplers import Sampling
from outsize.errors import OutsizeError, counted, expect
from outsize.hardware import host
from outsize.hardware.disk import OPERATION
from outsize.kernels import native, rows
from outsize.kernels.pages import AS_STORED, FORMS, Form
from outsize.memory.sizes import format_bytes
from outsize.memory.tiers import TierSpec
from outsize.models.coding import Coding
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder, typed
from outsize.models.seams import StateSpec
from outsize.runtime.session import Session
from outsize.serve.asks import Room
from outsize.serve.below import Below, settled
from outsize.serve.drafts import MOST
from outsize.serve.lying import notes_on, page_of, refuse
from outsize.serve.model import Model
from outsize.serve.price import Curve, Price
from outsize.serve.probed import priced, probed
from outsize.serve.slo import NONE, Slo, unkept
from outsize.serve.steps import message
from outsize.simulate.tokens import LEAST_SLICE, Held, Needs, needs, resident

if TYPE_CHECKING:
    from outsize.serve.budget import Budget
    from outsize.serve.files import InFiles
    from outsize.serve.meshed import OnMesh

CONTEXT = 8192  # tokens of a request where nothing is said and the model has as many positions
PROMPT = 512  # tokens whose time to the first new one is foretold
_SHARE = 0.5  # of the memory that is left, which pages may have where nothing is said
_CACHE = 0.25  # of a budget that does not hold all weights, which pages may have


@dataclass(frozen=True)
class Wanted:
    """What is said of serving; None: what follows from the model and the machine. queue: tokens of
    waiting requests; drafts: whether steps look at drafts; slo: what is promised; cache: the form
    of what pages hold, how they lie, or both (outsize/decode/caches.py); below: where pages go that
    are pushed out, the first one first."""

    context: int | None = None
    requests: int = 16
    budget: int = 512
    queue: int | None = None
    drafts: bool = False
    slo: Slo = NONE
    cache: str = AS_STORED
    below: tuple[TierSpec, ...] = ()

    def __post_init__(self) -> None:
        caches.parse(self.cache)
        for name in ("requests", "budget"):
            value = getattr(self, name)
            expect(value >= 1, f"serving: {name}", value, "1 or more")

    @property
    def form(self) -> str:
        """Of what pages hold."""
        return caches.parse(self.cache)[0]

    @property
    def lies(self) -> str:
        """How the cache does, "" for pages that lie anywhere."""
        return caches.parse(self.cache)[1]


@dataclass(frozen=True)
class Served:
    """What a model will be served with. session: what plays the steps where weights are not in
    memory as a whole; weights: bytes on the device; cache, work: bytes; notes: what differs from
    what one may expect. mesh: of several workers, "" for one; shares: weights, cache and work of
    the first worker of each stage of a pipeline; below: where pages go that are pushed out."""

    room: Room
    session: Session | None
    weights: int
    cache: int
    work: int
    notes: tuple[str, ...]
    mesh: str
    shares: tuple[tuple[int, int, int], ...]
    below: Below | None = None

    def lines(self) -> list[str]:
        room = self.room
        weights, cache, work = (
            ", ".join(map(format_bytes, each)) for each in zip(*self.shares, strict=True)
        )
        whole = ", ".join(format_bytes(sum(each)) for each in self.shares)
        each = " of each stage" if len(self.shares) > 1 else ""
        where = f"on {self.mesh} a worker{each} holds: " if self.mesh else ""
        lies = f", {room.lies}" if room.lies else ""
        prompt, price = min(PROMPT, room.context), room.price
        first, token = price.alone(prompt, room.budget), price.next(prompt)
        return [
            f"{where}weights {weights}; cache {cache} for"
            f" {room.pages * room.page:,} tokens in pages of {room.page}{lies}; a step of at most"
            f" {counted(room.budget, 'token')} works in {work}:"
            f" {whole} in all, Python and PyTorch on top",
            f"up to {counted(room.slots, 'request')} at once, of {room.context:,} tokens each;"
            f" {room.queue:,} tokens may wait; alone, a prompt of {prompt} takes about"
            f" {first:.3g} s to its first token, each further one {token:.3g} s",
            *self._promised(),
            *self._pushed_out(),
            *self.notes,
        ]

    def _pushed_out(self) -> list[str]:
        room, price = self.room, self.room.price
        if not room.below:
            return []
        return [
            "pages that are pushed out and wanted again go below, room for"
            f" {room.below * room.page:,} tokens: one takes {price.evict:.3g} s there and"
            f" {price.fetch:.3g} s back, and is computed again where that is foretold to be quicker"
        ]

    def _promised(self) -> list[str]:
        room, slo = self.room, self.room.slo
        if not slo:
            return []
        depth = room.context // 2
        most = room.price.beside(slo.tpot, room.slots, depth)
        seen = most * room.price.past(depth, 1)
        tokens = room.price.most(slo.tpot, most, room.budget, seen, depth)
        return [
            f"promised {slo}: with {counted(most, 'request')} of {counted(depth, 'token', ',')} a"
            f" step feeds {counted(tokens, 'token')} at most, and who would wait longer is refused"
        ]


@dataclass(frozen=True)
class Sizes:
    """Tokens of a page; bytes: of a page, of all slots, of a step's work; pages that a request, and
    as many as may go at once, need."""

    tokens: int
    page: int
    slots: int
    work: int
    least: int
    enough: int


def served(model: Model, wanted: Wanted, tell: Callable[[str], object] = str) -> Served:
    """All workers of a mesh ask. tell: is told in a line what fails later. OutsizeError where the
    memory of one is too small, with what is missing."""
    home = cast("InFiles | OnMesh | None", model.home)
    held, world = (resident(model), Lone()) if home is None else (home.held, home.world)
    context = context_of(model, wanted.context)
    budget, dtype = min(wanted.budget, context), held.dtypes["prologue.tokens.weight"]
    each = [block.mixer.states(dtype) for block in typed(model.blocks)]
    left = [one for layer, some in enumerate(each) if held.has(layer + 1) for one in some]
    refuse(wanted.lies, held.device, world.mesh.size)
    sizes = sizes_of(held, left, wanted, context, budget)
    pages = _pages(home, world, sizes, context)
    found = Needs(pages * sizes.page + sizes.slots, sizes.work, budget - 1)
    session = None if home is None else home.ready_for(found, pages * sizes.tokens)
    notes = notes_of(model, [one for some in each for one in some], wanted.form)
    price = _price(model, home, budget, context)
    room = room_of(wanted, sizes, pages, budget, context, price)
    if home is None:
        weights = sum(x.nbytes for x in {id(x): x for x in model.parameters()}.values())
        alone = singly(model)
        notes = notes if alone is None else (*notes, alone)
    else:
        weights = home.weights
        outlook = home.outlook if _in_files(home) else None
        notes = (*notes, *(() if outlook is None else outlook.staying()))
    shares = [
        (int(w), int(c), int(x)) for w, c, x in told(world, (weights, found.cache, found.work))
    ]
    stages = tuple(shares[rank] for rank in world.mesh.ranks("pipeline", 0))
    mesh = str(world.mesh) if world.mesh.size > 1 else ""
    lone = unkept(wanted.slo, price, min(PROMPT, context), budget)
    room, below, why = settled(
        room, wanted.below, sizes.page, world.mesh.size, left, held.device, tell
    )
    why = (*notes_on(room, sizes.page), *why)
    notes = (*notes, *on_mesh(world.mesh, room, _machines(world)), *lone, *why)
    return Served(room, session, weights, found.cache, found.work, notes, mesh, stages, below)


def _in_files(home: InFiles | OnMesh | None) -> TypeGuard[InFiles]:
    return home is not None and home.what == "memory"


def _price(model: Model, home: InFiles | OnMesh | None, budget: int, context: int) -> Price:
    """Of steps, by timing some. On several workers, who all ask, cached tokens take no time."""
    if home is None:
        return priced(model, budget, context)
    if _in_files(home) and home.world.mesh.size == 1:
        assert home.outlook is not None, "it is ready"
        return probed(model, home.outlook.layout.filled, budget, context, home.outlook.reading)
    some = min(LEAST_SLICE, budget)
    with rows.alone():
        own = home.foretold(Request((0,) * some, 1, Sampling()), some - 1)
    token, prompt = map(max, zip(*told(home.world, own), strict=True))
    return Price(Curve(((1, token), (some, prompt)) if some > 1 else ((1, token),)))


def page_bytes(left: Iterable[StateSpec], form: Form, page: int = PAGE) -> int:
    """Of what so many tokens leave in layers that leave such."""
    found = 0
    for one in left:
        *heads, size = one.shape
        found += math.prod(heads) * form.bytes(size, one.dtype) if one.per == "token" else 0
    return page * found


def room_of(
    wanted: Wanted, sizes: Sizes, pages: int, budget: int, context: int, price: Price
) -> Room:
    queue = wanted.queue if wanted.queue is not None else 4 * pages * sizes.tokens
    return Room(
        pages, sizes.tokens, wanted.requests, budget, queue, context, price, wanted.slo,
        wanted.form, lies=wanted.lies,
    )  # fmt: skip


def sizes_of(
    held: Held, left: Sequence[StateSpec], wanted: Wanted, context: int, budget: int
) -> Sizes:
    asked = Request((0,) * budget, 1, Sampling(1.0))
    drawn = min(budget + wanted.requests, wanted.requests * (1 + wanted.drafts * MOST))
    logits = drawn * held.config.vocab * held.dtypes["prologue.tokens.weight"].itemsize * held.last
    form = FORMS[wanted.form]
    tokens = page_of(wanted.lies, left, form)
    least, page = math.ceil(context / tokens), page_bytes(left, form, tokens)
    disks = sum(one.medium == "disk" for one in wanted.below)
    moving = page + disks * OPERATION if wanted.below and held.device.type == "cpu" else 0
    return Sizes(
        tokens=tokens,
        page=page,
        slots=(wanted.requests + 1) * sum(one.bytes(1) for one in left if one.per == "sequence"),
        work=needs(held, asked, budget).work + logits + moving,
        least=least,
        enough=least * wanted.requests,
    )


def _pages(home: InFiles | OnMesh | None, world: World, sizes: Sizes, context: int) -> int:
    """As many as the worker with least room for them has, and all requests may fill."""
    if _in_files(home):
        return int(min(told(world, (beside(home.budget, sizes),)))[0])
    machines = _machines(world)
    near = machines.count(machines[world.rank])
    free = int(_SHARE * host.memory().available) // near - sizes.work - sizes.slots
    fits = free // sizes.page if sizes.page else sizes.enough
    fewest, free, page = map(int, min(told(world, (fits, free, sizes.page))))
    if fewest < sizes.least:
        raise _short(free, sizes.least * page, context)
    return min(sizes.enough, fewest)


def fitting(free: int, sizes: Sizes, context: int) -> int:
    """Pages of one worker in a share of the bytes that it has free beside weights. OutsizeError
    where one request has not room."""
    free = int(_SHARE * free) - sizes.work - sizes.slots
    fits = free // sizes.page if sizes.page else sizes.enough
    if fits < sizes.least:
        raise _short(free, sizes.least * sizes.page, context)
    return min(sizes.enough, fits)


def _short(free: int, needed: int, context: int) -> OutsizeError:
    return OutsizeError(
        f"{format_bytes(max(free, 0))} may be had for the cache, and one request of"
        f" {context:,} tokens takes {format_bytes(needed)}: serve with a smaller --context"
    )


def beside(budget: Budget, sizes: Sizes) -> int:
    """Pages beside weights that stay in files: in what is left by all of them, or in a share of the
    budget."""
    if not sizes.page:
        return sizes.enough
    whole = budget.left(Needs(sizes.slots, sizes.work, 0))
    every = budget.pool(Needs(0, 0, 0)) if whole > 0 else 0  # of all weights, or nearly so
    beside = (whole - every) // sizes.page
    if beside >= sizes.least:
        return min(sizes.enough, beside)
    share = int(_CACHE * budget.memory) // sizes.page
    return min(sizes.enough, max(sizes.least, share))


def _machines(world: World) -> list[float]:
    """By rank, what tells the machine that it runs on from others."""
    return [name for (name,) in told(world, (crc32(platform.node().encode()),))]


def positions_of(config: DecoderConfig) -> int | None:
    """Tokens that a model's files say that it was made for; None where they do not."""
    if config.learned_positions:
        return config.learned_positions - config.position_offset
    known = config.source.get("max_position_embeddings")
    return known if isinstance(known, int) and known > 0 else None


def context_of(model: Decoder, said: int | None) -> int:
    most = positions_of(model.config)
    if said is None:
        return min(CONTEXT, most) if most is not None else CONTEXT
    if said < 1:
        raise OutsizeError(f"--context {said}; expected 1 token or more")
    if most is not None and said > most:
        raise OutsizeError(f"--context {said:,}; this model has {most:,} positions")
    return said


def on_mesh(mesh: Mesh, room: Room, machines: Sequence[float]) -> tuple[str, ...]:
    """What several workers make of it. machines: by rank, what tells them from one another."""
    if mesh.size == 1:
        return ()
    size = format_bytes(message(room))
    found = (f"a step is told to the other workers in a message of {size}",)
    if mesh.tensor == 1:
        return found
    others = "they do not depend on who else asks"
    if not all(
        steady([machines[one] for one in mesh.ranks("tensor", rank)]) for rank in range(mesh.size)
    ):
        others = "between these machines they depend, as much, on who else asks"
    return (
        *found,
        "approximate: tokens are those of one worker to rounding, since products are summed over"
        f" {mesh}; {others}",
    )


def _said_of_eights(coding: Coding) -> str:
    """What is not what was trained where what codes multiply is rounded."""
    from outsize.kernels.eights import OUTLIER

    each = "each token" if coding.format.shared(1, 1) else "each group of a token"
    apart = (
        f"; numbers of magnitude {OUTLIER:g} or more stay as they are, by the token's own alone"
        if coding.eights == "+outliers"
        else ""
    )
    return (
        f"approximate: what is multiplied by codes of weights is rounded to 8 bits, {each} with a"
        f" scale of its own{apart}"
    )


def notes_of(model: Decoder, left: Sequence[StateSpec], cache: str = AS_STORED) -> tuple[str, ...]:
    """What is not bit for bit the same whatever else is asked, or not what was trained."""
    weight = model.prologue.tokens.weight
    rounded, coding = tuple[str, ...](), model.config.coding
    if coding is not None and not coding.stored:
        rounded = (f"approximate: weights are held as {coding.name}, and are rounded to it",)
    if coding is not None and coding.eights:
        rounded += (_said_of_eights(coding),)
    said = {"float32": 4, "float64": 8}.get(str(model.config.source.get("torch_dtype")), 0)
    if weight.itemsize < said:
        rounded += (f"approximate: weights are held in {weight.dtype}, and are rounded to it",)
    if not FORMS[cache].exact(weight.dtype):
        rounded += (f"approximate: keys and values are held as {cache}, and are rounded to it",)
    if not native.reads(weight):
        return (
            *rounded,
            f"approximate: tokens are those of a request alone to rounding, in {weight.dtype}"
            f" on {weight.device.type} without this machine's own kernels",
        )
    if any(one.per == "sequence" for one in left):
        return (
            *rounded,
            "approximate: recurrent states go through slices of prompts to rounding",
        )
    return rounded
