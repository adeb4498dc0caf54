"""How many files name a technique that are not its own: the measure of a good joint.

    python tools/touch.py           # the table
    python tools/touch.py --check   # exit code 1 where one is named in more files than it may be

A technique of `outsize/techniques` may be named in three files outside its own. Those that were
there before have a ceiling each, which only ever falls.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "outsize"
MOST = 3  # files outside its own that may name a technique


@dataclass(frozen=True)
class Subject:
    """A technique: the words that name it in code, its own files (by the beginning of their path in
    the package), the files outside these that may name it. needs: what is in every text, in small
    letters, that names it: quicker to look for."""

    words: str
    own: tuple[str, ...]
    most: int = MOST
    needs: str = ""


# Techniques from before the registry: their ceilings are today's counts.
SUBJECTS: dict[str, Subject] = {
    "vocabulary cut over a pipeline": Subject(
        r"piped|EMBED|OUTPUT_[ST]|with_vocabulary|techniques[./]vocabulary|cut vocabulary"
        r"|\b(pipeline|line|said|schedule|request)\.vocabulary\b|\bvocabulary="
        r"|[\"'](--)?vocabulary[\"'](?!, required)",  # but a tokenizer's
        ("techniques/vocabulary",),
    ),
    "overlap": Subject(
        r"\.overlap\b|\boverlap[=:]|[\"']overlap[\"']",
        ("techniques/overlap", "parallel/tensor/overlap", "parallel/courier"),
    ),
    "sequence chunks": Subject(r"sequence_chunk", ("techniques/sequence", "runtime/sequence")),
    "ladder": Subject(r"\bladder", ("techniques/wirings/ladder",)),
    "kraken": Subject(r"(?i)kraken", ("techniques/wirings/kraken",)),
    "zeroth-order": Subject(
        r"(?i)zeroth",
        ("techniques/zeroth", "runtime/special/zeroth", "runtime/special/forwards",
        "schedule/compile/zeroth"),
    ),
    "local learning": Subject(
        r"(?i)local[-_]learning|\bplan\.local\b",
        ("techniques/local", "runtime/special/local", "runtime/special/groups"),
    ),
    "frozen by dynamics": Subject(
        r"(?i)frozen[-_]by[-_]dynamics|Freezing", ("techniques/frozen", "runtime/special/freezing")
    ),
}  # fmt: skip


# Names that are plain words too: how code says them.
WORDS = {
    "int8": r"quant[./]int8|weights[:=] ?[\"']?int8",
    "callbacks": r"techniques(\.| import )callbacks|[\"']callbacks[\"']",
    "epochs": r"train\.epochs|techniques(\.| import )(callbacks, )?epochs",
    "expert": r"[\"']expert[\"']|axes[./]expert|(?i:expert[- ]parallel)",
    "chat": r"data[./]chat\b|\bChat(Source)?\b",
    "context": r"[\"']context[\"']|axes[./]context|(?i:context[- ]parallel)",
}


def registered() -> dict[str, Subject]:
    """Every file of `outsize/techniques` that is not in SUBJECTS, named by its stem."""
    told = tuple(own for subject in SUBJECTS.values() for own in subject.own)
    files = sorted((PACKAGE / "techniques").rglob("*.py"))
    found = {}
    for file in files:
        path = str(file.relative_to(PACKAGE))
        if file.stem != "__init__" and not path.startswith(told):
            words, needs = WORDS.get(file.stem), ""
            if words is None:
                words = rf"(?i)\b{file.stem.replace('_', '[-_ ]?')}\b"
                needs = file.stem.partition("_")[0].lower()
            found[file.stem] = Subject(words, (path,), needs=needs)
    return found


@cache
def texts() -> dict[str, str]:
    """Every file of the package by its path."""
    return {str(f.relative_to(PACKAGE)): f.read_text() for f in sorted(PACKAGE.rglob("*.py"))}


@cache
def lowered() -> dict[str, str]:
    """The same in small letters."""
    return {path: text.lower() for path, text in texts().items()}


def touched(subject: Subject) -> list[str]:
    """The files that name a technique and are not its own."""
    pattern = re.compile(subject.words)
    others = {path: text for path, text in texts().items() if not path.startswith(subject.own)}
    return [
        path
        for path, text in others.items()
        if subject.needs in lowered()[path] and pattern.search(text)
    ]


def main(arguments: list[str]) -> int:
    """Print the table; gives the exit code."""
    over = []
    for name, subject in {**SUBJECTS, **registered()}.items():
        files = touched(subject)
        if len(files) > subject.most:
            over.append(name)
        shown = ", ".join(files[:MOST]) + (", ..." if len(files) > MOST else "")
        print(f"{name:32} {len(files):3} of {subject.most:3}  {shown}")
    if over:
        print(f"named in too many files: {', '.join(over)}", file=sys.stderr)
    return 1 if over and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
