"""The steps of serving, on every worker: told by the one that has the requests, played by all.

Of a step the others are told which pages, places and tokens it feeds, in one message of six numbers
a request, its new pages and a number a token (Yu et al., "Orca", 2022, send control messages beside
tensors likewise). Requests are where tokens are drawn, so that none has to be brought back.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from enum import IntEnum

import torch
from torch import Tensor

from outsize.collectives import Collective, Mesh, everyone
from outsize.decode.caches import CACHES
from outsize.decode.generate import Draw
from outsize.decode.paged import PagedCache, PagedPast, Part
from outsize.decode.runs import runs_of
from outsize.errors import counted
from outsize.kernels import rows
from outsize.launch.heartbeat import Heartbeat
from outsize.runtime.session import Session
from outsize.serve.asks import Room
from outsize.serve.model import Model

BEAT = 10.0  # seconds of rest after which the others hear of it: nobody waits for longer
_FACTS = 6  # numbers of a part beside its pages


class Do(IntEnum):
    """What a message asks for."""

    END = 0
    REST = 1
    FEED = 2
    SCORE = 3
    SEE = 4


Said = tuple[Do, tuple[Part, ...], list[int]]


def front(mesh: Mesh) -> int:
    """The rank of the worker that has the requests: the first of those with the last stage."""
    return mesh.ranks("pipeline", 0)[-1]


def message(room: Room) -> int:
    """Bytes of a message: enough for most steps, which take as many new pages as their tokens
    need, and one more for each request at most."""
    pages = room.budget // room.page + room.slots
    return array("i").itemsize * (4 + _FACTS * room.slots + pages + room.budget)


class Tables:
    """The pages of each slot as they were told last: what is told is what is new of them."""

    def __init__(self, slots: int) -> None:
        self._pages = [list[int]() for _ in range(slots)]

    def numbers(self, do: Do, parts: Sequence[Part], ids: Sequence[int]) -> array[int]:
        """A message, its length first."""
        found = [0, do, len(parts), len(ids)]
        for pages, start, tokens, ahead, slot in parts:
            known = self._pages[slot]
            kept = len(known) if pages[: len(known)] == known else 0
            found += (slot, start, tokens, ahead, kept, len(pages) - kept)
            if kept < len(pages):
                found += pages[kept:]
                known[kept:] = pages[kept:]
        found += ids
        found[0] = len(found)
        return array("i", found)

    def said(self, numbers: list[int]) -> Said:
        """What a message says."""
        _, do, count, tokens = numbers[:4]
        parts, at = list[Part](), 4
        for _ in range(count):
            slot, start, fed, ahead, kept, new = numbers[at : at + _FACTS]
            at += _FACTS
            pages = self._pages[slot]
            pages[kept:] = numbers[at : at + new]
            at += new
            parts.append(Part(pages, start, fed, ahead, slot))
        return Do(do), tuple(parts), numbers[at : at + tokens]


class Told:
    """The way from the worker that has the requests to the others: a broadcast of as many numbers
    as most steps have, and one of the rest where there are more. bytes: that each had so far."""

    def __init__(self, group: Collective, source: int, room: Room) -> None:
        self._group, self._source = group, source
        self._tables = Tables(room.slots + 1)
        self._most = message(room) // array("i").itemsize
        self.bytes = 0

    def say(self, do: Do, parts: Sequence[Part] = (), ids: Sequence[int] = ()) -> None:
        numbers = self._tables.numbers(do, parts, ids)
        numbers.extend((0,) * (self._most - len(numbers)))
        said_N = torch.frombuffer(numbers, dtype=torch.int32)
        self._pass(said_N[: self._most])
        self._pass(said_N[self._most :])

    def hear(self) -> Said:
        first_N = self._pass(torch.empty(self._most, dtype=torch.int32))
        count = int(first_N[0])
        rest_N = self._pass(first_N.new_empty(max(0, count - self._most)))
        return self._tables.said([*first_N.tolist(), *rest_N.tolist()][:count])

    def _pass(self, numbers_N: Tensor) -> Tensor:
        if numbers_N.numel():
            self.bytes += numbers_N.nbytes
            self._group.broadcast(numbers_N, self._source)
        return numbers_N


def _cache(room: Room) -> PagedCache:
    """For all that go at once, and one text that is looked at."""
    if room.lies:
        lying = CACHES.get(room.lies)
        return lying.cache(room.page, room.slots + 1, room.context, room.cache)
    return PagedCache(room.pages, room.page, room.slots + 1, room.cache)


class Steps:
    """Plays the steps of a served model, with what this worker keeps of its tokens: pages of the
    layers and heads that are here. leads: whether this is the worker that has the requests; the
    others `follow`. session: what plays them over weights that are not in memory as a whole; runs:
    what takes blocks together where they are."""

    def __init__(
        self, model: Model, room: Room, session: Session | None, pulse: Heartbeat | None = None
    ) -> None:
        assert (model.home is None) == (session is None), "who has the weights plays the steps"
        self._cache = _cache(room)
        self._own, self._model = session is None, model
        self.runs = runs_of(model) if session is None else None
        self._session = session or Session(model, run=self.runs)
        self._device = model.prologue.tokens.weight.device
        self._pulse = pulse or Heartbeat()
        self.leader, self.leads, self.told = 0, True, None
        if model.home is not None and model.home.world.mesh.size > 1:
            world = model.home.world
            self.leader = front(world.mesh)
            self.leads = world.rank == self.leader
            self.told = Told(everyone(world, "agreement"), self.leader, room)
            self._session.keep()

    @property
    def bytes(self) -> int:
        """Of the pages and states that have been used by now."""
        return self._cache.bytes

    def page(self, page: int) -> list[Tensor]:
        """What it holds, of the layers that are here, each contiguous."""
        return [x[page] for x in self._cache.tensors]

    def hold(self, pages: Mapping[int, int]) -> None:
        """By the place of a request, the pages that have memory from now on."""
        self._cache.hold(pages)

    def feed(self, parts: Sequence[Part], ids: Sequence[int], draws: Sequence[Draw]) -> None:
        """A step that draws. All else is told by then."""
        self._say(Do.FEED, parts, ids)
        self._feed(parts, ids, draws)

    def look(self, part: Part, ids: Sequence[int], hidden: bool) -> Tensor:
        """logits_TV of some tokens of a text, or h_TE, what the head would multiply."""
        do = Do.SEE if hidden else Do.SCORE
        self._say(do, (part,), ids)
        return self._look(do, part, ids)

    def idle(self) -> float | None:
        """Nobody asks; gives the seconds after which the others are to hear of it."""
        if self.told is None:
            return None
        self._pulse.wait("requests")
        return BEAT

    def rest(self) -> None:
        """The others have waited for long."""
        self._say(Do.REST)

    def end(self) -> None:
        """The last word to those that follow."""
        self._say(Do.END)

    def renew(self) -> None:
        """The weights, which are in memory, are others, or lie elsewhere."""
        assert self._own, "who has the weights would know"
        self._session.close()
        self.runs = runs_of(self._model)
        self._session = Session(self._model, run=self.runs)

    def close(self) -> None:
        if self._own:
            self._session.close()

    def follow(self) -> None:
        """Play what is told, on the calling thread, until the end is."""
        assert self.told is not None and not self.leads, "who leads has nobody to follow"
        self._pulse.at("serving")
        with torch.no_grad(), rows.alone():
            while self._heard(self.told):
                pass

    def _heard(self, told: Told) -> bool:
        """One message; whether more follow."""
        do, parts, ids = told.hear()
        self._at(ids)
        match do:
            case Do.FEED:
                self._feed(parts, ids, ())
            case Do.SCORE | Do.SEE:
                self._look(do, parts[0], ids)
        return do is not Do.END

    def _say(self, do: Do, parts: Sequence[Part] = (), ids: Sequence[int] = ()) -> None:
        if self.told is not None:
            self._at(ids)
            self.told.say(do, parts, ids)

    def _at(self, ids: Sequence[int]) -> None:
        self._pulse.at(f"a step of {counted(len(ids), 'token')}" if ids else "serving")

    def _feed(self, parts: Sequence[Part], ids: Sequence[int], draws: Sequence[Draw]) -> None:
        past = self._past(parts)
        place = past.positions(self._device)
        self._session(torch.tensor(ids), place, past.bounds, past, draws)
        self._session.forget()

    def _look(self, do: Do, part: Part, ids: Sequence[int]) -> Tensor:
        past, steps = self._past((part,)), self._session.steps
        look = steps.hidden if do is Do.SEE else steps.logits
        return look(torch.tensor(ids), past.positions(self._device), past.bounds, past)

    def _past(self, parts: Sequence[Part]) -> PagedPast:
        for part in parts:
            if not part.start:  # a sequence begins there
                self._cache.clear(part.slot)
        return PagedPast(self._cache, tuple(parts))
