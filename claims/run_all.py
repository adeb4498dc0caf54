"""Run claims, one after another, and print the verdict that each had beside the one it has now.

    python claims/run_all.py [NAMES]    # every claim, or these
    python claims/run_all.py --quick    # those that CI runs: no seconds judged, 3 minutes in all
    python claims/run_all.py --quick --jobs 2    # two at a time
    python tools/warm.py DIR -- python claims/run_all.py --quick --python python    # forked

Exit code 1 where a script ends without a verdict, or one of --quick has a worse one than before;
`weaker` is no failure. Afterwards `python tools/techniques.py` writes the table of the docs anew.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from verdict import CLAIMS, CODES, RESULTS

# None of their figures is a time of this machine. The longest first, so that two
# at a time end together.
QUICK = (
    "gnnpipe", "zero", "bitpipe", "superpipeline", "efficient_layouts", "interleaved", "tiled_mlp",
    "chunked_loss", "memascend", "skippipe", "gpipe", "hanayo",
)  # fmt: skip
LIMIT = 1800  # seconds of a script
NONE = "-"


@dataclass(frozen=True)
class Row:
    """A claim: its verdicts before and now, empty where it gave none; seconds that it took."""

    name: str
    before: str
    now: str
    how: str
    seconds: float

    @property
    def worse(self) -> bool:
        """Whether it fell."""
        return bool(self.before) and rank(self.now) > rank(self.before)


def scripts() -> list[str]:
    """Every claim: a script that imports what concludes one."""
    paths = sorted(CLAIMS.glob("*.py"))
    return [path.stem for path in paths if re.search(r"import .*\bconclude\b", path.read_text())]


def rank(verdict: str) -> int:
    """0 for reached, higher for what is worse."""
    word = verdict.split(" ")[0]
    return list(CODES).index(word) if word in CODES else len(CODES)


def last(name: str, folder: Path = RESULTS) -> str:
    """The verdict that is kept; empty where there is none."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text())["verdict"] if path.exists() else ""


def verdict_of(printed: str, key: str = "verdict") -> str:
    """What a script said in the end, empty where it came to nothing."""
    found = re.findall(rf"^{key} +(.+)$", printed, re.MULTILINE)
    return found[-1] if found else ""


def run(name: str, python: str = sys.executable) -> Row:
    """Run a script; what it prints is shown."""
    before, begin = last(name), time.monotonic()
    command = [python, str(CLAIMS / f"{name}.py")]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=False, timeout=LIMIT
        )
        printed = done.stdout
    except subprocess.TimeoutExpired:
        printed = f"{name}: not done in {LIMIT} s"
    print(f"== {name}\n{printed}", flush=True)
    seconds = time.monotonic() - begin
    return Row(name, before, verdict_of(printed), verdict_of(printed, "how"), seconds)


def table(rows: Iterable[Row]) -> str:
    """Old verdict beside new."""
    words = [("claim", "before", "now", "how", "seconds")]
    for row in rows:
        now = row.now or "CRASHED"
        words.append((row.name, row.before or NONE, now, row.how or NONE, f"{row.seconds:.0f}"))
    lines = ["| " + " | ".join(each) + " |" for each in words]
    return "\n".join([lines[0], "| " + " | ".join(["---"] * len(words[0])) + " |", *lines[1:]])


def failed(rows: Iterable[Row], quick: bool) -> list[str]:
    """Names of those that end a build."""
    return [row.name for row in rows if not row.now or (quick and row.worse)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run claims; see the first lines of this file.")
    parser.add_argument("names", nargs="*", help="of claims; all where none is given")
    parser.add_argument("--quick", action="store_true", help="those that CI runs")
    parser.add_argument("--jobs", type=int, default=1, help="so many at a time: no seconds judged")
    parser.add_argument("--python", default=sys.executable, help="the program that runs a script")
    said = parser.parse_args()
    known = scripts()
    for name in said.names:
        if name not in known:
            parser.error(f"claim {name!r} is not known; expected one of {', '.join(known)}")
    with ThreadPoolExecutor(said.jobs) as pool:
        names = said.names or (QUICK if said.quick else known)
        rows = list(pool.map(run, names, [said.python] * len(names)))
    print(table(rows))
    bad = failed(rows, said.quick)
    if bad:
        print(f"without a verdict, or worse than before: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
