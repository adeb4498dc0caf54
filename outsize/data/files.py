"""Which files a data path stands for: files, directories, patterns as `shards/*.jsonl.gz`, and the
Python standard library.

A file that the user names is refused at once when it cannot be what it should be (missing,
binary). A file met inside a directory is skipped and reported instead: one stray file among
thousands should not stop a run.
"""

from __future__ import annotations

import glob
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from outsize.data.unpacked import PACKED, Packed, opened
from outsize.errors import OutsizeError

Kind = Literal["text", "jsonl", "json", "csv", "parquet"]
STDLIB = "stdlib"
SNIFF_BYTES = 8192  # how much of a file is looked at to tell text from binary

_TEXT = """txt text md markdown rst tex adoc org html htm xml py pyi pyx c h cc cpp cxx hpp cu cuh
    rs go java kt scala js jsx ts tsx css rb pl lua sh sql r jl hs ml ex erl swift cs php yaml yml
    toml ini cfg"""
SUFFIXES: dict[Kind, frozenset[str]] = {
    "text": frozenset(f".{name}" for name in _TEXT.split()),
    "jsonl": frozenset({".jsonl", ".ndjson"}),
    "json": frozenset({".json"}),
    "csv": frozenset({".csv", ".tsv"}),
    "parquet": frozenset({".parquet", ".pq"}),
}


@dataclass(frozen=True)
class SourceFile:
    """A file to read. named: the user wrote its path (a fault is an error, not a skip). packed: how
    it is compressed. part: which of the data paths it is of, from 0."""

    path: Path
    kind: Kind
    named: bool
    size: int  # bytes, as it lies on disk
    mtime: int  # nanoseconds
    packed: Packed = ""
    part: int = 0


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
    for part, text in enumerate(paths):
        for file in _expand(text, kind, ignored):
            files.setdefault(file.path.resolve(), replace(file, part=part))
    if not files:
        counts = sorted(ignored.items())
        seen = ", ".join(f"{n} {suffix or 'without suffix'}" for suffix, n in counts)
        wanted = "text, .jsonl, .json, .csv or .parquet files" if kind is None else f"{kind} files"
        raise OutsizeError(
            f"no data in {', '.join(paths)}: expected {wanted}, found {seen or 'no files'}; "
            "name the files themselves or give another directory"
        )
    return Found(tuple(files.values()), sum(ignored.values()))


def check_paths(paths: tuple[str, ...]) -> None:
    """Refuse a path that is not there, before anything is read or measured."""
    for text in paths:
        if text != STDLIB and not (_here(text).exists() or _matches(text)):
            what = "matches no file" if glob.has_magic(text) else "does not exist"
            raise OutsizeError(f"data path {text} {what}: check the path (in {Path.cwd()})")


def looks_binary(path: Path, packed: Packed = "") -> bool:
    """Whether there are NUL bytes at the start of the file, which UTF-8 text never has."""
    with opened(path, packed) as file:
        return b"\0" in file.read(SNIFF_BYTES)


def _here(text: str) -> Path:
    return Path(text).expanduser()


def _matches(text: str) -> list[Path]:
    """What a pattern stands for, in order; nothing for a path that is none."""
    if not glob.has_magic(text):
        return []
    return [Path(found) for found in sorted(glob.glob(str(_here(text)), recursive=True))]


def _expand(text: str, kind: Kind | None, ignored: Counter[str]) -> Iterator[SourceFile]:
    if text == STDLIB:
        yield from _stdlib()
        return
    check_paths((text,))
    path = _here(text)
    for one in [path] if path.exists() else _matches(text):
        if one.is_dir():
            yield from _directory(one, _suffixes(kind), ignored)
        elif one.is_file():
            yield _named(one, kind)
        else:
            raise OutsizeError(f"data path {one}: expected a file or a directory, found neither")


def _named(path: Path, kind: Kind | None) -> SourceFile:
    suffix, packed = _suffix(path)
    own = kind or _suffixes(None).get(suffix, "text")
    try:
        binary = own != "parquet" and looks_binary(path, packed)
    except OSError as error:
        raise OutsizeError(f"data file {path} cannot be read: {error.strerror}") from None
    if binary:
        raise OutsizeError(
            f"data file {path} is binary (NUL bytes at its start): expected UTF-8 text"
            f"{' lines of JSON' if own == 'jsonl' else ''}; convert it or leave it out"
        )
    return _source(path, own, packed, named=True)


def _suffix(path: Path) -> tuple[str, Packed]:
    """ ".jsonl" and "gz" of a.jsonl.gz."""
    last = path.suffix.lower()
    packed = PACKED.get(last)
    return (last, "") if packed is None else (path.with_suffix("").suffix.lower(), packed)


def is_data(path: Path) -> bool:
    """Whether a file is called as data alone is, not as a program's settings may be."""
    own, packed = _suffix(path)
    records = SUFFIXES["jsonl"] | SUFFIXES["csv"] | SUFFIXES["parquet"]
    return bool(packed) or own in {".txt", *records}


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
        suffix, packed = _suffix(path)
        own = table.get(suffix)
        if own is None or not path.is_file():
            ignored[path.suffix.lower()] += 1
        else:
            yield _source(path, own, packed, named=False)


def _source(path: Path, kind: Kind, packed: Packed, named: bool) -> SourceFile:
    status = path.stat()
    return SourceFile(path, kind, named, status.st_size, status.st_mtime_ns, packed)


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
