"""What `outsize plan --serve` foretells of varied settings beside what `outsize serve` then does.

Each setting is foretold first: how many requests a second it bears, and, of so many of those that
come by chance, the seconds to the first token and from each to the next, and bytes. A client of its
own then asks the same requests of a server. The exit code is 1 where a target is missed. README.md.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from support.figures import markdown
from support.serving.models import SHAPES, made
from support.serving.server import OUTSIZE, Server, ended_too
from support.serving.traffic import Lengths, Wish, asked, percentile, slower, wishes
from support.turns import QUIET, busy

TARGETS = {"ttft p50": 0.10, "ttft p99": 0.20, "tpot p50": 0.10, "tpot p99": 0.10}
BYTES = 0.05  # above what is held, and never below
MIB = 2**20
WARM, FEWEST = 4, 12  # requests before those that count, and of these


@dataclass(frozen=True)
class Setting:
    """options: of both commands; load: requests a second, as a part of what is borne."""

    name: str
    load: float
    prompt: str = "128:256"
    new: str = "48:96"
    options: tuple[str, ...] = ()
    requests: int = 8
    step: int = 256
    weights: float = 0.0  # of them, the part that has room

    @property
    def lengths(self) -> tuple[Lengths, Lengths]:
        """No longer than four times the median."""
        found = [Lengths.parse(text) for text in (self.prompt, self.new)]
        prompt, new = (Lengths(x.median, x.ninth, 4 * x.median) for x in found)
        return prompt, new

    def words(self, folder: Path, weights: int) -> list[str]:
        """Options, the same for both. weights: bytes of all."""
        prompt, new = self.lengths
        context = 64 * math.ceil((prompt.most + new.most) / 64)
        words = ["--context", str(context), "--requests", str(self.requests),
                 "--step", str(self.step)]  # fmt: skip
        words += ["--memory", str(int(self.weights * weights))] if self.weights else []
        chosen = [one.replace("DIR", str(folder)) for one in self.options]
        return [*words, *chosen, *(() if "--policy" in chosen else ("--policy", "mixed"))]


SETTINGS = (
    Setting("few at once", 0.3, requests=2),
    Setting("many at once", 0.7, requests=16),
    Setting("long answers", 0.7, prompt="32", new="192:320"),
    Setting("long prompts", 0.6, prompt="768:1024", new="16:24"),
    Setting("long prompts, short slices", 0.6, prompt="512:768", new="32:48", step=64),
    Setting("whole prompts first", 0.7, options=("--policy", "prompt-first"), step=1024),
    Setting("steps of one size", 0.7, options=("--policy", "fixed")),
    Setting("weights in 8 bits", 0.7, options=("--weights", "int8")),
    Setting("weights in 4 bits", 0.7, options=("--weights", "int4"), requests=16),
    Setting("weights in bfloat16", 0.7, options=("--weights", "bf16")),
    Setting("cache in 8 bits", 0.7, prompt="384:512", options=("--cache", "int8")),
    Setting("pages below", 0.8, options=("--policy", "feedback", "--disk", "DIR:256MiB")),
    Setting("promised", 1.3, options=("--slo", "ttft=1s,tpot=200ms")),
    Setting("weights in files", 0.5, requests=16, weights=0.75),
)  # fmt: skip


@dataclass
class Found:
    """Seconds, bytes, and requests that were refused, by name: foretold and measured."""

    name: str
    rate: float
    foretold: dict[str, float] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)
    busy: float = 0.0

    def error(self, what: str) -> float:
        """Of what was measured."""
        return self.foretold[what] / self.measured[what] - 1

    def missed(self) -> list[str]:
        far = [what for what, most in TARGETS.items() if abs(self.error(what)) > most]
        return far + ([] if 0 <= self.error("bytes") <= BYTES else ["bytes"])


@dataclass(frozen=True)
class Bench:
    folder: Path
    shape: str
    count: int
    seconds: float = math.inf
    base: int = 0

    @property
    def model(self) -> Path:
        return self.folder / self.shape

    @property
    def weights(self) -> int:
        return sum(file.stat().st_size for file in self.model.glob("*.safetensors"))

    def plan(self, words: Sequence[str], some: Sequence[Wish]) -> dict[str, Any]:
        """As `outsize plan` has it."""
        traffic = self.folder / "traffic.jsonl"
        lines = [
            json.dumps({"at": one.at, "prompt": len(one.ids), "output": one.new}) for one in some
        ]
        traffic.write_text("\n".join(lines), encoding="utf-8")
        command = [*OUTSIZE, "plan", str(self.model), "--serve", "--json", "--traffic",
                   str(traffic), *words]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stderr or done.stdout}")
        said: dict[str, Any] = json.loads(done.stdout)
        return said

    def foretell(self, one: Setting) -> tuple[Found, list[Wish]]:
        words, (prompt, new) = one.words(self.folder, self.weights), one.lengths
        some = wishes(self.count, 1.0, prompt, new)
        freely = [w for i, w in enumerate(words) if "--slo" not in (w, words[max(0, i - 1)])]
        rate = one.load * float(self.plan(freely, some)["most_requests_per_second"])
        few = max(FEWEST, int(rate * self.seconds)) if self.seconds < math.inf else self.count
        some = slower(some[:few], 1 / rate)
        said = self.plan(words, some)
        told = said["ways"][0]["outcome"]
        found = Found(one.name, rate)
        for what in ("ttft", "tpot"):
            found.foretold |= {f"{what} p50": told[what][0], f"{what} p99": told[what][1]}
        held = sum(sum(stage.values()) for stage in said["stages"])
        found.foretold |= {"bytes": float(held), "refused": float(told["refused"])}
        return found, some

    def measure(self, one: Setting, found: Found, some: Sequence[Wish]) -> None:
        prompt, new = one.lengths
        words = one.words(self.folder, self.weights)
        with Server(self.model, words, self.folder / "log") as server:
            asked(server.url, wishes(WARM, 0.0, prompt, new, seed=1), at_once=1)
            before, replies = server.metrics, asked(server.url, some)
            after, peak = server.metrics, server.peak
        there = [reply for reply in replies if reply.served]
        lost = [r for r in replies if not r.served and r.status != 429]
        if lost or not there:
            raise SystemExit(f"{one.name}: {len(lost)} were not answered: {lost[:1]}")
        first = [reply.ttft for reply in there]
        gaps = [gap for reply in there for gap in reply.gaps]
        found.measured = {
            "ttft p50": percentile(first, 0.5), "ttft p99": percentile(first, 0.99),
            "tpot p50": percentile(gaps, 0.5), "tpot p99": percentile(gaps, 0.99),
            "bytes": float(peak - self.base), "refused": float(len(replies) - len(there)),
        }  # fmt: skip
        told = after["foretold"] - before["foretold"]
        found.measured["steps"] = after["busy"] - before["busy"]
        found.foretold["steps"] = told

    def alone(self) -> int:
        """Bytes of a process that serves nearly nothing: Python and PyTorch."""
        directory, tiny = made("tiny", self.folder), Bench(self.folder, "tiny", 8)
        one = Setting("tiny", 0.5, prompt="8", new="8", requests=1, step=32)
        words, (prompt, new) = one.words(self.folder, 0), one.lengths
        some = wishes(8, 0.0, prompt, new)
        held = sum(sum(stage.values()) for stage in tiny.plan(words, some)["stages"])
        with Server(directory, words, self.folder / "log") as server:
            asked(server.url, some, at_once=1)
            return server.peak - held


def shown(found: Sequence[Found]) -> str:
    head = ("setting", "requests/s", *TARGETS, "steps", "held", "refused")
    rows = []
    for one in found:
        times = [
            f"{1e3 * one.foretold[what]:.1f} / {1e3 * one.measured[what]:.1f} ms"
            f" ({one.error(what):+.0%})"
            for what in TARGETS
        ]
        held = " / ".join(f"{x['bytes'] / MIB:.1f}" for x in (one.foretold, one.measured))
        refused = " / ".join(f"{x['refused']:.0f}" for x in (one.foretold, one.measured))
        rows.append((one.name, f"{one.rate:.2f}", *times, f"{one.error('steps'):+.0%}",
                     f"{held} MiB ({one.error('bytes'):+.0%})", refused))  # fmt: skip
    return markdown(head, rows)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--shape", choices=tuple(SHAPES), default="25m")
    add("--count", type=int, default=150, help="requests of each setting, at most")
    add("--seconds", type=float, default=120.0, help="in which those come that are asked")
    add("--settings", nargs="+", metavar="NAME", default=[one.name for one in SETTINGS])
    add("--json", type=Path, help="also write every figure to this file")
    return parser.parse_args()


def main() -> int:
    asking, found = parsed(), list[Found]()
    ended_too()
    chosen = [one for one in SETTINGS if one.name in asking.settings]
    with tempfile.TemporaryDirectory(prefix="outsize-serve-") as name:
        folder = Path(name)
        made(asking.shape, folder)
        alone = Bench(folder, asking.shape, asking.count).alone()
        bench = Bench(folder, asking.shape, asking.count, asking.seconds, alone)
        for one in chosen:
            others = busy()
            foretold, some = bench.foretell(one)
            bench.measure(one, foretold, some)
            foretold.busy = others
            found.append(foretold)
            missed = ", ".join(foretold.missed()) or "nothing"
            print(f"{one.name}: missed: {missed} (others: {others:.0f}%)", flush=True)
    print(f"\nforetold / measured, {asking.shape}\n\n{shown(found)}")
    good = [one for one in found if not one.missed()]
    print(f"{len(good)} of {len(found)} settings met every target")
    if max(one.busy for one in found) > QUIET:
        print("THE MACHINE WAS NOT QUIET: times are no result")
    if asking.json is not None:
        asking.json.write_text(json.dumps([asdict(one) for one in found], indent=1))
    return 0 if len(good) == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
