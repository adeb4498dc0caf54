"""Runs the code blocks of Markdown documents, so that what they show works.

    python tools/doc_blocks.py README.md docs/start/train.md

The blocks of a document run in order, in one temporary directory for the whole document:
`bash` blocks by bash, `console` blocks by bash without their output lines, `python` blocks in a
fresh process each. Blocks in any other language are for reading. A comment on the line before a
block changes that:

    <!-- run: root -->          run it from the current directory, the root of the checkout
    <!-- run: skip WHY -->      do not run it
    <!-- file: NAME -->         write it to NAME in the temporary directory

`--only TEXT` runs the blocks that have this text alone, `--but TEXT` all others; files are written
either way, and a text that no block has is refused.

The first failure ends the run and is named by file and line.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

RUNNABLE = ("bash", "console", "python")
FENCE = re.compile(r"^(?P<indent>\s*)(?P<ticks>`{3,}|~{3,})(?P<language>[^`\s]*)[^`]*$")
DIRECTIVE = re.compile(r"^\s*<!--\s*(?P<verb>run|file):\s*(?P<what>.*?)\s*-->\s*$")


class BlockError(Exception):
    """A block that cannot be understood or that failed; the message starts with file:line."""


@dataclass(frozen=True)
class Block:
    """One fenced block. `line` is that of its opening fence, counted from 1."""

    path: str
    line: int
    language: str
    text: str
    verb: str = ""  # of the comment before it: "run", "file" or none
    what: str = ""  # the rest of that comment

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line}"

    @property
    def action(self) -> str:
        """What becomes of it: "root", "temp", "file" or "read"."""
        if self.verb == "file":
            return "file"
        if self.verb == "run":
            return "root" if self.what == "root" else "read"
        return "temp" if self.language in RUNNABLE else "read"


def blocks(path: str, text: str) -> Iterator[Block]:
    """The fenced blocks of a document in order; BlockError for one that is malformed."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        fence = FENCE.match(lines[at])
        if fence is None:
            at += 1
            continue
        end = _closing(path, lines, at, fence["ticks"])
        body = textwrap.dedent("\n".join(lines[at + 1 : end]))
        verb, what = _directive(lines[at - 1] if at else "")
        yield _checked(Block(path, at + 1, fence["language"], body, verb, what))
        at = end + 1


def _closing(path: str, lines: Sequence[str], start: int, ticks: str) -> int:
    for at in range(start + 1, len(lines)):
        line = lines[at].strip()
        if line.startswith(ticks) and not line.strip(ticks[0]):
            return at
    raise BlockError(f"{path}:{start + 1}: the block is not closed")


def _directive(line: str) -> tuple[str, str]:
    found = DIRECTIVE.match(line)
    return (found["verb"], found["what"]) if found else ("", "")


def _checked(block: Block) -> Block:
    if not block.language:
        raise BlockError(f"{block.place}: no language is named; write ```text for plain text")
    if block.verb == "run" and block.what != "root" and not re.match(r"skip \S", block.what):
        raise BlockError(
            f"{block.place}: 'run: {block.what}' is neither 'run: root' nor 'run: skip WHY'"
        )
    if block.action == "root" and block.language not in RUNNABLE:
        raise BlockError(f"{block.place}: a {block.language} block cannot be run")
    if block.verb == "file" and Path(block.what).name != block.what:
        raise BlockError(f"{block.place}: {block.what!r} is not a plain file name")
    return block


def console_commands(text: str) -> str:
    """The commands of a console session: lines after "$ ", continued by lines after "> "."""
    return "\n".join(line[2:] for line in text.splitlines() if line.startswith(("$ ", "> ")))


def command(block: Block, scratch: Path) -> list[str]:
    """The command line that runs a block."""
    if block.language == "python":
        script = scratch / f"block_{block.line}.py"
        script.write_text(block.text + "\n")
        return ["python", str(script)]
    text = console_commands(block.text) if block.language == "console" else block.text
    return ["bash", "-euo", "pipefail", "-c", text]


def run_block(block: Block, root: Path, scratch: Path, limit: float) -> None:
    """Runs one block (limit in seconds); BlockError when it fails or takes longer."""
    directory = root if block.action == "root" else scratch
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until it can be ended
    process = subprocess.Popen(
        command(block, scratch), cwd=directory, stdin=subprocess.DEVNULL, start_new_session=True,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before),
    )  # fmt: skip
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        code = process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        raise BlockError(
            f"{block.place}: the {block.language} block ran longer than {limit:.0f} s"
        ) from None
    finally:
        _end_group(process)
    if code:
        raise BlockError(f"{block.place}: the {block.language} block ended with exit code {code}")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends what the block left running: all of it has the process group of the block."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def left_out(path: str, found: Sequence[Block], only: str | None, but: str | None) -> set[int]:
    """Lines of the blocks that do not run, by their text; BlockError for a text that none has."""
    runnable = [block for block in found if block.action in ("root", "temp")]
    for text in (only, but):
        if text is not None and not any(text in block.text for block in runnable):
            raise BlockError(f"{path}: no block that runs has {text!r}")
    return {
        block.line
        for block in runnable
        if (only is not None and only not in block.text) or (but is not None and but in block.text)
    }


def run_document(
    path: str, root: Path, limit: float, only: str | None = None, but: str | None = None
) -> int:
    """Runs a document's blocks, those with the text `only` or without `but`; how many ran."""
    count = 0
    found = list(blocks(path, (root / path).read_text()))
    others = left_out(path, found, only, but)
    with tempfile.TemporaryDirectory(prefix="doc_blocks_") as name:
        scratch = Path(name)
        for block in found:
            if block.action == "file":
                (scratch / block.what).write_text(block.text + "\n")
            elif block.line in others:
                print(f"--- {block.place}: {block.language}, left to another run", flush=True)
            elif block.action == "read":
                print(f"--- {block.place}: {block.language}, for reading", flush=True)
            else:
                print(f"--- {block.place}: {block.language}", flush=True)
                start = time.monotonic()
                run_block(block, root, scratch, limit)
                print(f"--- {block.place}: {time.monotonic() - start:.1f} s", flush=True)
                count += 1
    return count


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run the code blocks of Markdown documents.")
    parser.add_argument("documents", nargs="+", help="paths relative to the current directory")
    parser.add_argument("--limit", type=float, default=5400.0, help="seconds a block may take")
    parser.add_argument("--only", metavar="TEXT", help="run the blocks with this text alone")
    parser.add_argument("--but", metavar="TEXT", help="run no block with this text")
    options = parser.parse_args(arguments)
    try:
        for path in options.documents:
            count = run_document(path, Path.cwd(), options.limit, options.only, options.but)
            print(f"--- {path}: {count} blocks ran", flush=True)
    except BlockError as error:
        print(f"doc_blocks: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what a block has started ends with it
    sys.exit(main())
