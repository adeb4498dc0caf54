"""What a claim comes to: a paper's figures beside ours, one verdict, and the result that is kept.

`reached`          every figure is the paper's own or better, under the paper's own condition, or is
                   at the bound that the hardware allows, which the script derives
`weaker (x of y)`  the effect is there, and these figures are missed, were had under another
                   condition, or were not measured
`absent`           no figure shows the effect, or what must hold beside it does not

Beside it stands how: `run`, `emulated links`, `emulated devices` or `simulated`, the least direct
of all figures. Where figures were had in several ways, each way has a verdict of its own beside it.
The result is kept as claims/results/NAME.json; docs/techniques.md is made of these.

emulated links     real workers and messages, which wait as long as a link would take
emulated devices   real workers, messages and schedules, whose passes wait as long as a device would
                   take; no event is predicted
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal, get_args

import psutil
import torch

How = Literal["run", "emulated links", "emulated devices", "simulated"]
HOWS: tuple[How, ...] = get_args(How)  # the last is the least direct
CLAIMS = Path(__file__).parent
RESULTS = CLAIMS / "results"
CODES = {"reached": 0, "weaker": 3, "absent": 1}  # exit codes
LOAD, BEGAN = (
    2.5,
    os.getloadavg()[0],
)  # seconds measured on two cores with more runnable processes than this are not kept


@dataclass(frozen=True)
class Figure:
    """A figure of a paper and ours.

    ours: None where it was not measured here. paper: None where the paper gives no number; then
    nothing can reach it. nothing: the value that shows no effect. less: a smaller one is better.
    timed: ours are seconds of this machine or a ratio of such. other: in what the condition is not
    the paper's; empty where it is. bound: what the hardware at hand allows at most, derived by the
    script.
    """

    what: str
    ours: float | None
    paper: float | None
    unit: str = "x"
    nothing: float = 1.0
    less: bool = False
    how: How = "run"
    timed: bool = False
    other: str = ""
    bound: float | None = None

    @property
    def shows(self) -> bool:
        """Whether there is an effect at all."""
        return self.ours is not None and self._ahead(self.ours, self.nothing, equal=False)

    @property
    def reached(self) -> bool:
        if self.ours is None or self.paper is None:
            return False
        if self.bound is not None and self._ahead(self.ours, self.bound):
            return True
        return not self.other and self._ahead(self.ours, self.paper)

    def __str__(self) -> str:
        """What it is, and x of y."""
        ours = "not measured" if self.ours is None else shown(self.ours, self.unit)
        paper = "no figure" if self.paper is None else shown(self.paper, self.unit)
        other = f", but {self.other}" if self.other else ""
        return f"{self.what} {ours} of {paper}{other}"

    def _ahead(self, value: float, mark: float, equal: bool = True) -> bool:
        ahead = value < mark if self.less else value > mark
        return ahead or (equal and value == mark)


def shown(value: float, unit: str) -> str:
    """A figure as it is printed. unit: "x", "%" (of a share), or a word."""
    if unit == "%":
        return f"{value:.1%}"
    few = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return few + (unit if unit == "x" else f" {unit}" if unit else "")


def judge(figures: tuple[Figure, ...], holds: Mapping[str, bool]) -> tuple[str, How]:
    """The verdict, and how. holds: what must be so beside the figures, by name."""
    how = max((figure.how for figure in figures), key=HOWS.index)
    broken = [name for name, so in holds.items() if not so]
    if broken:
        return f"absent (not so: {'; '.join(broken)})", how
    if not any(figure.shows for figure in figures):
        return f"absent ({'; '.join(map(str, figures))})", how
    missed = [str(figure) for figure in figures if not figure.reached]
    return (f"weaker ({'; '.join(missed)})" if missed else "reached"), how


def parts(figures: Sequence[Figure]) -> dict[How, tuple[str, tuple[Figure, ...]]]:
    """By way in which figures were had, the most direct first: the verdict of them, and they.
    `not measured` is of those that were not had at all."""
    of = {how: tuple(figure for figure in figures if figure.how == how) for how in HOWS}
    return {
        how: (
            judge(each, {})[0] if any(one.ours is not None for one in each) else "not measured",
            each,
        )
        for how, each in of.items()
        if each
    }


def conclude(
    paper: str,
    claimed: str,
    measured: str,
    conditions: str,
    *figures: Figure,
    holds: Mapping[str, bool] | None = None,
) -> None:
    """Print a claim, keep its result and leave the process with the verdict's code."""
    word, how = judge(figures, holds or {})
    name = Path(sys.argv[0]).stem
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    lines = {
        "paper": paper,
        "claimed": claimed,
        "measured": measured,
        "conditions": f"{conditions}; {machine}",
        "verdict": word,
        "how": how,
    }
    for key, line in lines.items():
        print(f"{key:<11}{line}")
    if len(apart := parts(figures)) > 1:
        print(f"{'apart':<11}{'; '.join(f'{by}: {each}' for by, (each, _) in apart.items())}")
    load = max(BEGAN, os.getloadavg()[0])
    if load > LOAD and any(figure.timed for figure in figures):
        print(f"kept       nothing: seconds are judged, and the load is {load:.1f}, over {LOAD}")
    else:
        result = {"name": name, **lines, "figures": [asdict(f) for f in figures], **_origin(name)}
        keep(result, RESULTS)
    sys.exit(code_of(word))


def code_of(verdict: str) -> int:
    """The exit code of a verdict."""
    return CODES[verdict.split(" ")[0]]


def keep(result: Mapping[str, Any], folder: Path) -> None:
    """Write a result as folder/NAME.json, in place of the one before."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{result['name']}.json"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def digest(name: str) -> str:
    """Of a claim's script: a result of another one is stale."""
    return hashlib.sha256((CLAIMS / f"{name}.py").read_bytes()).hexdigest()[:12]


def _origin(name: str) -> dict[str, str | float]:
    """Where a result is from. commit: the last that changed the product; +: and it is changed."""
    return {
        "date": date.today().isoformat(),
        "processor": processor(),
        "commit": _git("log", "-1", "--format=%h", "--", "outsize")
        + ("+" if _git("status", "--porcelain", "--", "outsize") else ""),
        "script": digest(name),
        "seconds": round(time.time() - psutil.Process().create_time(), 1),
        "load": round(max(BEGAN, os.getloadavg()[0]), 1),
    }


def processor() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _git(*words: str) -> str:
    """What git says, nothing where there is no checkout."""
    done = subprocess.run(
        ["git", *words], cwd=CLAIMS.parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()
