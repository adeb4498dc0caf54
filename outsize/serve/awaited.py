"""How long who comes now would wait, as foretold of all who are here: for his first token, and for
room in the queue. No tensors."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from outsize.serve.policies import SLICING, Slicing
from outsize.serve.request import load_of
from outsize.serve.slo import Load, spans, wait

if TYPE_CHECKING:
    from outsize.serve.line import Line


def full(line: Line, tokens: int) -> bool:
    """Whether so many more than wait are too many."""
    waiting = line.beside + line.queue.tokens
    return waiting > 0 and waiting + tokens > line.room.queue


def until_first(line: Line, tokens: int) -> float:
    """Seconds until the first token of a prompt of so many."""
    loads = [*_loads(line), Load(tokens + line.beside, 0.0)]
    return line.drift.slowest * wait(line.room.price, loads, *_fits(line))


def until_room(line: Line, tokens: int) -> float:
    """Seconds until so many fewer wait that these may; until nobody does, where they are more than
    may ever wait."""
    loads = [*_loads(line), Load(line.beside, 0.0)]
    waiting = [one.prompt for one in loads if one.prompt and not one.begun]
    over = min(sum(waiting) + tokens - line.room.queue, sum(waiting))
    begin = [at for at, _ in spans(line.room.price, loads, *_fits(line))][-len(waiting) :]
    gone = itertools.accumulate(waiting)
    enough = next(at for at, some in zip(begin, gone, strict=True) if some >= over)
    return line.drift.slowest * enough


def _fits(line: Line) -> tuple[int, int, float, bool]:
    """Tokens of a step, requests at once, and seconds of a step as it is foretold, at most; whether
    no step feeds two prompts."""
    room, alone = line.room, SLICING.get(line.policy, Slicing()).alone
    return room.budget, line.limits()[1], room.slo.tpot / line.drift.slowest, alone


def _loads(line: Line) -> list[Load]:
    return [load_of(one, line.part_drawn, line.draws) for one in line.requests.values()]
