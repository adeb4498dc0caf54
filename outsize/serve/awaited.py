"""How long who comes now would wait, as foretold of all who are here: for his first token, and for
room in the queue. No tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from outsize.serve.policies import SLICING, Slicing, by_turns, prompt_first
from outsize.serve.request import Request, Shares, load_of
from outsize.serve.slo import Fits, Load, spans, wait
from outsize.serve.waiting import Waiting

if TYPE_CHECKING:
    from outsize.serve.line import Line


def full(line: Line, tokens: int, owner: str = "") -> bool:
    """Whether so many more of an owner than wait are too many. Where owners have turns, each may
    have an equal part of the queue, whoever else has filled it."""
    waiting = line.beside + line.queue.tokens
    if not waiting or waiting + tokens <= line.room.queue:
        return False
    own = line.queue.owners.get(owner, ())
    if not _slicing(line).shared or len(line.queue.owners) == bool(own):
        return True
    mine = sum(line.queue[key].tokens for key in own)
    return mine + tokens > line.room.queue / (len(line.queue.owners) + (not own))


def until_first(line: Line, tokens: int, owner: str = "") -> float:
    """Seconds until the first token of a prompt of so many, of an owner."""
    some = _ahead(line, tokens, owner) if _slicing(line).shared else line.requests.values()
    loads = [*_loads(line, some), Load(tokens + line.beside, 0.0)]
    fits = _fits(line)
    first = wait(line.room.price, loads, fits)
    if line.policy is prompt_first:  # as far as a promise leaves it so
        first = max(first, wait(line.room.price, loads, fits._replace(apart=True)))
    return line.drift.slowest * first


def _ahead(line: Line, tokens: int, owner: str) -> Iterator[Request]:
    """Who goes, and who waits and has his turn before an owner's next prompt of so many."""
    shares, requests, queue = Shares(dict(line.shares.had)), line.requests, line.queue
    shares.come(owner, {one.ask.owner for one in requests.values()})
    for one in line.going.values():
        yield one
        if one.key not in line.drawing:
            shares.take(one.ask.owner, one.tokens)
    new = Waiting(max(requests, default=0) + 1, tokens, owner=owner)
    owners = {**queue.owners, owner: [*queue.owners.get(owner, ()), new.key]}
    for each in by_turns(owners, lambda key: new if key == new.key else queue[key], shares.had):
        if each is new:
            return
        yield requests[each.key]


def until_room(line: Line, tokens: int) -> float:
    """Seconds until so many fewer wait that these may; until nobody does, where they are more than
    may ever wait."""
    loads = [*_loads(line, line.requests.values()), Load(line.beside, 0.0)]
    waiting = [one.prompt for one in loads if one.prompt and not one.begun]
    over = min(sum(waiting) + tokens - line.room.queue, sum(waiting))
    begin = [at for at, _ in spans(line.room.price, loads, _fits(line))][-len(waiting) :]
    gone = itertools.accumulate(waiting)
    enough = next(at for at, some in zip(begin, gone, strict=True) if some >= over)
    return line.drift.slowest * enough


def _fits(line: Line) -> Fits:
    room, slots = line.room, line.limits()[1]
    return Fits(room.budget, slots, room.slo.tpot / line.drift.slowest, _slicing(line).alone)


def _slicing(line: Line) -> Slicing:
    return SLICING.get(line.policy, Slicing())


def _loads(line: Line, some: Iterable[Request]) -> list[Load]:
    return [load_of(one, line.part_drawn, line.draws) for one in some]
