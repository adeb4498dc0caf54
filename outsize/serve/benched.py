"""What published serving was asked, where its table leaves it out (foresight/data/served.yaml).

A load has requests of unlike lengths; a server that was not started anew between two runs reports
the means of both. Facts of how it was measured: no achieved figure is read here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import yaml

from outsize.foresight.runs import data
from outsize.serve.played import Arrival

SHIPPED = "served.yaml"
TRACE = 1000  # requests, where only the sums of their tokens are known


@dataclass(frozen=True)
class Load:
    """rate: requests a second; requests: of the whole run, which weigh it beside others; prompt,
    output: mean tokens; lengths: of prompts in equal parts, by their mean; (): all alike."""

    rate: float
    requests: float
    prompt: float
    output: float
    lengths: tuple[float, ...] = ()

    def arrivals(self, count: int) -> list[Arrival]:
        """Requests that come by chance (a Poisson process), the same for the same load."""
        chance, at, lengths, found = random.Random(0), 0.0, self._lengths(), list[Arrival]()
        for _ in range(count):
            at += chance.expovariate(self.rate)
            prompt = max(1, round(next(lengths) * self.prompt))
            found.append(Arrival(at, prompt, max(1, round(self.output))))
        return found

    def _lengths(self) -> Iterator[float]:
        """All of them in one order by chance, then in another."""
        chance, left = random.Random(1), list(self.lengths) or [1.0]
        while True:
            chance.shuffle(left)
            yield from left


@dataclass(frozen=True)
class Bench:
    """What is known of a row: its load, and those that its server had before. known: whether its
    source is; if so, seconds between tokens were divided by all tokens, the first one too."""

    load: Load
    before: tuple[Load, ...] = ()
    known: bool = False


@cache
def _facts() -> Mapping[str, Any]:
    found: Mapping[str, Any] = yaml.safe_load(data(SHIPPED))
    return found


def model_of(source: str, model: str) -> tuple[str, str] | None:
    """Name and precision of a model that a row leaves open, where its source says them."""
    for part, known in _facts().get(source, {}).get("models", {}).items():
        if part in model.lower():
            return known["name"], known["precision"]
    return None


@dataclass(frozen=True)
class Sums:
    """Tokens of all prompts and of all answers. one: of one copy of several."""

    prompts: float
    outputs: float
    one: bool


def bench(
    source: str, model: str, workload: str, layout: tuple[int, int], sums: Sums, rate: float
) -> Bench:
    """Of a row. layout: workers of a tensor axis, copies; rate: requests a second of all copies."""
    tensor, copies = layout
    facts = _facts().get(source, {})
    family = next((one for one in facts.get("loads", {}) if one in model.lower()), "")
    loads = facts.get("loads", {}).get(family, {})
    if workload not in loads:
        each = TRACE / (copies if sums.one else 1)
        alike = Load(rate / copies, each, max(1, sums.prompts / each), max(1, sums.outputs / each))
        return Bench(alike)
    mine = _load(loads[workload], copies, rate)
    count = mine.requests if sums.one else mine.requests * copies
    mine = replace(mine, prompt=max(1, sums.prompts / count), output=max(1, sums.outputs / count))
    place = {"family": family, "tensor": tensor, "copies": copies}
    for server in facts["servers"]:
        runs = server["runs"]
        if {key: server[key] for key in place} == place and [workload, rate] in runs:
            earlier = runs[: runs.index([workload, rate])]
            before = tuple(_load(loads[name], copies, at) for name, at in earlier)
            return Bench(mine, before, True)
    return Bench(mine, (), True)


def _load(known: Mapping[str, Any], copies: int, rate: float) -> Load:
    """Of one of so many copies."""
    requests, prompts = known["requests"], known["prompts"]
    if isinstance(requests, Mapping):
        requests = requests.get(copies, max(requests.values()))
    mean, output = known["tokens"]
    middle = sum(prompts) / len(prompts)
    lengths = tuple(prompt / middle for prompt in prompts)
    return Load(rate / copies, requests / copies, mean, output, lengths)
