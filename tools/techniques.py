"""docs/techniques.md and docs/together.md, made from what the product and the claims know.

    python tools/techniques.py           # writes both
    python tools/techniques.py --check   # exit code 1 where one is stale, or a row is not so

What a person writes of a row is in claims/techniques.toml. Names, settings and what is approximate
come from the registries, figures and verdicts from claims/results. A switch that no command or
function accepts, a file that is not there, a registered name without a row are said in a line each.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
import tomllib
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from outsize.cli.main import main as commands
from outsize.collectives.axes import AXES
from outsize.errors import OutsizeError
from outsize.models.seams import MIXERS
from outsize.models.wiring import WIRES
from outsize.plan.settings import PLAN_SETTINGS
from outsize.registry import TECHNIQUES, settings_of
from outsize.train.config import leaf
from outsize.train.resolve import resolve

ROOT = Path(__file__).parents[1]
CLAIMS = ROOT / "claims"
RECORDED = "2026-11-23"  # the last day of the figures that a person had written down
PLAIN = frozenset({"torchrun", "config.json"})  # spans that are no switch of ours
CORE = frozenset({"attention", "latent attention", "sgd"})  # registered, and no technique
Row = dict[str, Any]
Result = dict[str, Any]  # a kept one
Cells = tuple[str, ...]

sys.path.append(str(CLAIMS))
verdicts: Any = importlib.import_module("verdict")


def rows() -> list[Row]:
    """What is written of each row."""
    found: list[Row] = tomllib.loads((CLAIMS / "techniques.toml").read_text())["row"]
    return found


# -- what is not so --------------------------------------------------------------------------------


def problems(written: list[Row]) -> Iterator[str]:
    """A line for each thing that a row says and that is not so."""
    for row in written:
        name = row["name"]
        for path in (*row["where"], *row.get("proof", ())):
            if not (ROOT / path).is_file():
                yield f"{name}: {path} is not there"
        for claim in row.get("claims", ()):
            if not (CLAIMS / f"{claim}.py").is_file():
                yield f"{name}: claims/{claim}.py is not there"
        if not row.get("claims") and not row.get("proof"):
            yield f"{name}: no claim and no proof; expected a script that shows it"
        yield from (f"{name}: {why}" for why in refused(row["on"]))
        yield from (f"{name}: {why}" for why in misnamed(row))
    named = {each for row in written for each in row.get("registered", ())}
    yield from (f"{each!r} is registered and has no row" for each in sorted(registered() - named))
    shown = {claim for row in written for claim in row.get("claims", ())}
    yield from (f"claims/{each}.py has no row" for each in sorted(scripts() - shown))


def registered() -> set[str]:
    """Names of the techniques in the registries that a user meets."""
    found: set[str] = set()
    for registry in (TECHNIQUES, PLAN_SETTINGS, AXES, WIRES, MIXERS):
        found.update(registry.names())
    return found - CORE


def scripts() -> set[str]:
    """Claims: scripts that conclude one."""
    every = CLAIMS.glob("*.py")
    return {path.stem for path in every if re.search(r"import .*\bconclude\b", path.read_text())}


def misnamed(row: Row) -> Iterator[str]:
    """Names of a row that are not registered, or registered as another kind."""
    for each in row.get("registered", ()):
        if each not in registered():
            yield f"{each!r} is not registered"
        one = TECHNIQUES.find(each)
        if one is not None and one.exact == row["kind"].startswith("approximate"):
            yield f"kind is {row['kind']!r}, and {each!r} is registered as exact={one.exact}"


def refused(text: str) -> Iterator[str]:
    """Of the spans of code in how a row is switched on, those that nothing accepts."""
    spans = re.findall(r"`([^`]+)`", text)
    said = [span.replace(": ", "=", 1) for span in spans if re.match(r"[a-z0-9._-]+: ", span)]
    for span in spans:
        if span in PLAIN or span in WIRES.names():
            continue
        if span.startswith(("outsize ", "--")):
            yield from _refused_options(span)
        elif span.startswith("outsize."):
            yield from _refused_call(span)
        elif leaf(key := span.split(":")[0]) is None:
            yield f"no run has the key {key!r}"
    try:
        resolve(None, said)
    except OutsizeError as error:
        yield f"{', '.join(said)}: {error}"


def _refused_options(span: str) -> Iterator[str]:
    """Of "outsize train --memory SIZE" or "--memory SIZE"."""
    name = span.split(" ")[1] if span.startswith("outsize ") else ""
    if name and name not in commands.commands:
        yield f"there is no command {name!r}"
        return
    chosen = [commands.commands[name]] if name else list(commands.commands.values())
    taken = {option for one in chosen for param in one.params for option in param.opts}
    for option in re.findall(r"(--[a-z-]+)", span):
        if option not in taken:
            yield f"{f'outsize {name} does not take' if name else 'no command takes'} {option}"
    for axis in re.findall(r"\b(\w+)=", (re.search(r"--mesh (\S+)", span) or [""])[0]):
        if AXES.find(axis) is None:
            yield f"there is no axis {axis!r}"
    for key in re.findall(r"--set ([a-z0-9._-]+)=", span):
        if leaf(key) is None:
            yield f"no run has the key {key!r}"


def _refused_call(span: str) -> Iterator[str]:
    """Of "outsize.load(memory=)": a public function or a class, and keywords of it."""
    path, _, words = span.partition("(")
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name, None)
    if not callable(found):
        yield f"there is no {path}"
        return
    taken = _keywords(found)
    yield from (
        f"{path} does not take {word!r}"
        for word in re.findall(r"(\w+)=", words)
        if word not in taken
    )


def _keywords(of: Callable[..., Any]) -> set[str]:
    """Names of what a function or a class takes, those of its typed options among them."""
    found = set(inspect.signature(of).parameters)
    for hint in typing.get_type_hints(of).values() if inspect.isfunction(of) else ():
        if typing.get_origin(hint) is typing.Unpack:
            found.update(typing.get_type_hints(typing.get_args(hint)[0]))
    return found


# -- the pages -------------------------------------------------------------------------------------

_HEAD = """# Techniques

Made by `python tools/techniques.py`; do not edit. One row for each technique that is in the code,
tested, and reachable by a user. What is not here is not there.

A verdict is `reached` (the paper's own figure under the paper's own condition, or the bound of the
hardware), `weaker` (x of y: the figures that are missed, had under another condition, or not
measured) or `absent`. Beside it stands how: `run`, `emulated links` (messages wait as long as a
link would take), `emulated devices` (passes do) or `simulated`. A result with figures of several
ways has a verdict for each.

"""
_TAIL = """
- **Kind**: *exact* where losses, gradients and weights are those of the plain run; *approximate*
  where the maths changes. The second kind acts only when it is named under `approximate:`.
- **Result**: of the script under `claims/`, from its last run on a machine that was free enough for
  what it judges; the whole of it, with processor and commit, is in `claims/results`.

Which of them do not go together is in [another table](together.md). How one is added is in the
contributing guide at the root of the repository.
"""


def techniques_page(written: list[Row]) -> str:
    """docs/techniques.md."""
    claimed = [row for row in written if row.get("claims")]
    others = [row for row in written if not row.get("claims")]
    cells: list[Cells] = [
        ("technique", "paper or source", "where", "how to switch on", "kind", "result")
    ]
    cells += [(*_common(row), "<br>".join(_results(row))) for row in claimed]
    own: list[Cells] = [
        ("technique", "paper or source", "where", "how to switch on", "kind", "shown by")
    ]
    own += [(*_common(row), ", ".join(f"`{path}`" for path in row["proof"])) for row in others]
    paths = sorted(verdicts.RESULTS.glob("*.json"))
    count = reckoned(json.loads(path.read_text()) for path in paths)
    return (
        f"{_HEAD}{count}{_table(cells)}\n## Without a figure of a paper\n\n"
        f"What these give is held by tests; no figure is claimed of them.\n\n{_table(own)}{_TAIL}"
    )


def _table(cells: list[Cells]) -> str:
    rule = ("---",) * len(cells[0])
    return "".join(f"| {' | '.join(each)} |\n" for each in (cells[0], rule, *cells[1:]))


def _common(row: Row) -> Cells:
    where = ", ".join(f"`{path}`" for path in row["where"])
    return row["name"], row["source"], where, f"{row['on']}{_settings(row)}", row["kind"]


def _settings(row: Row) -> str:
    """The settings of its techniques and their defaults, as registered."""
    found = [
        f"`{key}.{one.name}` ({one.default})"
        for key in row.get("registered", ())
        if (made := TECHNIQUES.find(key)) is not None
        for one in settings_of(made.settings)
    ]
    return f"; settings: {', '.join(found)}" if found else ""


def _results(row: Row) -> Iterator[str]:
    """What each claim of a row came to, in words, and last those that have no result."""
    kept = {name: verdicts.RESULTS / f"{name}.json" for name in row["claims"]}
    yield from (_result(name, path) for name, path in kept.items() if path.is_file())
    if missing := [f"`claims/{name}.py`" for name, path in kept.items() if not path.is_file()]:
        scripts = ", ".join(missing)
        if "recorded" in row:
            yield f"not measured since {RECORDED}: {row['recorded']} ({scripts} of then)"
        else:
            yield f"not measured yet ({scripts})"


def _figures(result: Result) -> list[Any]:
    """Of a kept result."""
    return [verdicts.Figure(**figure) for figure in result["figures"]]


def _result(name: str, path: Path) -> str:
    result = json.loads(path.read_text())
    figures = _figures(result)
    verdict = result["verdict"]
    word = verdict.split(" ")[0]
    stale = "" if result["script"] == verdicts.digest(name) else "; the script changed since"
    source = f"(`claims/{name}.py`{stale})"
    if word == "absent":
        why = verdict.removeprefix(f"{word} ").strip("()")
        return f"**{word}**, {result['how']}, {result['date']}: {why} {source}"
    shown = "; ".join(
        f"**{of.split(' (')[0]}**, {how}, {result['date']}: {'; '.join(map(str, each))}"
        for how, (of, each) in verdicts.parts(figures).items()
    )
    return f"{shown} {source}"


def reckoned(kept: Iterable[Result]) -> str:
    """How many results are reached, and in which ways."""
    words, ways = Counter[str](), Counter[str]()
    for result in kept:
        word = result["verdict"].split(" ")[0]
        words[word] += 1
        if word == "reached":
            ways[" and ".join(verdicts.parts(_figures(result)))] += 1
    reached = "; ".join(f"{count} {way}" for way, count in sorted(ways.items())) or "0"
    return (
        f"Of {words.total()} results {words['reached']} are reached, by way: {reached}."
        f" {words['weaker']} are weaker, {words['absent']} absent.\n\n"
    )


def pages() -> dict[Path, str]:
    """Both pages by their paths."""
    together: Any = importlib.import_module("together")
    return {
        ROOT / "docs" / "techniques.md": techniques_page(rows()),
        ROOT / "docs" / "together.md": together.page(),
    }


def main(arguments: list[str]) -> int:
    """Write the pages, or with --check say what is not so; gives the exit code."""
    wrong = list(problems(rows()))
    for path, text in pages().items():
        if "--check" not in arguments:
            path.write_text(text)
        elif path.read_text() != text:
            wrong.append(f"{path.relative_to(ROOT)} is stale; run python tools/techniques.py")
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
