"""Files, classes and functions that have grown too large.

python tools/sizes.py           # what is over its limit
python tools/sizes.py --check   # exit code 1 where something is
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "outsize"
LINES, METHODS, FUNCTION, PARAMETERS = 400, 20, 60, 10


def over(path: Path, name: str) -> Iterator[tuple[str, str]]:
    """(what, why) of everything in a file that is over its limit. name: of the file, for `what`."""
    text = path.read_text()
    lines = text.count("\n")
    if lines > LINES:
        yield name, f"{lines} lines, at most {LINES}"
    for node in ast.walk(ast.parse(text)):
        what = f"{name}:{getattr(node, 'name', '')}"
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(each, ast.FunctionDef) for each in node.body)
            if methods > METHODS:
                yield what, f"{methods} methods, at most {METHODS}"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno
            if length > FUNCTION:
                yield what, f"{length} lines, at most {FUNCTION}"
            parameters = len(node.args.args) + len(node.args.kwonlyargs)
            if parameters > PARAMETERS and not name.startswith("cli/"):
                yield what, f"{parameters} parameters, at most {PARAMETERS}"


def main(arguments: list[str]) -> int:
    """Print what is over its limit; gives the exit code."""
    found = [
        each
        for path in sorted(PACKAGE.rglob("*.py"))
        for each in over(path, str(path.relative_to(PACKAGE)))
    ]
    for what, why in found:
        print(f"{what}: {why}")
    return 1 if found and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
