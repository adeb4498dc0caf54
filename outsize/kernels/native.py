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

import functools
import importlib
import importlib.util
import logging
import os
import shutil
import subprocess
from array import array
from collections.abc import Callable, Iterable
from ctypes import c_double, c_float, c_int, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outsize import accelerator
from outsize.kernels.building import Functions, Libraries, Library, Signature
from outsize.torch_private import FakeTensor, unseen

_READ = (Tensor, nn.Parameter, FakeTensor)
CODES = {torch.float32: 0, torch.bfloat16: 1}  # the dtypes of native.cpp, by its numbers
COMPILED = (torch.float32, torch.bfloat16, torch.float16)  # those of Triton's kernels

_COMPILERS = ("g++", "c++", "clang++")  # g++ first: PyTorch's OpenMP runtime is its
_OF_DTYPE = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_LIBRARIES = {
    "passes": Library(("attention", "native", "codes", "normal", "draws")),
    "training": Library(("attention", "blockwise", "sparse"), ("-DOUTSIZE_BACKWARD",)),
    "float64": Library(("attention64",)),
    "shared": Library(("shared",)),
    "eights": Library(("eights",)),
}
for _name, _flag in (("float32", "-DOUTSIZE_DTYPE=0"), ("bfloat16", "-DOUTSIZE_DTYPE=1")):
    _LIBRARIES |= {  # what serving computes; pages of codes apart, which most do without
        f"blocks-{_name}": Library(("blocks",), (_flag,), ("passes", "eights")),
        f"pages-{_name}": Library(("pages",), (_flag,)),
        f"coded-{_name}": Library(("pages",), (_flag, "-DOUTSIZE_CODED")),
        f"rows-{_name}": Library(("rows", "heads"), (_flag,)),
    }

# By library: result first, then arguments, as the sources declare them.
_P, _I, _N, _F = c_void_p, c_int, c_int64, c_float
_SIGNATURES: dict[str, dict[str, Signature]] = {
    "passes": {
        "rms_norm": (None, (_I, _I, _P, _P, _F, _F, _P, _P, _N, _N, _I)),
        "rms_norm_backward": (None, (_I, _I, _P, _P, _P, _P, _F, _P, _P, _N, _N, _I)),
        "rope": (None, (_I, _P, _P, _P, _P, _N, _P, _P, _N, _I, _F, _I)),
        "gate": (None, (_I, _P, _P, _P, _N, _I)),
        "gate_backward": (None, (_I, _P, _P, _P, _P, _P, _N, _I)),
        "cross_entropy": (c_double, (_I, _P, _P, _N, _F, _I, _N, _N, _I, _P)),
        "add": (None, (_I, _P, _P, _N, _I)),
        "greatest": (_N, (_I, _P, _N)),
        "draw": (_N, (_I, _P, _P, _N, _F, c_double, _N, c_double, c_double)),
        "exponential": (None, (_P, _P, _N)),
        "checksum": (c_uint64, (_P, _N)),
        "attention": (None, (_I, *[_P] * 8, _N, _F, _F, _I)),
        "decode": (None, (_I, _P, _P, _I)),
        "encode": (None, (_I, _P, _N, _N, _P)),
        "normal": (None, (_I, _P, _N, _N, _P, c_double, _P, _I)),
    },
    "training": {
        "attention_backward": (None, (_I, *[_P] * 8, _N, _F, _F, _I)),
        "sparse_mark": (None, (_I, _P, _N, _N, _P, _P, _I)),
        "sparse_pack": (None, (_I, _P, _N, _N, _P, _P, _P, _I)),
        "sparse_unpack": (_N, (_I, _P, _P, _P, _N, _N, _N, _P, _I)),
        "blockwise_adam": (None, (_I, _I, *[_P] * 6, _N, _N, *[_P] * 3, _I, _I, _P, _I)),
    },
    "float64": {
        "float64_attention": (None, (*[_P] * 6, _N, c_double, _I)),
        "float64_attention_backward": (None, (*[_P] * 8, _N, c_double, _I)),
    },
    "eights": {
        "eights_product": (None, (_I, *[_P] * 3, _N, _I, _I)),
        "eights_pack": (_I, (_P, _I)),
    },
    "shared": {
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
    },
}
_PAGES: dict[str, Signature] = {
    "pages_attend": (None, (_I, *[_P] * 10, _N, _F, _F, _I, _I, _P)),
    "pages_put": (None, (_I, *[_P] * 4, *[_N] * 3)),
}
_SERVING: dict[str, dict[str, Signature]] = {  # of libraries of a dtype
    "rows": {
        "rows_product": (None, (*[_P] * 3, _N, _I, _I)),
        "heads_product": (None, (_I, _P, _P, _N, _P, *[_N] * 4, _I)),
    },
    "pages": _PAGES,
    "blocks": {
        "blocks_work": (_N, (_P, _P, _N)),
        "blocks": (None, (_P, _P, _N, _P, _P)),
    },
}


class Passes(Functions):
    """All functions but those of serving, and these by dtype."""

    def __init__(self, libraries: Libraries) -> None:
        super().__init__(libraries, _SIGNATURES)
        self.libraries = libraries
        self.serving = {
            dtype: Functions(libraries, {f"{what}-{name}": own for what, own in _SERVING.items()})
            for dtype, name in _OF_DTYPE.items()
        }  # by dtype
        self.coded = {
            dtype: Functions(libraries, {f"coded-{name}": _PAGES})
            for dtype, name in _OF_DTYPE.items()
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
def library() -> Passes | None:
    """The passes, built where no process did before; None, after one warning, where they cannot."""
    path = next(filter(None, map(shutil.which, _COMPILERS)), None)
    base = os.environ.get("XDG_CACHE_HOME")
    cache = Path(base) if base else Path.home() / ".cache"
    return load(path, cache / "outsize" / "kernels")


def loaded() -> Passes:
    """The passes, where `fits` said that they are there."""
    found = library()
    assert found is not None, "an operator of native.cpp runs only where fits() holds"
    return found


def serving(dtype: torch.dtype) -> Functions:
    """Those of serving for tensors of a dtype of CODES."""
    return loaded().serving[dtype]


def paging(dtype: torch.dtype, coded: bool) -> Functions:
    """Those of pages for tensors of a dtype of CODES. coded: pages hold them otherwise."""
    return loaded().coded[dtype] if coded else serving(dtype)


def ready(weight: Tensor, rows: bool = True, coded: bool = False) -> None:
    """Have the passes of serving such weights loaded, compiled if need be: before anything is
    timed, and before memory is full. rows: products of rows that are not rounded are among them;
    coded: pages hold numbers in another form."""
    if weight.is_cpu:
        load_serving(str(weight.dtype).removeprefix("torch."), rows, coded)


def load_serving(name: str, rows: bool = True, coded: bool = False) -> None:
    """The same by the name of a dtype."""
    wanted = {"blocks": True, "pages": True, "coded": coded, "rows": rows}
    load_named(*(f"{what}-{name}" for what, here in wanted.items() if here))


def load_named(*names: str) -> None:
    """Have libraries loaded, compiled if need be, where there is a compiler. Names that none has,
    as of a dtype, are left out."""
    found = library()
    known = [name for name in names if name in _LIBRARIES]
    if found is not None and known:
        found.libraries.opened(*known)


def load(compiler: str | None, cache: Path) -> Passes | None:
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
        libraries = Libraries(_LIBRARIES, compiler, cache)
        libraries.open("passes")
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("the fused C++ passes cannot be used, plain PyTorch operators are: %s", error)
        return None
    return Passes(libraries)
