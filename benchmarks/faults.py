"""Faults planted one by one in a copy of the tree, each met by the test files nearest to it:

    python benchmarks/faults.py            every fault of faults.toml
    python benchmarks/faults.py 3 17       some, by number

Prints for each which test failed, or SURVIVES, and the processor seconds; the exit code is 1 where
a fault survives or its text is no longer in the file. torch is loaded once and forked: most of a
short test's time is importing it. A fault in C++ has all passes built anew, by the tests
themselves: about a minute each.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Plant the faults that are asked for."""
    every = tomllib.loads((ROOT / "benchmarks" / "faults.toml").read_text())["fault"]
    wanted = [int(n) for n in sys.argv[1:]] or range(len(every))
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        _copy(tree)
        _load(tree)
        for number in wanted:
            fault = every[number]
            found, spent = _planted(tree, fault, Path(folder) / "said")
            missed += not found.startswith("FAILED")
            print(f"{number} {fault['file']}: {fault['what']}: {found} ({spent:.0f} s)", flush=True)
    print(f"{len(wanted)} planted, {len(wanted) - missed} caught")
    return 1 if missed else 0


def _copy(tree: Path) -> None:
    """What git knows of, as it lies here."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tree / name)


def _load(tree: Path) -> None:
    """Import what takes long, and nothing that a fault could be in."""
    os.environ.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1", PYTHONPATH=str(tree))
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    sys.path.insert(0, str(tree))
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch._subclasses.fake_tensor
    import torch.distributed  # noqa: F401

    assert not any(name.partition(".")[0] == "outsize" for name in sys.modules)


def _planted(tree: Path, fault: dict[str, str], said: Path) -> tuple[str, float]:
    """What its tests say, and the seconds they took."""
    path = tree / fault["file"]
    text = path.read_text()
    if text.count(fault["old"]) != 1:
        return f"its text is {text.count(fault['old'])} times in the file", 0.0
    before = _spent()
    path.write_text(text.replace(fault["old"], fault["new"]))
    try:
        _tested(tree, fault["tests"].split("|"), said)
    finally:
        path.write_text(text)
    lines = said.read_text(errors="replace").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return failed[0][:120] if failed else "SURVIVES", _spent() - before


def _tested(tree: Path, tests: list[str], said: Path) -> None:
    """Run pytest in a process that is forked from this one."""
    child = os.fork()
    if child == 0:
        import pytest

        out = os.open(said, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(tree)
        code = pytest.main(["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--tb=line", *tests])
        os._exit(int(code))
    os.waitpid(child, 0)


def _spent() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
