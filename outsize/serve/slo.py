"""What clients are promised: seconds to the first token and for each further one, and what a step
may hold, and who may come, so that it is kept. Pure, by foretold seconds."""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outsize.errors import OutsizeError
from outsize.serve.price import Price

_UNITS = {"ms": 1e-3, "s": 1.0}
_KEEP = 0.9  # of what was thought of steps before
_ROUNDED = 1e-9  # of steps
_WIDE = 2.0  # times how far steps are from their average, beyond which few are
_WILD = 4.0  # times the mean, beyond which a step says no more
_SAID = "expected ttft=500ms,tpot=50ms, or one of them; units: ms, s"


@dataclass(frozen=True)
class Slo:
    """Seconds at most: ttft, from a request's coming to its first token; tpot, from each token to
    the next."""

    ttft: float = math.inf
    tpot: float = math.inf

    def __str__(self) -> str:
        said = [("ttft", self.ttft), ("tpot", self.tpot)]
        return ",".join(f"{name}={shown(x)}" for name, x in said if x < math.inf)

    def __bool__(self) -> bool:
        return min(self.ttft, self.tpot) < math.inf


NONE = Slo()


def parse_slo(text: str, what: str = "--slo") -> Slo:
    """Of "ttft=500ms,tpot=50ms". OutsizeError, naming `what`, for anything else."""
    found = dict[str, float]()
    for part in text.split(","):
        said = re.fullmatch(r"\s*(ttft|tpot)\s*=\s*([0-9.]+)\s*(ms|s)\s*", part)
        try:
            seconds = float(said[2]) * _UNITS[said[3]] if said else 0.0
        except ValueError:
            seconds = 0.0
        if said is None or not seconds:
            raise OutsizeError(f"{what} {text}: {part.strip()!r} is none; {_SAID}")
        if said[1] in found:
            raise OutsizeError(f"{what} {text}: {said[1]} is given twice; give it once")
        found[said[1]] = seconds
    return Slo(**found)


def shown(seconds: float) -> str:
    """As 50ms or 2.5s."""
    return f"{seconds:.3g}s" if seconds >= 1 else f"{seconds * 1e3:.3g}ms"


def unkept(slo: Slo, price: Price, prompt: int, budget: int) -> list[str]:
    """What even a request that is alone would not be given: lines, none where all is kept."""
    first, token = price.alone(prompt, budget), price.next(prompt)
    said = []
    if first > slo.ttft:
        said.append(
            f"ttft={shown(slo.ttft)} cannot be kept: alone, a prompt of {prompt} takes about"
            f" {shown(first)}"
        )
    if token > slo.tpot:
        said.append(
            f"tpot={shown(slo.tpot)} cannot be kept: alone, a token takes about {shown(token)}"
        )
    return said


@dataclass
class Drift:
    """How long steps take beside what is foretold, of late. mean: times; wide: how far they are
    from that."""

    mean: float = 1.0
    wide: float = 0.0

    @property
    def slowest(self) -> float:
        """Times what is foretold that few steps take longer than."""
        return self.mean + _WIDE * self.wide

    def take(self, times: float) -> None:
        """A step took so many times what was foretold."""
        now = min(max(times, self.mean / _WILD), self.mean * _WILD)
        self.wide = _KEEP * self.wide + (1 - _KEEP) * abs(now - self.mean)
        self.mean = _KEEP * self.mean + (1 - _KEEP) * now


class Load(NamedTuple):
    """Of a request that is here. prompt: tokens to be fed before it draws; new: that it is expected
    to draw; start: tokens in pages; begun: whether it goes; more: seconds that a draw of it takes
    beyond the likeliest token's."""

    prompt: int
    new: float
    start: int = 0
    begun: bool = False
    more: float = 0.0


class Fits(NamedTuple):
    """What steps hold. budget: tokens at most; slots: requests that go at once; tpot: seconds at
    most; alone: no step feeds two prompts; apart: none that feeds prompts feeds who draws."""

    budget: int
    slots: int
    tpot: float = math.inf
    alone: bool = False
    apart: bool = False


def wait(price: Price, loads: Sequence[Load], fits: Fits) -> float:
    """Foretold seconds until the last of these, who comes now, has its first token; 0 of none."""
    return max((first for _, first in spans(price, loads, fits)), default=0.0)


def spans(price: Price, loads: Sequence[Load], fits: Fits) -> list[tuple[float, float]]:
    """Foretold seconds until each of those whose prompt waits begins to be fed, and until it has
    its first token, at the end of a step; of those that go come first. Prompts are fed one after
    another in whole steps, in the order of their coming, beside the tokens of those before them;
    who waits for a slot has it when the first of those before it ends, and meanwhile steps feed
    nobody's prompt, and are short. Where prompts are fed apart who draws comes no further then, and
    one that has waited for its slot is in a step of its own."""
    going = [one for one in loads if one.begun]
    drawing = [one for one in going if not one.prompt]
    waiting = sorted((x for x in loads if x.prompt), key=lambda x: not x.begun)
    steps_of = _StepsOf(price, drawing, fits, sum(one.prompt for one in waiting))
    ends, free = [one.new for one in drawing], max(0, fits.slots - len(going))
    heapq.heapify(ends)
    steps, now, found = 0.0, 0.0, list[tuple[float, float]]()
    parts = 0.0  # of steps that feed prompts apart
    for one in waiting:
        while ends and ends[0] <= steps:
            heapq.heappop(ends)
            free += 1
        waits = not (one.begun or free)
        if waits:
            short = steps_of.short(len(ends))
            at = heapq.heappop(ends) if ends else steps
            steps, now, free = at, now + (at - steps) * short, 1
        free -= not one.begun
        if waits and fits.apart:
            begins, now = now, now + price.alone(one.prompt, fits.budget)
            heapq.heappush(ends, steps + one.new)
            found.append((begins, now))
            continue
        left, full = steps_of.full(0 if fits.apart else len(ends))
        begins, takes = now, one.prompt / left
        takes = math.ceil(takes) if fits.alone else takes
        now += takes * full
        steps, parts = (steps, parts + takes) if fits.apart else (steps + takes, parts)
        heapq.heappush(ends, steps + one.new)
        begun = parts if fits.apart else steps
        found.append((begins, now + (math.ceil(begun - _ROUNDED) - begun) * full))
    return found


class _StepsOf:
    """Tokens of prompts in a step beside so many who draw, and its seconds. most: tokens of prompts
    that there are."""

    def __init__(self, price: Price, drawing: Sequence[Load], fits: Fits, most: int) -> None:
        self._price, self._fits, self._most = price, fits, most
        deep = price.seen([(one.start, 1, True) for one in drawing])[2]
        deep += sum(one.more for one in drawing)
        self._each = deep / max(len(drawing), 1)
        self._full = dict[int, tuple[int, float]]()

    def short(self, some: int) -> float:
        return self._price.step(max(1, some), max(1, some), some * self._each)

    def full(self, some: int) -> tuple[int, float]:
        if some not in self._full:
            price, deep, budget = self._price, some * self._each, self._fits.budget
            if some and (tpot := self._fits.tpot) < math.inf:
                budget = price.most(tpot, min(some, budget), budget, deep, 0)
            left = max(1, min(budget - some, self._most))
            seconds = price.step(some + left, some + 1, deep + price.past(0, left))
            self._full[some] = left, seconds
        return self._full[some]


def limits(
    price: Price,
    tpot: float,
    drawing: Sequence[int],
    depth: int,
    budget: int,
    slots: int,
    more: float = 0.0,
) -> tuple[int, int]:
    """Tokens of a step, of `budget`, and requests at once, of `slots`, with which a step takes
    `tpot` seconds at most; one of each whatever it takes. drawing: tokens in pages of each who
    draws; depth: the most of those whose prompt is not through; more: seconds that their draws take
    beyond the likeliest tokens'."""
    if not drawing:
        return budget, slots  # nobody waits for a next token
    past = price.seen([(start, 1, True) for start in drawing])[2] + more
    tokens = price.most(tpot, min(len(drawing), budget), budget, past, depth)
    return tokens, price.beside(tpot, slots, max(drawing), more / len(drawing))
