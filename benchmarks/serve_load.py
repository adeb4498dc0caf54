"""An outside client's load on `outsize serve`, beside peers that speak the same API.

Requests come by chance from a seed (Poisson), with lengths by a log-normal law, asked by a process
of its own over HTTP. Parts: goodput by rate, the front end's share, a shared prefix, overload.
The exit code is 1 where a target is missed. See README.md.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from support.figures import markdown
from support.serving.models import SHAPES, made
from support.serving.server import Server, ended_too
from support.serving.traffic import Lengths, Reply, Wish, asked, percentile, wishes
from support.turns import QUIET, busy

OURS, FASTER, IN_TIME = "outsize", 1.1, 0.99
FRONT, STREAMS = 0.05, 64  # of the time, at so many streams
PREFIX, SHORTER = 2000, 8.0
OVER, ACCEPTED, AFTER, SLOWER = 10.0, 0.95, 2.0, 1.5
LEVEL = 1.02  # times the memory of the first quarter
PARTS = ("goodput", "front", "prefix")


@dataclass(frozen=True)
class Load:
    """What is asked. ttft, tpot: seconds that are promised; count: requests of one rate."""

    prompt: Lengths
    new: Lengths
    ttft: float
    tpot: float
    count: int

    def some(self, count: int = 0, rate: float = 0.0, seed: int = 0) -> list[Wish]:
        return wishes(count or self.count, rate, self.prompt, self.new, seed)

    def capacity(self, url: str, at_once: int) -> float:
        """Requests a second that are answered where so many always wait."""
        replies = asked(url, self.some(max(self.count // 2, 2 * at_once), seed=1), at_once)
        there = [one for one in replies if one.served and one.times]
        return len(there) / (max(one.times[-1] for one in there) - replies[0].sent)

    def within(self, replies: Sequence[Reply]) -> float:
        """The part that was in time."""
        return sum(one.within(self.ttft, self.tpot) for one in replies) / max(len(replies), 1)


def answered(replies: Sequence[Reply]) -> Sequence[Reply]:
    """All of them. SystemExit where one was not."""
    for one in replies:
        if not one.served or not one.times:
            raise SystemExit(f"a request was not answered: {one.status} {one.error}")
    return replies


@dataclass
class Verdicts:
    """What was found, by part, and whether all targets were met."""

    found: dict[str, Any]
    good: bool = True

    def say(self, met: bool, line: str) -> None:
        print(f"{'met' if met else 'MISSED'}: {line}", flush=True)
        self.good = self.good and met


def goodput(load: Load, urls: dict[str, str], rates: Sequence[float], told: Verdicts) -> None:
    """By contender and rate, requests a second that were in time, those refused among the late."""
    most, rows = dict[str, float](), list[dict[str, Any]]()
    for name, url in urls.items():
        asked(url, load.some(4, seed=9), 1)
        for rate in rates:
            replies = asked(url, load.some(rate=rate))
            span = max((one.times[-1] for one in replies if one.times), default=1.0)
            part, there = load.within(replies), [one for one in replies if one.served and one.times]
            good = part * len(replies) / span
            most[name] = max(most.get(name, 0.0), good)
            firsts, each = [one.ttft for one in there], [one.tpot for one in there]
            rows.append({
                "name": name, "rate": rate, "goodput": good, "within": part,
                "ttft": (percentile(firsts, 0.5), percentile(firsts, 0.99)),
                "tpot": (percentile(each, 0.5), percentile(each, 0.99)),
                "refused": sum(one.status == 429 for one in replies),
            })  # fmt: skip
    head = ("contender", "asked a second", "in time a second", "in time", "TTFT p50, p99",
            "TPOT p50, p99", "refused")  # fmt: skip
    print(markdown(head, [
        (x["name"], f"{x['rate']:.2f}", f"{x['goodput']:.2f}", f"{x['within']:.0%}",
         "{:.0f}, {:.0f} ms".format(*(1e3 * y for y in x["ttft"])),
         "{:.1f}, {:.1f} ms".format(*(1e3 * y for y in x["tpot"])), f"{x['refused']}")
        for x in rows
    ]))  # fmt: skip
    told.found["goodput"] = {"most": most, "rows": rows}
    if others := {name: rate for name, rate in most.items() if name != OURS}:
        best = max(others, key=others.__getitem__)
        ratio = most[OURS] / others[best] if others[best] else float("inf")
        told.say(ratio >= FASTER, f"{ratio:.2f}x the goodput of {best}; at least {FASTER}x")


def front(load: Load, server: Server, told: Verdicts) -> None:
    """The part of the time in which no step is made, while STREAMS requests always are there."""
    some = [Wish(0.0, one.ids, load.new.median * 2) for one in load.some(2 * STREAMS, seed=3)]
    before, began, spent = server.metrics, time.perf_counter(), server.processor()
    replies = answered(asked(server.url, some, STREAMS))
    wall, after = time.perf_counter() - began, server.metrics
    api, rest = (b - a for a, b in zip(spent, server.processor(), strict=True))
    wall = max(one.times[-1] for one in replies) - min(one.sent for one in replies)
    share = 1 - (after["busy"] - before["busy"]) / wall
    drawn = after["drawn"] - before["drawn"]
    told.found["front"] = {"share": share, "api": api, "engine": rest, "tokens": drawn / wall}
    told.say(
        share <= FRONT,
        f"{share:.1%} of the time is between steps at {STREAMS} streams ({drawn / wall:.0f}"
        f" tokens/s; processor: {api:.1f} s of the API's thread, {rest:.1f} s of all others); at"
        f" most {FRONT:.0%}",
    )


def prefix(server: Server, told: Verdicts) -> None:
    """First tokens behind PREFIX tokens that are kept, beside as many that are new."""
    own, one = Lengths(32, 32), Lengths(4, 4)
    beginning = [random.Random(5).randrange(32, 127) for _ in range(PREFIX)]
    fresh = wishes(6, 0.0, Lengths(PREFIX + 32, PREFIX + 32), one, seed=6)
    alike = wishes(7, 0.0, own, one, seed=7, shared=beginning)
    new = median(x.ttft for x in answered(asked(server.url, fresh, 1)))
    kept = median(x.ttft for x in answered(asked(server.url, alike, 1))[1:])
    told.found["prefix"] = {"new": new, "kept": kept}
    told.say(
        new / kept >= SHORTER,
        f"the first token behind {PREFIX:,} shared tokens and 32 of its own comes in"
        f" {1e3 * kept:.1f} ms, {new / kept:.1f}x sooner than in {1e3 * new:.1f} ms; at least"
        f" {SHORTER:g}x",
    )


class Watching:
    """Resident bytes of a server, each half second, in a `with`; pages are not there before they
    are used."""

    def __init__(self, server: Server) -> None:
        self._server, self._over, self.seen = server, threading.Event(), list[int]()
        self._pages = [server.metrics["cache_bytes"]]
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._over.wait(0.5):
            self.seen.append(self._server.resident)

    def __enter__(self) -> Watching:
        self._thread.start()
        return self

    def __exit__(self, *fault: object) -> None:
        self._over.set()
        self._thread.join()
        self._pages.append(self._server.metrics["cache_bytes"])

    @property
    def growth(self) -> float:
        """The most of the last quarter beside that of the first, but for pages used since then."""
        part, (before, after) = max(1, len(self.seen) // 4), self._pages
        return (max(self.seen[-part:]) - (after - before)) / max(self.seen[:part])


def _why(replies: Sequence[Reply]) -> str:
    """Of the first that is neither answered nor refused."""
    lost = (one for one in replies if not one.served and one.status != 429)
    one = next(lost, None)
    return "" if one is None else f"; the first: sent at {one.sent:.1f} s, {one.status} {one.error}"


def overload(load: Load, server: Server, seconds: float, told: Verdicts) -> None:
    """OVER times what it bears: who is refused is told so and when to come again, all others are
    answered as in quiet."""
    quiet = median(one.ttft for one in answered(asked(server.url, load.some(8, seed=11), 1)))
    bears = load.capacity(server.url, 16)
    some = load.some(max(8, int(OVER * bears * seconds)), OVER * bears, seed=12)
    with Watching(server) as memory:
        replies = asked(server.url, some)
    time.sleep(AFTER)
    again = median(one.ttft for one in answered(asked(server.url, load.some(8, seed=13), 1)))
    refused = [one for one in replies if one.status == 429]
    taken = [(wish, one) for wish, one in zip(some, replies, strict=True) if one.status == 200]
    lost = len(replies) - len(refused) - sum(one.served for _, one in taken)
    checked = random.Random(0).sample(taken, min(len(taken), load.count))
    calm = asked(server.url, [wish for wish, _ in checked], 1)
    wrong = sum(a.text != b.text for (_, a), b in zip(checked, calm, strict=True))
    within, growth = load.within([one for _, one in taken]), memory.growth
    told.found["overload"] = {
        "bears": bears, "asked": len(replies), "refused": len(refused), "lost": lost,
        "checked": len(checked), "wrong": wrong, "within": within, "growth": growth,
        "ttft": (quiet, again), "resident": memory.seen,
        "late": percentile([one.ttft for _, one in taken if one.times], 0.95),
    }  # fmt: skip
    print(f"{len(replies):,} requests in {some[-1].at:.0f} s, {OVER:g} x {bears:.2f} a second:"
          f" {len(taken):,} accepted, {len(refused):,} refused")  # fmt: skip
    told.say(
        bool(refused) and all(one.retry.isdecimal() and int(one.retry) > 0 for one in refused),
        "every refusal is a 429 with Retry-After",
    )
    told.say(not lost, f"{lost} requests lost, of {len(replies):,}{_why(replies)}")
    told.say(not wrong, f"{wrong} answers differ from those of a quiet server, of {len(checked)}")
    told.say(within >= ACCEPTED, f"{within:.1%} of the accepted in time; at least {ACCEPTED:.0%}")
    told.say(growth <= LEVEL, f"memory {growth:.3f}x that of the beginning; at most {LEVEL}x")
    told.say(
        again <= SLOWER * quiet,
        f"{AFTER:g} s later a first token comes in {1e3 * again:.0f} ms, before in"
        f" {1e3 * quiet:.0f} ms",
    )


def soak(load: Load, server: Server, seconds: float, told: Verdicts) -> None:
    """For long at 0.7 of what it bears: nothing grows, nobody is lost."""
    rate = 0.7 * load.capacity(server.url, 16)
    some = load.some(max(40, int(rate * seconds)), rate, seed=21)
    with Watching(server) as memory:
        replies = asked(server.url, some, timeout=seconds + 600)
    lost = sum(not one.served and one.status != 429 for one in replies)
    there = [one for one in replies if one.served and one.times]
    tenth = max(1, len(there) // 10)
    early, late = (median(x.tpot for x in some) for some in (there[:tenth], there[-tenth:]))
    told.found["soak"] = {
        "rate": rate, "asked": len(replies), "lost": lost, "growth": memory.growth,
        "tpot": (early, late), "within": load.within(replies),
    }  # fmt: skip
    told.say(
        not lost,
        f"{lost} requests lost, of {len(replies):,} in {some[-1].at:,.0f} s{_why(replies)}",
    )
    told.say(memory.growth <= LEVEL, f"memory {memory.growth:.3f}x that of the beginning")
    print(f"a token after {1e3 * early:.1f} ms in the first tenth, {1e3 * late:.1f} in the last")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, help="a directory that has ids of bytes; by default one of --shape")
    add("--shape", choices=tuple(SHAPES), default="25m")
    add("--parts", nargs="*", choices=PARTS, default=PARTS)
    add("--overload", type=float, metavar="SECONDS", help="of ten times what it bears")
    add("--soak", type=float, metavar="SECONDS", help="at 0.7 of what it bears")
    add("--peer", action="append", default=[], metavar="NAME=URL", help="a server of the same"
        " weights that speaks OpenAI's API; repeatable")  # fmt: skip
    add("--rates", nargs="+", type=float, help="requests a second; by default by what ours bears")
    add("--prompt", default="128:512", help="tokens: the median, and the ninetieth percentile")
    add("--new", default="64:128")
    add("--ttft", type=float, default=1.0, help="seconds")
    add("--tpot", type=float, default=0.1)
    add("--requests", type=int, default=STREAMS, help="that go at once")
    add("--count", type=int, default=200, help="requests of each rate")
    add("--serve", default="", metavar="OPTIONS", help="further ones of `outsize serve`")
    add("--json", type=Path, help="also write every figure to this file")
    return parser.parse_args()


def main() -> int:
    asking = parsed()
    ended_too()
    longest = 4096 - PREFIX
    load = Load(
        Lengths.parse(asking.prompt, longest // 2), Lengths.parse(asking.new, longest // 2),
        asking.ttft, asking.tpot, asking.count,
    )  # fmt: skip
    others, told = busy(), Verdicts({})
    with tempfile.TemporaryDirectory(prefix="outsize-load-") as name:
        folder = Path(name)
        model = asking.model or made(asking.shape, folder)
        plain = ["--requests", str(asking.requests), "--context", "4096", *asking.serve.split()]
        if asking.parts or asking.soak:
            with Server(model, plain, folder / "log") as server:
                print("\n".join(server.plan))
                urls = {OURS: server.url, **dict(one.split("=", 1) for one in asking.peer)}
                if "goodput" in asking.parts:
                    rates = asking.rates or [
                        part * load.capacity(server.url, 16) for part in (0.4, 0.6, 0.8, 1.0)
                    ]
                    goodput(load, urls, rates, told)
                if "front" in asking.parts:
                    front(load, server, told)
                if "prefix" in asking.parts:
                    prefix(server, told)
                if asking.soak:
                    soak(load, server, asking.soak, told)
        if asking.overload:
            slo = f"ttft={asking.ttft:g}s,tpot={asking.tpot:g}s"
            with Server(model, [*plain, "--slo", slo], folder / "log") as server:
                print("\n".join(server.plan))
                overload(load, server, asking.overload, told)
    if others > QUIET:
        print(f"THE MACHINE WAS NOT QUIET ({others:.0f}% by others): times are no result")
    if asking.json is not None:
        asking.json.write_text(json.dumps(told.found, indent=1))
    return 0 if told.good else 1


if __name__ == "__main__":
    sys.exit(main())
