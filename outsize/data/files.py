"""Which files a data path stands for: files, directories and the Python standard library.

A file that the user names is refused at once when it cannot be what it should be (missing,
binary). A file met inside a directory is skipped and reported instead: one stray file among
thousands should not stop a run.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from outsize.errors import OutsizeError

Kind = Literal["text", "jsonl", "parquet"]
STDLIB = "stdlib"
SNIFF_BYTES = 8192  # how much of a file is looked at to tell text from binary

_TEXT = """txt text md markdown rst tex adoc org html htm xml py pyi pyx c h cc cpp cxx hpp cu cuh
    rs go java kt scala js jsx ts tsx css rb pl lua sh sql r jl hs ml ex erl swift cs php yaml yml
    toml ini cfg"""
SUFFIXES: dict[Kind, frozenset[str]] = {
    "text": frozenset(f".{name}" for name in _TEXT.split()),
    "jsonl": frozenset({".jsonl", ".ndjson"}),
    "parquet": frozenset({".parquet", ".pq"}),
}


@dataclass(frozen=True)
class SourceFile:
    """A file to read. `named`: the user wrote its path (a fault is an error, not a skip)."""

    path: Path
    kind: Kind
    named: bool
    size: int  # bytes
    mtime: int  # nanoseconds


@dataclass(frozen=True)
class Found:
    """Files in reading order; `ignored` counts the files of a directory that no reader takes."""

    files: tuple[SourceFile, ...]
    ignored: int


def find_files(paths: tuple[str, ...], kind: Kind | None = None) -> Found:
    """The files that `paths` stand for, in a fixed order, each once.

    Directories are walked recursively in sorted order, hidden names and links to directories left
    out, files taken by suffix. `kind` None goes by suffix, text where a named file has another.
    Raises OutsizeError for a missing path, a named binary file, or when there is nothing to read.
    """
    if not paths or not all(paths):
        raise OutsizeError("data.path is empty: expected files, directories or 'stdlib'")
    files: dict[Path, SourceFile] = {}
    ignored: Counter[str] = Counter()
    for text in paths:
        for file in _expand(text, kind, ignored):
            files.setdefault(file.path.resolve(), file)
    if not files:
        counts = sorted(ignored.items())
        seen = ", ".join(f"{n} {suffix or 'without suffix'}" for suffix, n in counts)
        wanted = "text, .jsonl or .parquet files" if kind is None else f"{kind} files"
        raise OutsizeError(
            f"no data in {', '.join(paths)}: expected {wanted}, found {seen or 'no files'}; "
            "name the files themselves or give another directory"
        )
    return Found(tuple(files.values()), sum(ignored.values()))


def check_paths(paths: tuple[str, ...]) -> None:
    """Refuse a path that is not there, before anything is read or measured."""
    for text in paths:
        if text != STDLIB and not Path(text).expanduser().exists():
            raise OutsizeError(f"data path {text} does not exist: check the path (in {Path.cwd()})")


def looks_binary(path: Path) -> bool:
    """Whether there are NUL bytes at the start of the file, which UTF-8 text never has."""
    with path.open("rb") as file:
        return b"\0" in file.read(SNIFF_BYTES)


def _expand(text: str, kind: Kind | None, ignored: Counter[str]) -> Iterator[SourceFile]:
    if text == STDLIB:
        yield from _stdlib()
        return
    check_paths((text,))
    path = Path(text).expanduser()
    if path.is_dir():
        yield from _directory(path, _suffixes(kind), ignored)
    elif path.is_file():
        yield _named(path, kind)
    else:
        raise OutsizeError(f"data path {text}: expected a file or a directory, found neither")


def _named(path: Path, kind: Kind | None) -> SourceFile:
    own = kind or _suffixes(None).get(path.suffix.lower(), "text")
    try:
        binary = own != "parquet" and looks_binary(path)
    except OSError as error:
        raise OutsizeError(f"data file {path} cannot be read: {error.strerror}") from None
    if binary:
        raise OutsizeError(
            f"data file {path} is binary (NUL bytes at its start): expected UTF-8 text"
            f"{' lines of JSON' if own == 'jsonl' else ''}; convert it or leave it out"
        )
    return _source(path, own, named=True)


def _suffixes(kind: Kind | None) -> dict[str, Kind]:
    kinds = get_args(Kind) if kind is None else (kind,)
    table: dict[str, Kind] = {suffix: own for own in kinds for suffix in SUFFIXES[own]}
    if kind == "jsonl":  # a common name for JSON lines, but only when the user says they are
        table[".json"] = kind
    return table


def _directory(
    root: Path,
    table: dict[str, Kind],
    ignored: Counter[str],
    leave: frozenset[str] = frozenset({"__pycache__"}),
) -> Iterator[SourceFile]:
    """Files under root by suffix, sorted by their path below root so that the order is the same
    wherever root lies. Folders named in `leave` and hidden ones are not entered."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [one for one in folders if not one.startswith(".") and one not in leave]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    for path in sorted(found, key=lambda path: path.relative_to(root).parts):
        own = table.get(path.suffix.lower())
        if own is None or not path.is_file():
            ignored[path.suffix.lower()] += 1
        else:
            yield _source(path, own, named=False)


def _source(path: Path, kind: Kind, named: bool) -> SourceFile:
    status = path.stat()
    return SourceFile(path, kind, named, status.st_size, status.st_mtime_ns)


def _stdlib() -> Iterator[SourceFile]:
    """Source and documentation of the standard library of the running Python.

    All of its .py files, its own tests too (half of the text, and as good as the rest), without
    installed packages; .txt and .rst files outside the tests, whose fixtures are in old encodings
    on purpose; and the documentation's sources where a distribution installs them. About 32 MB
    for CPython 3.11.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    data = Path(sys.base_prefix) / "share" / "doc"
    foreign = frozenset({"site-packages", "dist-packages", "__pycache__"})
    fixtures = frozenset({"test", "tests", "idle_test"})
    texts: dict[str, Kind] = {".txt": "text", ".rst": "text"}
    none: Counter[str] = Counter()  # what the library's folders hold beside text is no loss
    source = list(_directory(root, {".py": "text"}, none, foreign))
    yield from source
    yield from _directory(root, texts, none, foreign | fixtures)
    if not source:
        raise OutsizeError(
            f"data path stdlib: no source files of the standard library in {root}; "
            "give files or directories of text instead"
        )
    for folder in (data / f"python{version}", data / "python3", data / "python"):
        if folder.is_dir():
            yield from _directory(folder, texts, none)
