"""Cases that run other programs: the tests of the accelerator, and DeepSpeed from an environment
of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.gpu.place import CHECKOUT, Place
from support.gpu.shapes import SHAPES, Work
from support.gpu.training import measured

INSTALL = ("pip", "install", "--quiet", "--retries", "0", "--timeout", "15", "deepspeed")


def tests(place: Place, chosen: str) -> dict[str, Any]:
    """The exactness tests that only need a device. chosen: of pytest's -k, "" for all."""
    command = [
        sys.executable, "-m", "pytest", "-m", "accelerator", "-p", "no:cacheprovider", "-n", "0",
        "--on", place.name, "-k", chosen, "-rfE", "--tb", "short", "tests/accelerator",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": _first(CHECKOUT)}
    done = subprocess.run(
        command, cwd=CHECKOUT, env=environment, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    print(done.stdout)
    lines = done.stdout.splitlines() or [""]
    counts = dict(
        (word, int(number))
        for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", lines[-1])
    )
    if done.returncode not in (0, 1) or not counts:
        raise RuntimeError(f"pytest ended with {done.returncode}: {lines[-1]}")
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"counts": counts, "failed": failed}


def deepspeed(place: Place, work: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's steps of the same model."""
    task, home = Work(**work), Path(place.folder, "deepspeed")
    python = home / "bin" / "python"
    if not python.is_file():
        _run([sys.executable, "-m", "venv", str(home)])
        _have_ours(home)
    if _failure([str(python), "-c", "import deepspeed"]):
        _run([str(python), "-m", *INSTALL])
    answer = Path(place.folder, "deepspeed.json")
    shape = {k: v for k, v in SHAPES[task.shape].items() if k not in ("architectures",)}
    numbers = map(str, (task.rows, task.sequence, task.warm + task.steps))
    module = "support.gpu.zero_offload"
    _run([str(python), "-m", module, str(answer), json.dumps(shape), *numbers])
    found = json.loads(answer.read_text(encoding="utf-8"))
    figures = measured(task, found["every second"], found["losses"], found["peak"])
    return {**figures, "plan": "ZeRO-3, parameters and optimizer in host memory"}


def _have_ours(home: Path) -> None:
    """An environment sees the packages of this one, which may be an environment too."""
    (there,) = home.glob("lib/python*/site-packages")
    ours = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (there / "ours.pth").write_text("\n".join(sorted(ours)) + "\n", encoding="utf-8")


def _first(folder: Path) -> str:
    """Where modules are looked for: a folder, then wherever this process does."""
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


def _run(command: Sequence[str]) -> None:
    if why := _failure(command):
        raise RuntimeError(f"{' '.join(command[1:6])}: {why}")


def _failure(command: Sequence[str]) -> str:
    """The last line of a program that fails, "" for one that does not."""
    environment = {**os.environ, "PYTHONPATH": _first(CHECKOUT / "benchmarks")}
    done = subprocess.run(
        command, env=environment, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    print(done.stdout)
    if not done.returncode:
        return ""
    return (done.stdout.splitlines() or [f"exit code {done.returncode}"])[-1]
