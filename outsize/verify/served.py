"""Serving against each request alone, and against plain PyTorch: settings drawn by seed.

A draw serves some requests in a room, by a policy, with drafts, interruptions and weights in files
as its seed says. What each is told must be what it is told alone, bit for bit in float32 and
bfloat16, where that is also what training's forward pass computes of its text; and in float64, to
1e-10, what a plain loop in PyTorch draws. On a mesh the workers are threads: a pipeline's bits are
those of one worker, of a tensor axis those of the request alone on the same one.

T tokens of a text, V vocabulary.
"""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outsize.checkpoint import hub
from outsize.collectives import Lone, World
from outsize.collectives.threads import play
from outsize.errors import OutsizeError, counted
from outsize.kernels import rows
from outsize.kernels.entropy import logprobs
from outsize.kernels.pages import FORMS
from outsize.memory.disk import DiskStore
from outsize.memory.store import MemoryStore, Place, Store, rounded
from outsize.models.decoder import Decoder, typed
from outsize.models.layout import prompted
from outsize.serve.asks import Ask, End, Room, Token
from outsize.serve.below import ROUNDS, Below
from outsize.serve.drafts import DRAFTERS, Drafter
from outsize.serve.engine import Engine
from outsize.serve.files import InFiles, Limits
from outsize.serve.meshed import OnMesh
from outsize.serve.model import Model
from outsize.serve.policies import POLICIES
from outsize.serve.room import Wanted, page_bytes, served
from outsize.verify.compare import LIMIT
from outsize.verify.draw_served import EXACT, QUEUE, Setting, Subject, drawn, needed
from outsize.verify.many import Outcome
from outsize.verify.naive import logits_of, simple

_SECONDS = 120.0  # for which an engine may say nothing


class Wrong:
    """Drafts that come true now and then, and are judged by nobody."""

    def propose(self, ids: Sequence[int], most: int) -> Sequence[int]:
        return [ids[-1], ids[len(ids) // 2], ids[0]][:most]

    def judged(self, proposed: int, accepted: int) -> None:
        pass


# -- serving ---------------------------------------------------------------------------------------


@dataclass
class _Heard:
    """What a request is told."""

    tokens: list[Token] = field(default_factory=list)
    end: End | None = None


class _Run:
    """Requests of an engine, asked as a setting says, on the engine's own thread behind the first:
    so that a draw runs alike every time."""

    def __init__(self, engine: Engine, setting: Setting) -> None:
        from queue import SimpleQueue

        self._engine, self._setting = engine, setting
        self.heard = [_Heard() for _ in setting.asks]
        self._keys: dict[int, int] = {}
        self._going = True
        self._over: SimpleQueue[int] = SimpleQueue()

    def __call__(self) -> list[_Heard]:
        from queue import Empty

        for number, late in enumerate(self._setting.late):
            if not late:
                self._ask(number)
        self._engine.start()
        try:
            for _ in self.heard:
                self._over.get(timeout=_SECONDS)
        except Empty:
            self._going = False
            raise OutsizeError(f"the engine stands still: {self._engine.fault}") from None
        return self.heard

    def _ask(self, number: int) -> None:
        ask = self._setting.asks[number]
        self._keys[number] = self._engine.submit(ask, partial(self._told, number))

    def _told(self, number: int, one: Token | End) -> None:
        heard, setting = self.heard[number], self._setting
        if isinstance(one, End):
            heard.end = one
            self._over.put(number)
            waiting = [n for n, late in enumerate(setting.late) if late and n not in self._keys]
            for other in waiting if number == 0 and self._going else ():  # it has ended early
                self._ask(other)
            return
        heard.tokens.append(one)
        count = len(heard.tokens)
        if count == setting.cancelled[number]:
            self._engine.cancel(self._keys[number])
        for other, late in enumerate(setting.late):
            if number == 0 and late == count and other not in self._keys:
                self._ask(other)


def _alone(model: Model, ask: Ask, cache: str, session: Any = None) -> list[Token]:
    """What a request is told that nobody else is beside, on the worker that is asked."""
    tokens = needed(ask) + model.config.virtual
    room = Room(-(-tokens // 16), 16, 1, tokens, QUEUE, tokens, cache=cache)
    with Engine(model, room, POLICIES.get("mixed"), session) as engine:
        return list(engine.tokens(ask)) if engine.steps.leads else []


def _opened(setting: Setting, model: Decoder, stack: ExitStack, world: World) -> tuple[Model, Any]:
    """The model as it is served, and what plays its steps over weights that are in files, or on
    several workers."""
    if not setting.below and world.mesh.size == 1:
        return Model(model), None
    directory = setting.subject.directory
    if directory is None:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outsize-")))
        hub.save(model, directory)
    dtype, refused = getattr(torch, setting.precision), OutsizeError("no room")
    found = hub.describe(directory, setting.subject.config)
    if not setting.below:
        spread = OnMesh(found, world, dtype, "cpu")
        made = Model(spread.model, spread)
        stack.callback(made.close)
        return made, spread.session
    memory = setting.below * sum(one.nbytes for one in model.parameters())
    room = setting.room
    cache = f"{room.cache}+{room.lies}" if room.lies else room.cache
    wanted = Wanted(room.context, room.slots, room.budget, drafts=bool(setting.draft), cache=cache)
    for _ in range(20):  # up to what a step needs beside the weights
        found = hub.describe(directory, setting.subject.config)
        home = InFiles(found, Limits(int(memory)), dtype, "cpu", world)
        made = Model(home.model, home)
        try:
            plan = served(made, wanted)
        except OutsizeError as error:
            refused, memory = error, memory * 1.5
            made.close()
            continue
        stack.callback(made.close)
        return made, plan.session
    raise refused


def _served(setting: Setting, model: Model, session: Any) -> list[_Heard]:
    drafter: Callable[[], Drafter] | None = None
    if setting.draft:
        drafter = Wrong if setting.draft == "wrong" else DRAFTERS.get(setting.draft)
    policy = POLICIES.get(setting.policy)
    with _below(setting, model) as below:
        engine = Engine(model, setting.room, policy, session, drafter, below=below)
        return _heard(setting, engine)


@contextmanager
def _below(setting: Setting, model: Model) -> Iterator[Below | None]:
    """Where pages go that are pushed out: memory, or a disk."""
    room, dtype = setting.room, model.prologue.tokens.weight.dtype
    if not room.below:
        yield None
        return
    left = [one for block in typed(model.blocks) for one in block.mixer.states(dtype)]
    page = max(1, page_bytes(left, FORMS[room.cache], room.page))
    size = rounded(page) * room.below
    with tempfile.TemporaryDirectory(prefix="outsize-") as folder:
        store: Store = MemoryStore("host", size)
        if setting.seed % 2:
            store = DiskStore("disk", [Path(folder)], size, 1)
        timed = 2 * ROUNDS
        moves = setting.fails + timed if setting.fails else None
        yield Below([(Failing(store, moves), size)], page, str)


class Failing:
    """A Store whose bytes cannot be moved any more behind so many moves; None: it never fails."""

    def __init__(self, store: Store, moves: int | None) -> None:
        self._store, self._left = store, moves
        self.name, self.reserve, self.close = store.name, store.reserve, store.close

    @property
    def bytes_read(self) -> int:
        return self._store.bytes_read

    @property
    def bytes_written(self) -> int:
        return self._store.bytes_written

    def write(self, place: Place, data: torch.Tensor, at: int = 0) -> None:
        self._count()
        self._store.write(place, data, at)

    def read(self, place: Place, out: torch.Tensor, at: int = 0) -> None:
        self._count()
        self._store.read(place, out, at)

    def _count(self) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise OutsizeError(f"tier {self.name!r} is gone")


def _heard(setting: Setting, engine: Engine) -> list[_Heard]:
    try:
        if not engine.steps.leads:
            engine.start()
            return []
        heard = _Run(engine, setting)()
        if engine.fault is not None:
            raise OutsizeError(f"the engine has failed: {engine.fault}")
        left = engine.line.pages.left
        if left != setting.room.pages:
            raise OutsizeError(f"pages: {setting.room.pages - left} are nobody's and not free")
        return heard
    finally:
        engine.close()


# -- comparing -------------------------------------------------------------------------------------


def verified(setting: Setting) -> tuple[float, str]:
    """The largest difference of a log-probability in float64 (0 below it), and what is wrong, ""
    where nothing is."""
    dtype = getattr(torch, setting.precision)
    model = setting.subject.model(dtype)
    whole = Model(model)
    cache = setting.room.cache
    alone = [_alone(whole, ask, cache) for ask in setting.asks]
    heard, beside = _on_workers(setting, model)
    limit = LIMIT if setting.precision == EXACT else 0.0
    worst, cut = 0.0, bool(beside)
    alone = beside or alone
    for number, (ask, right, one) in enumerate(zip(setting.asks, alone, heard, strict=True)):
        fault = _unlike(one, right, setting.cancelled[number], limit)
        if not fault and setting.precision == EXACT:
            apart, fault = _plainly(setting.subject, ask, right)
            worst = max(worst, apart)
        elif not fault and not cut and FORMS[cache].exact(dtype):
            fault = _trained(whole, ask, right)
        if fault:
            return float("inf"), f"request {number}: {fault}"
    return worst, ""


def _on_workers(setting: Setting, model: Decoder) -> tuple[list[_Heard], list[list[Token]]]:
    """What the requests of a setting are told; and, where products are summed over workers below
    float64, what each is told alone on the same ones."""
    cut = setting.mesh.tensor > 1 and setting.precision != EXACT

    def work(world: World) -> tuple[list[_Heard], list[list[Token]]]:
        with ExitStack() as stack:
            made, session = _opened(setting, model, stack, world)
            asks = setting.asks if cut else ()
            heard = _served(setting, made, session)
            return heard, [_alone(made, ask, setting.room.cache, session) for ask in asks]

    if setting.mesh.size == 1:
        return work(Lone())
    return next(found for found in play(setting.mesh, work) if found[0])


def _unlike(heard: _Heard, right: list[Token], cancelled: int, limit: float) -> str:
    """How what a request was told differs from what it is told alone."""
    assert heard.end is not None, "it is over"
    if heard.end.reason == "error":
        return heard.end.error
    if heard.end.reason == "cancelled":
        right = right[: len(heard.tokens)]
    if not cancelled and len(heard.tokens) != len(right):
        return f"{counted(len(heard.tokens), 'token')}; alone it has {len(right)}"
    for place, (one, other) in enumerate(zip(heard.tokens, right, strict=True)):
        if one.id != other.id:
            return f"token {place} is {one.id}; alone it is {other.id}"
        if abs(one.logprob - other.logprob) > limit * max(1, abs(other.logprob)):
            return f"token {place} has log-probability {one.logprob!r}; alone {other.logprob!r}"
        if not limit and one.tops != other.tops:
            return f"token {place} has likeliest tokens {one.tops}; alone {other.tops}"
    return ""


def _text(model: Decoder, ask: Ask, right: Sequence[Token]) -> tuple[torch.Tensor, int]:
    """ids_T of a request and all that it is told but the last, and the row of its first draw."""
    ids = prompted((*ask.ids, *(one.id for one in right[:-1])), model.config.virtual)
    return torch.tensor(ids), len(ids) - len(right)


def _trained(model: Model, ask: Ask, right: Sequence[Token]) -> str:
    """How the forward pass of training that computes each token alone says otherwise."""
    ids_T, first = _text(model, ask, right)
    with rows.alone(), torch.no_grad():
        context = model.context(torch.arange(len(ids_T)), (0, len(ids_T)))
        logits_TV = model.epilogue.logits(model.hidden(ids_T, context))
    for place, one in enumerate(right):
        said = float(logprobs(logits_TV[first + place])[one.id])
        if said != one.logprob:
            return f"token {place} has log-probability {one.logprob!r}; in training {said!r}"
    return ""


@torch.no_grad()
def _plainly(subject: Subject, ask: Ask, right: Sequence[Token]) -> tuple[float, str]:
    """The largest difference from a plain loop in PyTorch, and what it draws otherwise."""
    model = simple(subject.model(torch.float64))
    ids_T, first = _text(model, ask, right)
    logits_TV = logits_of(model, ids_T, torch.arange(len(ids_T)), (0, len(ids_T)))
    worst = 0.0
    for place, one in enumerate(right):
        said = logits_TV[first + place]
        token, value = ask.sampler(said, place), float(logprobs(said)[one.id])
        if token != one.id:
            return float("inf"), f"token {place} is {one.id}; a plain loop draws {token}"
        worst = max(worst, abs(one.logprob - value) / max(1, abs(value)))
    fault = f"log-probabilities differ by {worst:.2g} from a plain loop's" if worst > LIMIT else ""
    return worst, fault


def outcomes(
    seeds: Iterable[int], subject: Subject | None, precision: str | None = None
) -> Iterator[Outcome]:
    """Draw and verify, seed by seed."""
    for seed in seeds:
        begin = time.perf_counter()
        setting = drawn(seed, subject, precision)
        try:
            worst, fault = verified(setting)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            worst = float("inf")
            fault = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        yield Outcome(setting, worst, fault, (), time.perf_counter() - begin)


def command(setting: Setting, target: str | None, precision: str | None) -> str:
    """What repeats a draw."""
    named = "" if target is None else f" {target}"
    more = "" if precision is None else f" --precision {precision}"
    return f"outsize verify{named} --serve --random 1 --seed {setting.seed}{more}"
