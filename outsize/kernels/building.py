"""Libraries of C++ passes: compiled where no process did before, kept, and loaded with ctypes.

A library is compiled when one of its functions is first asked for: training and serving need a
quarter each of what all take. Processes that ask at once wait for the first of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outsize.errors import OutsizeError

_FOLDER = Path(__file__).parent
_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"),
    *("-Wl,--as-needed", "-Wl,-Bsymbolic"),  # what each has inlined is its own
)
_TUNED = {  # tried first; the build falls back to the flags above
    "x86_64": ("-march=native", "-mprefer-vector-width=512"),
    "aarch64": ("-mcpu=native",),
}
_SECONDS = 600.0  # more than any source takes, on a machine that does much else too
_SEAL = 32  # bytes of the digest at the end of a cached file

Signature = tuple[type | None, tuple[type, ...]]  # result, arguments


@dataclass(frozen=True)
class Library:
    """Sources (names in this folder, the one that takes longest first) that are compiled and loaded
    together. needs: libraries whose functions theirs call."""

    sources: tuple[str, ...]
    flags: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


class Libraries:
    """Libraries by name, from `cache`, built with `compiler` (a path) if they are not there or
    damaged."""

    def __init__(self, libraries: Mapping[str, Library], compiler: str, cache: Path) -> None:
        self._all, self._compiler, self._cache = libraries, compiler, cache
        self._open = dict[str, ctypes.CDLL]()
        self._alone = threading.RLock()
        self._facts = _facts(compiler)

    def opened(self, *names: str) -> ctypes.CDLL:
        """As `open` does; OutsizeError where it fails, since others of them are in use."""
        try:
            return self.open(*names)
        except (OSError, subprocess.SubprocessError) as error:
            raise OutsizeError(
                f"the C++ passes {names[-1]!r} cannot be built as others were: {error}; free memory"
                " and disk for the compiler, or take it off PATH to go on without any of them"
            ) from None

    def open(self, *names: str) -> ctypes.CDLL:
        """These and what they need, compiled at once where they are not there; the last of them.
        OSError or SubprocessError where that fails."""
        with self._alone:
            wanted = dict.fromkeys(n for name in names for n in (*self._all[name].needs, name))
            missing = [name for name in wanted if name not in self._open]
            if missing:
                with contextlib.ExitStack() as room:
                    made = self._build(missing, room)
                    for name in missing:
                        self._load(name, made.get(name, self._path(name)))
            return self._open[names[-1]]

    def _build(self, names: list[str], room: contextlib.ExitStack) -> dict[str, Path]:
        """Those that are not kept, compiled into a folder that lasts as long as `room`.

        A cache that cannot be written costs a build a process and is no error.
        """
        if all(map(self._kept, names)):
            return {}
        room.enter_context(_one_process(self._cache))
        lacking = [name for name in names if not self._kept(name)]
        if not lacking:  # another process has built them meanwhile
            return {}
        folder = Path(room.enter_context(tempfile.TemporaryDirectory(prefix="outsize-")))
        made = {name: folder / self._path(name).name for name in lacking}
        _compile(self._compiler, [(self._all[name], path) for name, path in made.items()])
        for name, path in made.items():
            with contextlib.suppress(OSError):
                keep(path.read_bytes(), self._path(name))
        return made

    def _path(self, name: str) -> Path:
        said = hashlib.blake2b(f"{self._all[name]}\n{self._facts}".encode(), digest_size=12)
        return self._cache / f"native-{name}-{said.hexdigest()}.so"

    def _kept(self, name: str) -> bool:
        return whole(self._path(name)) is not None

    def _load(self, name: str, path: Path) -> None:
        """Held by the process from then on, also where its file goes."""
        needed = any(name in one.needs for one in self._all.values())
        mode = ctypes.RTLD_GLOBAL if needed else ctypes.RTLD_LOCAL
        self._open[name] = ctypes.CDLL(str(path), mode=mode)


class Functions:
    """Functions of libraries by their names in C++, each found when it is first asked for.

    signatures: by library, by a function's name without its prefix.
    """

    def __init__(
        self, libraries: Libraries, signatures: Mapping[str, Mapping[str, Signature]]
    ) -> None:
        self._libraries = libraries
        self._known = {
            f"outsize_{name}": (library, signature)
            for library, each in signatures.items()
            for name, signature in each.items()
        }

    def __getattr__(self, name: str) -> Any:
        if name not in self._known:
            raise AttributeError(name)
        library, (result, arguments) = self._known[name]
        function = getattr(self._libraries.opened(library), name)
        function.restype, function.argtypes = result, arguments
        self.__dict__[name] = function
        return function


@contextlib.contextmanager
def _one_process(folder: Path) -> Iterator[None]:
    """Others that ask for the same folder wait; nobody does where it cannot be made."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY)
            held.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # let go where the process ends
        yield


def _facts(compiler: str) -> str:
    """What all libraries depend on."""
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, check=True, timeout=_SECONDS
    ).stdout
    shared = [Path(path).name for path in runtimes()]  # wherever this environment has them
    sources = hashlib.blake2b()
    for path in sorted((*_FOLDER.glob("*.cpp"), *_FOLDER.glob("*.h"))):
        sources.update(path.name.encode() + path.read_bytes())
    told = (compiler, version, _FLAGS, _TUNED, torch.__version__, shared, processor())
    return "\n".join((sources.hexdigest(), *map(repr, told)))


def processor() -> str:
    """The processor's name and its instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join((platform.machine(), *sorted({x for x in lines if x.startswith(wanted)})))


def runtimes() -> list[str]:
    """The OpenMP runtime that PyTorch brings, so that both use one pool of threads; none where it
    brings another than the compiler's, which then comes with its own."""
    package = Path(torch.__file__).parent
    folders: Iterable[Path] = (package / "lib", package.parent / "torch.libs")
    return sorted(str(path) for folder in folders for path in folder.glob("libgomp*.so*"))[:1]


def _compile(compiler: str, made: list[tuple[Library, Path]]) -> None:
    """Each library to its path, for this very processor if the compiler knows how."""
    tuned = _TUNED.get(platform.machine(), ())
    for attempt in ((*_FLAGS, *tuned), _FLAGS):
        run = _linked(compiler, attempt, made)
        if run.returncode == 0:
            return
    last = (run.stderr.strip().splitlines() or ["no message"])[-1]
    raise OSError(f"{compiler} failed with status {run.returncode}: {last}")


def _linked(
    compiler: str, flags: tuple[str, ...], made: list[tuple[Library, Path]]
) -> subprocess.CompletedProcess[str]:
    """Each source by a compiler of its own, as many at once as there are processors; what failed,
    or the last."""
    # By name, as the process has it: the library serves other environments too.
    shared = [f"{flag}{part}" for path in map(Path, runtimes())
              for flag, part in (("-L", path.parent), ("-l:", path.name))]  # fmt: skip

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        told = (compiler, *flags, *command)
        return subprocess.run(told, capture_output=True, text=True, timeout=_SECONDS)

    def object_of(source: str, target: Path) -> str:
        return str(target.with_suffix(f".{source}.o"))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        each = [
            pool.submit(run, *library.flags, "-c", str(_FOLDER / f"{source}.cpp"),
                        "-o", object_of(source, target))
            for library, target in made
            for source in library.sources
        ]  # fmt: skip
        ran = [one.result() for one in each]
    failed = next((one for one in ran if one.returncode), None)
    if failed is not None:
        return failed
    for library, target in made:
        objects = (object_of(source, target) for source in library.sources)
        last = run(*objects, "-shared", "-o", str(target), *shared)
        if last.returncode:
            break
    return last


def keep(content: bytes, path: Path) -> None:
    """Seal and move into place, so that processes that write at once do not meet. OSError where it
    cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
        try:
            part.write(content + _digest(content))
            part.flush()
            os.replace(part.name, path)
        except OSError:
            os.unlink(part.name)
            raise


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_SEAL).digest()


def whole(path: Path) -> bytes | None:
    """What was kept there; None where nothing was, or it is not as it was written: loading a cut
    library would end the process."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    own, seal = content[:-_SEAL], content[-_SEAL:]
    return own if seal == _digest(own) else None
