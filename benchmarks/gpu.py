"""For the day a GPU is there: everything that one is wanted for, in one command.

    python benchmarks/gpu.py [--minutes 20] [--out DIR] [--only PART ...]

The exactness tests on the real device, the probe, ten plans foretold and measured, steps of three
sizes beside the plain loop, torch.compile and FSDP2, models that are larger than the device beside
DeepSpeed where that installs, tokens/s. Every case is a process of its own. What it found is in
DIR/gpu.json as soon as it is done, and a table in DIR/gpu.md; one that fails is a line there. It
needs torch, transformers and this checkout. `--dry` runs small sizes, on the CPU or (`--device
strict`) on the device of the tests: whether it works, no figures. See docs/gpu.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# This checkout, and no other that is installed.
sys.path[:0] = [path for path in (str(HERE), str(HERE.parent)) if path not in sys.path]

from support.gpu import child, table  # noqa: E402
from support.gpu.parts import PARTS, SHARES  # noqa: E402
from support.gpu.place import Place  # noqa: E402

from outsize import accelerator  # noqa: E402
from outsize.texts import write_text  # noqa: E402

FIRST = 120.0  # seconds for a device to answer
LATE = 5.0  # seconds before the end in which nothing is begun


@dataclass
class Bench:
    """A run. found: the JSON, in which parts of earlier runs stay."""

    place: Place
    dry: bool
    seconds: float
    clock: Callable[[], float] = time.monotonic
    found: dict[str, Any] = field(default_factory=lambda: {"parts": {}})

    def __post_init__(self) -> None:
        self.begin = self.clock()
        path = Path(self.place.folder, "gpu.json")
        if path.is_file():
            self.found = json.loads(path.read_text(encoding="utf-8"))

    def left(self, share: float) -> float:
        """Seconds until this part of all has gone."""
        return share * self.seconds - (self.clock() - self.begin)

    def run(self, names: list[str]) -> None:
        """These parts, each until its share of the time has gone."""
        asked = child.run("support.gpu.place:machine", self.place, {}, FIRST)
        if asked.state != "done":
            raise SystemExit(f"device {self.place.name!r} does not answer: {asked.why}")
        whole, share = sum(SHARES[name] for name in names), 0.0
        for name in names:
            share += SHARES[name] / whole
            self.part(name, dict(asked.figures), share)

    def part(self, name: str, machine: dict[str, Any], share: float) -> None:
        begin, cases = self.clock(), dict[str, Any]()
        part = {"machine": machine, "dry": self.dry, "cases": cases, "seconds": 0.0}
        part["date"] = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
        self.found["parts"][name] = part
        for case in PARTS[name](machine, self.dry):
            left = self.left(share) - LATE
            why = case.left_out(machine, left)
            if why:
                outcome = child.Outcome("left out", why)
            else:
                outcome = child.run(case.task, self.place, case.arguments, left)
            cases[case.name] = asdict(outcome)
            part["seconds"] = self.clock() - begin
            print(f"{name}: {case.name}: {outcome.state} {outcome.why}", flush=True)
            self.save()
        self.save()

    def save(self) -> None:
        folder = Path(self.place.folder)
        write_text(json.dumps(self.found, indent=1), folder / "gpu.json")
        write_text(table.text(self.found), folder / "gpu.md")


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--minutes", type=float, default=20.0, help="in which all of it ends")
    add("--out", type=Path, default=Path("gpu"), help="folder for gpu.json, gpu.md and log.txt")
    add("--only", nargs="+", choices=tuple(PARTS), default=list(PARTS), metavar="PART",
        help=f"of {', '.join(PARTS)}")  # fmt: skip
    add("--dry", action="store_true", help="small sizes: whether it works, no figures")
    add("--device", choices=("cpu", "strict"), help="with --dry: where it runs (cpu)")
    options = parser.parse_args(arguments)
    if options.minutes <= 0:
        parser.error(f"--minutes {options.minutes}: expected more than 0")
    if options.device and not options.dry:
        parser.error(f"--device {options.device}: only a dry run has it; pass --dry as well")
    if not options.dry and not accelerator.there():
        parser.error("PyTorch finds no accelerator here; --dry shows on a CPU that this works")
    return options


def main(arguments: list[str]) -> int:
    options = options_of(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    name = options.device or "cpu" if options.dry else accelerator.there()
    bench = Bench(Place(name, str(options.out.resolve())), options.dry, 60 * options.minutes)
    bench.run([part for part in PARTS if part in options.only])
    print(table.text(bench.found))
    return 0


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join((str(HERE), str(HERE.parent)))  # of its processes
    sys.exit(main(sys.argv[1:]))
