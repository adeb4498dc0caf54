"""Traffic, and what serving it would be like: by playing it, under one policy or several."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from outsize.errors import OutsizeError, counted, expect
from outsize.serve.asks import Room
from outsize.serve.played import Arrival, Played, play
from outsize.serve.policies import POLICIES, chosen
from outsize.serve.slo import Slo, shown
from outsize.texts import read_text

REQUESTS = 1000  # that come at a rate
_TRIED = 250  # of them, for each candidate and rate that is tried
_WITHIN = 0.99  # of requests, and of tokens, in time where an SLO is kept
_STEPS = 7  # of the bisection
_BUDGETS = (1, 4)  # parts of the most tokens of a step that are tried
_FIELDS = {"at", "prompt", "output", "key"}
_LINE = (
    'expected {"at": SECONDS, "prompt": TOKENS, "output": TOKENS}, and "key": WHO if several ask'
)


def steady(rate: float, prompt: int, output: int, requests: int = REQUESTS) -> list[Arrival]:
    """Requests alike that come by chance (a Poisson process), so many a second. OutsizeError for
    numbers that are none."""
    expect(math.isfinite(rate) and rate > 0, "--rate", rate, "more than 0 requests a second")
    expect(prompt > 0, "--prompt", prompt, "1 token or more")
    expect(output > 0, "--output", output, "1 token or more")
    chance, at, found = random.Random(0), 0.0, list[Arrival]()
    for _ in range(requests):
        at += chance.expovariate(rate)
        found.append(Arrival(at, prompt, output))
    return found


def traffic_in(path: Path) -> list[Arrival]:
    """Of a file, a line of JSON for each request, in any order. OutsizeError with the line of what
    is none."""
    if not path.is_file():
        raise OutsizeError(f"--traffic {path} is no file; {_LINE}, a line each")
    found = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if line.strip():
            found.append(_arrival(line, f"{path}:{number}"))
    if not found:
        raise OutsizeError(f"--traffic {path} has no request; {_LINE}, a line each")
    return sorted(found, key=lambda one: one.at)


def _arrival(line: str, where: str) -> Arrival:
    try:
        said: Any = json.loads(line)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise OutsizeError(f"{where}: not a JSON object; {_LINE}")
    if unknown := sorted(set(said) - _FIELDS):
        raise OutsizeError(f"{where}: {unknown[0]!r} is not known; {_LINE}")
    at, key = said.get("at"), said.get("key", "")
    if not isinstance(at, int | float) or at is True or not 0 <= at < math.inf:
        raise OutsizeError(f"{where}: at is {at!r}; expected seconds, 0 or more")
    for name in ("prompt", "output"):
        count = said.get(name)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise OutsizeError(f"{where}: {name} is {count!r}; expected 1 token or more")
    if not isinstance(key, str):
        raise OutsizeError(f"{where}: key is {key!r}; expected a text")
    return Arrival(float(at), said["prompt"], said["output"], key)


def check(arrivals: Sequence[Arrival], room: Room) -> None:
    """OutsizeError for a request that there is no room for."""
    most, limit = max(arrivals, key=_tokens), min(room.context, room.pages * room.page)
    if _tokens(most) > limit:
        raise OutsizeError(
            f"a prompt of {most.prompt:,} and {most.new:,} new tokens; a request has room for"
            f" {limit:,}: ask for fewer"
        )


def _tokens(one: Arrival) -> int:
    return one.prompt + one.new - 1


@dataclass(frozen=True)
class Outcome:
    """Of a traffic. ttft, tpot: seconds at p50 and p99, of the requests that were let in and of
    their tokens but the first; within: the part of all requests that had their first token and, on
    average, each further one in time; early: their first one; rate, tokens: requests and new tokens
    a second."""

    ttft: tuple[float, float]
    tpot: tuple[float, float]
    within: float
    early: float
    rate: float
    tokens: float
    refused: int
    interrupted: int
    steps: int

    def __str__(self) -> str:
        return (
            f"to the first token {shown(self.ttft[0])} at p50, {shown(self.ttft[1])} at p99; to the"
            f" next {shown(self.tpot[0])} and {shown(self.tpot[1])}"
        )

    def keeps(self, slo: Slo) -> bool:
        """Whether 99 of a hundred first tokens, and of further ones, came in time; who was refused
        had none."""
        return self.early >= _WITHIN and self.tpot[1] <= slo.tpot


def outcome(played: Played, slo: Slo) -> Outcome:
    there = [one for one in played.fates if not one.refused]
    begin = played.fates[0].arrival.at
    span = max(played.end - begin, 1e-9)
    first = np.array([one.ttft for one in there] or [math.nan])
    return Outcome(
        (float(np.percentile(first, 50)), float(np.percentile(first, 99))),
        _weighed(played.gaps),
        sum(one.within(slo) for one in played.fates) / len(played.fates),
        sum(one.ttft <= slo.ttft for one in there) / len(played.fates),
        len(there) / span,
        sum(one.arrival.new for one in there) / span,
        len(played.fates) - len(there),
        played.interrupted,
        played.steps,
    )


def _weighed(gaps: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """p50 and p99 of values that come so often; 0 of none."""
    if not gaps:
        return 0.0, 0.0
    values, counts = (np.array(each) for each in zip(*sorted(gaps), strict=True))
    below = np.cumsum(counts)
    half, most = (values[np.searchsorted(below, part * below[-1])] for part in (0.5, 0.99))
    return float(half), float(most)


@dataclass(frozen=True)
class Way:
    """A policy and most tokens of a step, and what came of them."""

    policy: str
    budget: int
    outcome: Outcome

    def __str__(self) -> str:
        return f"{self.policy} in steps of {counted(self.budget, 'token')}"


def ways(
    room: Room, arrivals: Sequence[Arrival], policies: Iterable[str], smaller: bool = True
) -> list[Way]:
    """The best first: those that keep the SLO, then by requests within it, in whole percents, then
    by the seconds to the first token and the next, at p99. smaller: steps of fewer tokens are tried
    too."""
    some = arrivals[:_TRIED]
    found, parts = list[Way](), _BUDGETS if smaller else (1,)
    for policy in policies:
        for budget in dict.fromkeys(max(1, room.budget // part) for part in parts):
            played = play(replace(room, budget=budget), chosen(policy, room.slo), some)
            found.append(Way(policy, budget, outcome(played, room.slo)))
    return sorted(found, key=lambda way: worth(way, room.slo))


def worth(way: Way, slo: Slo) -> tuple[bool, float, float]:
    """Less is better."""
    found = way.outcome
    late = found.ttft[1] * max(found.tpot[1], 1e-9)
    return not found.keeps(slo), -round(found.within, 2), late


def candidates(policy: str | None, slo: Slo) -> tuple[str, ...]:
    """The policies that may be chosen: the one that is said, or all that go with the SLO."""
    if policy is not None:
        chosen(policy, slo)
        return (policy,)
    return tuple(name for name in POLICIES.names() if slo or name != "deadline")


def why(best: Way, other: Way, slo: Slo) -> str:
    """What the second one is worse at."""
    one, two = best.outcome, other.outcome
    if one.keeps(slo) and not two.keeps(slo):
        late = two.tpot[1] > slo.tpot
        what = f"a token of a hundred after {shown(two.tpot[1])}" if late else "first tokens late"
        return f"{what}, with {two.within:.0%} of requests within the SLO"
    if slo and round(one.within, 2) > round(two.within, 2):
        return f"{two.within:.0%} of requests within the SLO, not {one.within:.0%}"
    return (
        f"at p99 {shown(two.ttft[1])} to the first token and {shown(two.tpot[1])} to the next, not"
        f" {shown(one.ttft[1])} and {shown(one.tpot[1])}"
    )


def most(room: Room, arrivals: Sequence[Arrival], way: Way) -> float:
    """The most requests a second with which the SLO is kept; without one, where somebody always
    waits. 0 where it is not kept of single ones either."""
    room, policy = replace(room, budget=way.budget), chosen(way.policy, room.slo)
    some = arrivals[:_TRIED]
    asked = (len(some) - 1) / max(some[-1].at - some[0].at, 1e-9)
    full = replace(room, queue=1 << 60, slo=Slo())
    limit = outcome(play(full, policy, [replace(one, at=0.0) for one in some]), room.slo).rate
    if not room.slo:
        return limit

    def kept(rate: float) -> bool:
        slower = [replace(one, at=one.at * asked / rate) for one in some]
        return outcome(play(room, policy, slower), room.slo).keeps(room.slo)

    return _last(kept, 2 * limit)


def _last(kept: Callable[[float], bool], high: float) -> float:
    """The highest rate that is kept, by bisection of the logarithm; 0 where none is."""
    low, found = high / 2**10, 0.0
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        if kept(middle):
            low = found = middle
        else:
            high = middle
    return found
