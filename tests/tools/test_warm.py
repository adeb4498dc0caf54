"""tools/warm.py: what is forked has its caller's place, signals and end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

WARM = Path(__file__).parents[2] / "tools" / "warm.py"
MAIN = """
import os, signal, sys, time

def main():
    print(sys.argv[1:], os.getcwd(), os.environ["SAID"], sys.stdin.read(), "json" in sys.modules)
    sys.stdout.flush()
    waits = sys.argv[1] == "waits"
    print(os.getpid() if waits else "error", file=sys.stderr, flush=True)
    if waits:
        time.sleep(600)
    sys.exit(int(sys.argv[1]))
"""


def run(tmp_path: Path, script: str, module: str = "json") -> subprocess.CompletedProcess[str]:
    package = tmp_path / "path" / "outsize" / "cli"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "main.py").write_text(MAIN)
    (tmp_path / "here").mkdir()
    return subprocess.run(
        [sys.executable, WARM, tmp_path / "warm", "--import", module, "--", "bash", "-c", script],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "path")},
        capture_output=True, text=True, timeout=600, cwd=tmp_path,
    )  # fmt: skip


def test_a_fork_has_all_that_its_caller_has(tmp_path: Path) -> None:
    script = "cd here; echo in | SAID=so outsize 3 'a b' 2>err; echo $?; cat err; exit 5"
    done = run(tmp_path, script)
    assert done.returncode == 5 and done.stderr == ""
    assert done.stdout == f"['3', 'a b'] {tmp_path / 'here'} so in\n True\n3\nerror\n"


def test_a_script_is_run_by_a_fork_and_all_else_by_python_itself(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("word = 'taken from its own folder'\n")
    (tmp_path / "a.py").write_text(
        "import own, sys\n"
        "print(__name__, sys.argv, own.word, 'colorsys' in sys.modules, sys.stdin.read())\n"
        "sys.exit(4)\n"
    )
    script = """
cd here; echo in | python ../a.py b c; echo $?
echo in | python -c 'import sys; print(sys.argv, sys.stdin.read(), "colorsys" in sys.modules)' d
echo 'print(__name__)' | python
"""
    done = run(tmp_path, script, "colorsys")
    assert done.stdout == (
        "__main__ ['../a.py', 'b', 'c'] taken from its own folder True in\n\n4\n"
        "['-c', 'd'] in\n False\n__main__\n"
    )


def test_a_fork_ends_as_python_does_but_takes_no_module_apart(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "class Held:\n    def __del__(self):\n        print('taken apart')\n\nheld = Held()\n"
    )
    (tmp_path / "a.py").write_text(
        "import atexit, own, sys, threading\n"
        "atexit.register(print, 'at exit')\n"
        "threading.Timer(0.01, print, ['thread']).start()\n"
        "sys.exit(*map(eval, sys.argv[1:]))\n"
    )
    words = ["", "3", "'\"a message\"'", "wrong"]
    done = run(tmp_path, "; ".join(f"python a.py {word}; echo $?" for word in words))
    ends = ["thread", "at exit"]
    assert done.stdout.split("\n")[:-1] == [
        *(*ends, "0"), *(*ends, "3"), *(*ends, "taken apart", "1"), *(*ends, "taken apart", "1")
    ]  # fmt: skip
    assert done.stderr.startswith("a message\nTraceback")
    assert done.stderr.endswith("NameError: name 'wrong' is not defined\n")


def test_a_fork_has_what_earlier_ones_imported_of_outsize_and_of_nothing_else(
    tmp_path: Path,
) -> None:
    (tmp_path / "own.py").touch()
    (tmp_path / "a.py").write_text(
        "import sys\n"
        "print(*[name in sys.modules for name in ('outsize.cli.main', 'own', 'colorsys')])\n"
        "import outsize.cli.main, own, colorsys\n"
    )
    done = run(tmp_path, "python a.py; python a.py; SAID=so outsize 0 < /dev/null; python a.py")
    assert done.stdout.splitlines()[:2] == ["False False False", "True False False"]
    assert done.stdout.splitlines()[-1] == "True False False" and done.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_fork_ends_as_its_caller_is_ended(tmp_path: Path, number: int) -> None:
    script = f"""
SAID=so outsize waits < /dev/null > out 2> pid & here=$!
until [ -s pid ]; do sleep 0.1; done
kill -{number} $here
wait $here
echo $?
while kill -0 $(cat pid) 2> /dev/null; do sleep 0.1; done
"""
    done = run(tmp_path, script)
    assert done.stdout.split()[-1] == str(128 + number)


def test_forks_end_where_their_origin_is_ended(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
SAID=so outsize waits < /dev/null > out 2> pid &
until [ -s pid ]; do sleep 0.1; done
kill $PPID
while kill -0 $(cat pid) 2> /dev/null; do sleep 0.1; done
echo ended
""",
    )
    assert done.returncode == 143 and done.stdout == "ended\n"
