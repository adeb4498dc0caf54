"""Fused passes in C++ for processors: built at first use, loaded with ctypes.

An element-wise pass composed of PyTorch's operators crosses memory once an operator, and in
bfloat16 once more for every cast. native.cpp crosses it once; attention.cpp is attention. Each of
their functions is an operator of the dispatcher, `torch.ops.outsize.*`, so that ledgers and fake
tensors see its outputs as they see those of any operator; where nobody looks (`bare`), those of a
decoder's step are called at once. Each has a plain twin, which runs wherever `fits` says no: in
other dtypes, for tensors that are not contiguous, without a compiler.
On devices that Triton compiles for some operators have a kernel there too (native_kernels.py); who
asks whether one fits names the operator then, and on all other devices the twins run.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from array import array
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_double, c_float, c_int, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outsize import accelerator
from outsize.torch_private import FakeTensor, unseen

_READ = (Tensor, nn.Parameter, FakeTensor)
CODES = {torch.float32: 0, torch.bfloat16: 1}  # the dtypes of native.cpp, by its numbers
COMPILED = (torch.float32, torch.bfloat16, torch.float16)  # those of Triton's kernels

_SOURCES = tuple(
    Path(__file__).with_name(f"{name}.cpp")
    for name in (
        *("native", "attention", "sparse", "shared", "blockwise", "normal", "codes", "rows"),
        *("pages", "blocks", "eights", "heads", "attention64"),
    )
)
_HEADERS = tuple(
    Path(__file__).with_name(f"{name}.h")
    for name in (
        *("blockwise", "blockwise_avx2", "blockwise_avx512", "codes", "eights", "eights_avx2"),
        *("eights_vnni", "storage", "team", "tiles"),
    )
)
_COMPILERS = ("g++", "c++", "clang++")  # g++ first: PyTorch's OpenMP runtime is its
_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fopenmp"),
    *("-fno-math-errno", "-fno-trapping-math", "-Wl,--as-needed"),
)
_TUNED = {  # tried first; the build falls back to the flags above
    "x86_64": ("-march=native", "-mprefer-vector-width=512"),
    "aarch64": ("-mcpu=native",),
}
_SECONDS = 600.0  # more than any source takes, on a machine that does much else too
_SEAL = 32  # bytes of the digest at the end of a cached file

# Result first, then arguments: as native.cpp declares them.
_P, _I, _N, _F = c_void_p, c_int, c_int64, c_float
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "rms_norm": (None, (_I, _I, _P, _P, _F, _F, _P, _P, _N, _N, _I)),
    "rms_norm_backward": (None, (_I, _I, _P, _P, _P, _P, _F, _P, _P, _N, _N, _I)),
    "rope": (None, (_I, _P, _P, _P, _P, _N, _P, _P, _N, _I, _F, _I)),
    "gate": (None, (_I, _P, _P, _P, _N, _I)),
    "gate_backward": (None, (_I, _P, _P, _P, _P, _P, _N, _I)),
    "cross_entropy": (c_double, (_I, _P, _P, _N, _F, _I, _N, _N, _I, _P)),
    "add": (None, (_I, _P, _P, _N, _I)),
    "greatest": (_N, (_I, _P, _N)),
    "exponential": (None, (_P, _P, _N)),
    "checksum": (c_uint64, (_P, _N)),
    "attention": (None, (_I, *[_P] * 8, _N, _F, _F, _I)),
    "attention_backward": (None, (_I, *[_P] * 8, _N, _F, _F, _I)),
    "float64_attention": (None, (*[_P] * 6, _N, c_double, _I)),
    "float64_attention_backward": (None, (*[_P] * 8, _N, c_double, _I)),
    "sparse_mark": (None, (_I, _P, _N, _N, _P, _P, _I)),
    "sparse_pack": (None, (_I, _P, _N, _N, _P, _P, _P, _I)),
    "sparse_unpack": (_N, (_I, _P, _P, _P, _N, _N, _N, _P, _I)),
    "blockwise_adam": (None, (_I, _I, *[_P] * 6, _N, _N, *[_P] * 3, _I, _I, _P, _I)),
    "decode": (None, (_I, _P, _P, _I)),
    "encode": (None, (_I, _P, _N, _N, _P)),
    "normal": (None, (_I, _P, _N, _N, _P, c_double, _P, _I)),
    "rows_product": (None, (_I, *[_P] * 3, _N, _I, _I)),
    "heads_product": (None, (_I, _I, _P, _P, _N, _P, *[_N] * 4, _I)),
    "eights_product": (None, (_I, *[_P] * 3, _N, _I, _I)),
    "eights_pack": (_I, (_P, _I)),
    "pages_attend": (None, (_I, _I, *[_P] * 10, _N, _F, _F, _I, _I, _P)),
    "pages_put": (None, (_I, _I, *[_P] * 4, *[_N] * 3)),
    "blocks_work": (_N, (_P, _P, _N)),
    "blocks": (None, (_P, _P, _N, _P, _P)),
    "shared_open": (_P, (_P, _I, _I, _N, _I, _P)),
    "shared_close": (None, (_P,)),
    "shared_bytes": (_N, (_I, _N)),
    "shared_abort": (None, (_P,)),
    "shared_aborted": (_I, (_P,)),
    "shared_state": (None, (_P, _I, _P)),
    "shared_barrier": (_I, (_P, _I)),
    "shared_all_reduce": (_I, (_P, _I, _I, _I, _P, _N)),
    "shared_reduce_scatter": (_I, (_P, _I, _I, _P, _P, _P)),
    "shared_all_gather": (_I, (_P, _I, _P, _P, _P)),
    "shared_all_to_all": (_I, (_P, _I, _P, _P, _P, _P)),
    "shared_broadcast": (_I, (_P, _I, _P, _N, _I)),
}


def reads(*tensors: Tensor, by: str = "") -> bool:
    """Whether the passes read such tensors: on the CPU, float32 or bfloat16, and no subclass that
    means something else by its numbers. Fake tensors are judged as the real ones they stand for.

    by: the operator that is to read them; on a device that has a kernel of it, float16 as well.
    """
    if by and not tensors[0].is_cpu:
        return _read_there(tensors, by)
    for x in tensors:  # a generator costs more than what it asks, and so does a device's name
        if x.dtype not in CODES:
            return False
    return lies(*tensors)


def lies(*tensors: Tensor) -> bool:
    """Whether passes reach such tensors, whatever their dtype."""
    for x in tensors:
        if not x.is_cpu or type(x) not in _READ:
            return False
    return library() is not None


def _read_there(tensors: tuple[Tensor, ...], operator: str) -> bool:
    device = tensors[0].device
    for x in tensors:
        if x.dtype not in COMPILED or x.device != device or type(x) not in _READ:
            return False
    return _runs(operator, device.type)


@functools.cache
def _runs(operator: str, kind: str) -> bool:
    """Whether Triton's kernel of an operator is there on a kind of device."""
    return kind in accelerator.COMPILED and accelerator.runs(
        f"outsize::{operator}", torch.device(kind)
    )


def served(*tensors: Tensor, by: str = "") -> bool:
    """Whether the passes read these now, outside autograd's sight.

    A derivative of a backward pass is asked of PyTorch, which knows the derivatives of its own.
    """
    return not torch.is_grad_enabled() and reads(*tensors, by=by)


def fits(*tensors: Tensor, by: str = "") -> bool:
    """Whether a pass takes these together: served, of one dtype and contiguous."""
    first = tensors[0]
    dtype, here = first.dtype, not by or first.is_cpu
    if torch.is_grad_enabled() or (here and dtype not in CODES):
        return False
    for x in tensors:
        if x.dtype is not dtype or not x.is_contiguous():
            return False
        if here and (not x.is_cpu or type(x) not in _READ):
            return False
    return library() is not None if here else _read_there(tensors, by)


def alike(*tensors: Tensor, by: str = "") -> bool:
    """Whether a pass takes these together, and they are of one shape."""
    shape = tensors[0].shape
    for x in tensors:
        if x.shape != shape:
            return False
    return fits(*tensors, by=by)


def bare(x: Tensor) -> bool:
    """Whether what fits may run without the dispatcher, which takes as long as a small pass: x is a
    real one on the CPU, and nobody sees operators."""
    return x.is_cpu and type(x) is not FakeTensor and unseen()


def numbers(values: Iterable[int]) -> bytes:
    """Numbers as a pass reads them: int64, one after another."""
    return array("q", values).tobytes()


def nothing(*_: object) -> None:
    """What an operator in place allocates."""


def define(
    schema: str,
    run: Callable[..., object],
    allocate: Callable[..., object],
    there: Callable[..., object] | None = None,
) -> torch.library.Library:
    """Make `outsize::<schema>` an operator: `run` on the CPU, `allocate` for tensors without bytes,
    `there` by a kernel of Triton's on devices for which that compiles, where it can.

    The operator lives as long as the library that is returned.
    """
    name = schema.partition("(")[0]
    made = torch.library.Library("outsize", "FRAGMENT")
    made.define(schema)
    made.impl(name, run, "CPU")
    made.impl(name, allocate, "Meta")
    for key in accelerator.COMPILED.values() if there is not None and compiles() else ():
        made.impl(name, there, key)
    return made


@functools.cache
def kernels(name: str = "native") -> Any:
    """Triton's kernels, imported where one is first run: native_kernels.py, or those of `name`."""
    return importlib.import_module(f"outsize.kernels.{name}_kernels")


@functools.cache
def compiles() -> bool:
    """Whether Triton is there, which comes with PyTorch where that is built for a device it
    compiles for, and the C compiler that it needs to call what it has compiled."""
    there = importlib.util.find_spec("triton") is not None
    return there and any(map(shutil.which, ("gcc", "clang")))


def threads() -> int:
    """Threads of a native pass: those of PyTorch's own."""
    return torch.get_num_threads()


@functools.cache
def library() -> ctypes.CDLL | None:
    """The passes, built where no process did before; None, after one warning, where they cannot."""
    path = next(filter(None, map(shutil.which, _COMPILERS)), None)
    base = os.environ.get("XDG_CACHE_HOME")
    cache = Path(base) if base else Path.home() / ".cache"
    return load(path, cache / "outsize" / "kernels")


def loaded() -> ctypes.CDLL:
    """The passes, where `fits` said that they are there."""
    found = library()
    assert found is not None, "an operator of native.cpp runs only where fits() holds"
    return found


def load(compiler: str | None, cache: Path) -> ctypes.CDLL | None:
    """The passes from `cache`, built with `compiler` (a path) if they are not there or damaged."""
    log = logging.getLogger(__name__)
    if compiler is None:
        log.warning(
            "no C++ compiler (%s) on PATH: plain PyTorch operators are used, which are slower on"
            " a CPU; install g++ for the fused ones",
            ", ".join(_COMPILERS),
        )
        return None
    try:
        path = cache / f"native-{_key(compiler)}.so"
        return _declared(
            ctypes.CDLL(str(path)) if whole(path) is not None else _build(compiler, path)
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("the fused C++ passes cannot be used, plain PyTorch operators are: %s", error)
        return None


def _declared(found: ctypes.CDLL) -> ctypes.CDLL:
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(found, f"outsize_{name}")
        function.restype, function.argtypes = result, arguments
    return found


def _key(compiler: str) -> str:
    """What a library depends on, as a digest."""
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, check=True, timeout=_SECONDS
    ).stdout
    runtimes = [Path(path).name for path in _runtimes()]  # wherever this environment has them
    facts = (compiler, repr(_FLAGS), repr(_TUNED), torch.__version__, repr(runtimes), _cpu())
    digest = hashlib.blake2b(version, digest_size=12)
    for path in (*_SOURCES, *_HEADERS):
        digest.update(path.read_bytes())
    digest.update("\n".join(facts).encode())
    return digest.hexdigest()


def _cpu() -> str:
    """The processor's name and its instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join((platform.machine(), *sorted({x for x in lines if x.startswith(wanted)})))


def _runtimes() -> list[str]:
    """The OpenMP runtime that PyTorch brings, so that both use one pool of threads; none where it
    brings another than the compiler's, which then comes with its own."""
    package = Path(torch.__file__).parent
    folders: Iterable[Path] = (package / "lib", package.parent / "torch.libs")
    return sorted(str(path) for folder in folders for path in folder.glob("libgomp*.so*"))[:1]


def _build(compiler: str, path: Path) -> ctypes.CDLL:
    """Compile and load; the next process finds it at `path`.

    A cache that cannot be written costs a build a process and is no error.
    """
    with tempfile.TemporaryDirectory(prefix="outsize-") as folder:
        made = Path(folder) / path.name
        _compile(compiler, made)
        with contextlib.suppress(OSError):
            keep(made.read_bytes(), path)
        return ctypes.CDLL(str(made))  # held by the process when its file is gone


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


def _compile(compiler: str, target: Path) -> None:
    """The sources to one shared library, for this very processor if the compiler knows how."""
    tuned = _TUNED.get(platform.machine(), ())
    for attempt in ((*_FLAGS, *tuned), _FLAGS):
        run = _linked(compiler, attempt, target)
        if run.returncode == 0:
            return
    last = (run.stderr.strip().splitlines() or ["no message"])[-1]
    raise OSError(f"{compiler} failed with status {run.returncode}: {last}")


def _linked(
    compiler: str, flags: tuple[str, ...], target: Path
) -> subprocess.CompletedProcess[str]:
    """Each source by a compiler of its own, as many at once as there are processors; what failed,
    or the last."""

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        told = (compiler, *flags, *command)
        return subprocess.run(told, capture_output=True, text=True, timeout=_SECONDS)

    made = [str(target.with_suffix(f".{source.stem}.o")) for source in _SOURCES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        each = [
            pool.submit(run, "-c", str(source), "-o", into)
            for source, into in zip(_SOURCES, made, strict=True)
        ]
        ran = [one.result() for one in each]
    failed = (one for one in ran if one.returncode)
    # By name, as the process has it: the library serves other environments too.
    linked = [f"{flag}{part}" for path in map(Path, _runtimes())
              for flag, part in (("-L", path.parent), ("-l:", path.name))]  # fmt: skip
    return next(failed, None) or run(*made, "-shared", "-o", str(target), *linked)


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
