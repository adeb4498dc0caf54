"""How long Outsize takes to start: `outsize --help` and `import outsize`, in fresh processes.

Targets, of the median of the runs: 0.3 s and 1 s; the exit code is 1 where one is missed. The
package imports PyTorch when something of it is first used; what that takes is shown beside them,
without a target.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import psutil

import outsize

PYTHON = sys.executable
HELP = [PYTHON, "-c", "from outsize.cli.main import main; main()", "--help"]
IMPORT = [PYTHON, "-c", "import outsize"]
FIRST_USE = [PYTHON, "-c", "import outsize; outsize.prepare"]


def seconds(command: Sequence[str]) -> float:
    """Wall time of a process from its start to its end; SystemExit where it fails."""
    begin = time.perf_counter()
    done = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=Path.home(),
        env={**os.environ, "PYTHONPATH": str(Path(outsize.__file__).parents[1])},
    )  # fmt: skip
    taken = time.perf_counter() - begin
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return taken


def help_command() -> tuple[str, list[str]]:
    """The installed command of this environment; its entry point where it is not installed."""
    script = Path(PYTHON).with_name("outsize")
    if script.is_file():
        return "outsize --help", [str(script), "--help"]
    return "outsize --help (not installed: its entry point)", HELP


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=10)
    runs = max(1, parser.parse_args().runs)
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python"
        f" {platform.python_version()}; cores busy with something else:"
        f" {psutil.cpu_percent(interval=1.0):.0f}%; {runs} runs after one that fills the page cache"
    )
    good = True
    cases = (
        (*help_command(), 0.3),
        ("import outsize", IMPORT, 1.0),
        ("import outsize; outsize.prepare", FIRST_USE, None),
    )
    for name, command, most in cases:
        first = seconds(command)
        taken = [seconds(command) for _ in range(runs)]
        met = most is None or median(taken) < most
        good = good and met
        verdict = "no target" if most is None else f"target {most} s: {'met' if met else 'MISSED'}"
        print(
            f"{name}: median {median(taken):.3f} s, {min(taken):.3f} to {max(taken):.3f} s"
            f" (first {first:.3f} s); {verdict}"
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
