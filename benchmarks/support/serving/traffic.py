"""Requests that come by chance, drawn from a seed, and what was seen of each."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Wish:
    """at: seconds from the start; ids: the prompt; new: tokens that are drawn."""

    at: float
    ids: list[int]
    new: int


@dataclass(frozen=True)
class Reply:
    """sent, times: seconds from the start, of the request and of each event with text; status: of
    HTTP, 0 where the connection failed; retry: what Retry-After says, ""; text: that came;
    whole: the stream came to its end; used: tokens that the server says it drew."""

    sent: float
    status: int = 0
    retry: str = ""
    times: list[float] = field(default_factory=list)
    text: str = ""
    whole: bool = False
    used: int = 0
    error: str = ""

    @property
    def served(self) -> bool:
        return self.status == 200 and self.whole

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def tpot(self) -> float:
        """Mean seconds from token to token."""
        return (self.times[-1] - self.times[0]) / max(len(self.times) - 1, 1)

    @property
    def gaps(self) -> list[float]:
        return [two - one for one, two in zip(self.times, self.times[1:], strict=False)]

    def within(self, ttft: float, tpot: float) -> bool:
        return self.served and bool(self.times) and self.ttft <= ttft and self.tpot <= tpot


@dataclass(frozen=True)
class Lengths:
    """Tokens: the median and the ninetieth percentile of a log-normal law; the same number where
    both are one."""

    median: int
    ninth: int
    most: int = 1 << 30

    @classmethod
    def parse(cls, text: str, most: int = 1 << 30) -> Lengths:
        """Of "64" or "64:256"."""
        median, _, ninth = text.partition(":")
        return cls(int(median), int(ninth or median), most)

    def draw(self, chance: random.Random) -> int:
        sigma = math.log(self.ninth / self.median) / 1.2816
        return min(max(1, round(chance.lognormvariate(math.log(self.median), sigma))), self.most)


def wishes(
    count: int, rate: float, prompt: Lengths, new: Lengths, seed: int = 0,
    shared: Sequence[int] = (),
) -> list[Wish]:  # fmt: skip
    """So many a second by chance (a Poisson process), 0: all at once; the same ones, sooner or
    later, at every rate. shared: what every prompt begins with."""
    chance, at, found = random.Random(seed), 0.0, list[Wish]()
    for _ in range(count):
        at += chance.expovariate(1.0) / rate if rate else 0.0 * chance.random()
        ids = [*shared, *(chance.randrange(32, 127) for _ in range(prompt.draw(chance)))]
        found.append(Wish(at, ids, new.draw(chance)))
    return found


def slower(some: Sequence[Wish], times: float) -> list[Wish]:
    """The same, so many times as far apart."""
    return [replace(one, at=one.at * times) for one in some]


def asked(
    url: str, some: Sequence[Wish], at_once: int = 0, timeout: float = 600.0, key: str = ""
) -> list[Reply]:
    """What a process of its own sees that asks them of a server. at_once: so many always, in turn,
    whenever they are to come; 0: as they come. key: the server's."""
    with tempfile.TemporaryDirectory(prefix="outsize-asking-") as folder:
        job, answer = Path(folder, "job.json"), Path(folder, "answer.json")
        plain = {"url": url, "at_once": at_once, "timeout": timeout, "key": key,
                 "wishes": [asdict(one) for one in some]}  # fmt: skip
        job.write_text(json.dumps(plain), encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": str(HERE)}
        command = [sys.executable, "-m", "support.serving.asking", str(job), str(answer)]
        subprocess.run(command, env=environment, cwd=HERE, check=True)
        return [Reply(**one) for one in json.loads(answer.read_text(encoding="utf-8"))]


def percentile(values: Sequence[float], part: float) -> float:
    """The least value that so many are not above; NaN of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else math.nan
