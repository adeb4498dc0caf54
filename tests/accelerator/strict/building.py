"""The device's library: compiled at first use, and kept in the cache folder of this person."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
_COMPILERS = ("g++", "c++", "clang++")
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-Wall", "-Werror", "-Wno-interference-size")
_SECONDS = 300.0  # more than a build takes on a busy machine: about twenty of computing


class NoCompiler(RuntimeError):
    """The device cannot be built here."""


def cache_folder() -> Path:
    """Where libraries are kept."""
    base = os.environ.get("STRICT_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return Path(base or Path.home() / ".cache") / "outsize" / "strict"


def compiler() -> str:
    """The C++ compiler. Raises NoCompiler."""
    found = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if found is None:
        raise NoCompiler(
            f"no C++ compiler ({', '.join(_COMPILERS)}) on PATH, which the accelerator of the"
            " tests is built with; install g++"
        )
    return found


def build(cache: Path) -> Path:
    """The library in `cache`, compiled where it is missing, once for all who ask."""
    path = compiler()
    target = cache / f"strict-{_key(path, _sources())}.so"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(path, target)
    return target


def _sources() -> list[Path]:
    return sorted(FOLDER.glob("*.cpp"))


def _key(path: str, sources: Sequence[Path]) -> str:
    """What is compiled of sources depends on, as a digest."""
    version = subprocess.run([path, "--version"], capture_output=True, check=True).stdout
    digest = hashlib.blake2b(version, digest_size=12)
    digest.update(f"{path} {_FLAGS} {torch.__version__}".encode())
    for source in (*sources, *sorted(FOLDER.glob("*.h"))):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _compile(path: str, target: Path) -> None:
    """Each source on a thread of its own, unless its object is kept, then all into `target`."""
    package = Path(torch.__file__).parent
    folder = target.with_suffix(f".{os.getpid()}")
    folder.mkdir()
    try:

        def one(source: Path) -> str:
            kept = target.parent / f"{source.stem}-{_key(path, [source])}.o"
            if not kept.exists():
                made, headers = str(folder / kept.name), str(package / "include")
                _run([path, *_FLAGS, "-isystem", headers, "-c", str(source), "-o", made])
                os.replace(made, kept)
            return str(kept)

        with ThreadPoolExecutor(max(2, os.cpu_count() or 1)) as threads:
            objects = list(threads.map(one, _sources()))
        libraries = [f"-L{package / 'lib'}", "-lc10", "-ltorch_cpu", "-lpthread"]
        whole = str(folder / "whole.so")
        _run([path, "-shared", *objects, *libraries, "-o", whole])
        os.replace(whole, target)
    finally:
        shutil.rmtree(folder)


def _run(command: list[str]) -> None:
    run = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    if run.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\nfailed:\n{run.stderr}")
