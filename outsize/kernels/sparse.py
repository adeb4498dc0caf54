"""Packing and unpacking of bitmap-sparse buffers: sparse.cpp, each part with a plain twin.

Elements are seen as integers of their width, so that every bit pattern passes through unchanged;
zero is the element with no bit set, and -0.0 is not one. The twins are PyTorch and run on any
device; they serve where `native` finds no compiler or where the buffers are not on the CPU.

N elements, B = ceil(N / 64) words of the bitmap, G groups, Z non-zeros.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from outsize.kernels import native

WORD = 64  # elements of a word of the bitmap
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_SOURCE = Path(__file__).with_name("sparse.cpp")
_P, _I, _N = c_void_p, c_int, c_int64
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "mark": (None, (_I, _P, _N, _N, _P, _P, _I)),
    "pack": (None, (_I, _P, _N, _N, _P, _P, _P, _I)),
    "unpack": (_N, (_I, _P, _P, _P, _N, _N, _N, _P, _I)),
}


def mark(x_N: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """(bitmap_B, counts_G), int64 both: the non-zeros of integers x_N, and how many each group of
    `group` elements, a multiple of 64, has."""
    found = _library(x_N)
    if found is None:
        return plain_mark(x_N, group)
    bitmap_B = torch.empty(-(-x_N.numel() // WORD), dtype=torch.int64)
    counts_G = torch.empty(-(-x_N.numel() // group), dtype=torch.int64)
    found.outsize_sparse_mark(
        *(x_N.element_size(), x_N.data_ptr(), x_N.numel(), group),
        *(bitmap_B.data_ptr(), counts_G.data_ptr(), native.threads()),
    )
    return bitmap_B, counts_G


def pack(x_N: Tensor, bitmap_B: Tensor, starts_G1: Tensor, group: int, values_Z: Tensor) -> None:
    """The non-zeros of integers x_N, in order, into values_Z; starts_G1: those before a group."""
    found = _library(x_N, values_Z)
    if found is None:
        plain_pack(x_N, values_Z)
        return
    found.outsize_sparse_pack(
        *(x_N.element_size(), x_N.data_ptr(), x_N.numel(), group, bitmap_B.data_ptr()),
        *(starts_G1.data_ptr(), values_Z.data_ptr(), native.threads()),
    )


def unpack(
    bitmap_B: Tensor, starts_G1: Tensor, values_Z: Tensor, group: int, out_N: Tensor, threads: int
) -> bool:
    """Write all of out_N, integers; False, and any content, where the parts do not fit together.

    At least 63 bytes of the memory behind values_Z must be readable; they are not used.
    """
    found = _library(bitmap_B, starts_G1, values_Z, out_N)
    if found is None:
        return plain_unpack(bitmap_B, values_Z, out_N)
    wrong: int = found.outsize_sparse_unpack(
        *(out_N.element_size(), bitmap_B.data_ptr(), starts_G1.data_ptr(), values_Z.data_ptr()),
        *(out_N.numel(), group, values_Z.numel(), out_N.data_ptr(), threads),
    )
    return wrong == 0


def plain_mark(x_N: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """The twin of outsize_sparse_mark."""
    set_N = x_N != 0
    pad = -len(set_N) % group
    padded = torch.nn.functional.pad(set_N, (0, pad))
    counts_G = padded.view(-1, group).sum(1)
    words = padded[: -(-len(set_N) // WORD) * WORD].view(-1, WORD).long()
    return (words << torch.arange(WORD, device=x_N.device)).sum(1), counts_G


def plain_pack(x_N: Tensor, values_Z: Tensor) -> None:
    """The twin of outsize_sparse_pack."""
    values_Z.copy_(x_N[x_N != 0])


def plain_unpack(bitmap_B: Tensor, values_Z: Tensor, out_N: Tensor) -> bool:
    """The twin of outsize_sparse_unpack; the bitmap alone says where each value goes."""
    bits = (bitmap_B[:, None] >> torch.arange(WORD, device=bitmap_B.device)) & 1
    set_N = bits.flatten()[: out_N.numel()].bool()
    if int(bits.sum()) != values_Z.numel() or int(set_N.sum()) != values_Z.numel():
        return False
    out_N.zero_()
    out_N[set_N] = values_Z
    return True


def _library(*tensors: Tensor) -> ctypes.CDLL | None:
    """The passes, for tensors that lie one element behind another on the CPU."""
    if any(x.device.type != "cpu" or not x.is_contiguous() for x in tensors):
        return None
    return library()


@functools.cache
def library() -> ctypes.CDLL | None:
    """The passes, built where no process did before; None where they cannot be."""
    path = next(filter(None, map(shutil.which, native._COMPILERS)), None)
    base = os.environ.get("XDG_CACHE_HOME")
    cache = Path(base) if base else Path.home() / ".cache"
    return load(path, cache / "outsize" / "kernels")


def load(compiler: str | None, cache: Path) -> ctypes.CDLL | None:
    """The passes from `cache`, built with `compiler` (a path) if they are not there or damaged."""
    if compiler is None or native.library() is None:  # which has warned of it
        return None
    try:
        path = cache / f"sparse-{_key(compiler)}.so"
        return _declared(ctypes.CDLL(str(path)) if native._sealed(path) else _build(compiler, path))
    except (OSError, subprocess.SubprocessError) as error:
        logging.getLogger(__name__).warning("sparse.cpp cannot be used: %s", error)
        return None


def _declared(found: ctypes.CDLL) -> ctypes.CDLL:
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(found, f"outsize_sparse_{name}")
        function.restype, function.argtypes = result, arguments
    return found


def _key(compiler: str) -> str:
    """What the library depends on: its source, and all that native.cpp's depends on."""
    digest = hashlib.blake2b(_SOURCE.read_bytes(), digest_size=12)
    digest.update(native._key(compiler).encode())
    return digest.hexdigest()


def _build(compiler: str, path: Path) -> ctypes.CDLL:
    """Compile and load; the next process finds it at `path`, where that can be written."""
    with tempfile.TemporaryDirectory(prefix="outsize-") as folder:
        made = Path(folder) / path.name
        _compile(compiler, made)
        with contextlib.suppress(OSError):
            native._keep(made.read_bytes(), path)
        return ctypes.CDLL(str(made))


def _compile(compiler: str, target: Path) -> None:
    """For this very processor if the compiler knows how, for any of its kind otherwise."""
    tuned = native._TUNED.get(platform.machine(), ())
    for flags in ((*native._FLAGS, *tuned), native._FLAGS):
        command = [compiler, *flags, str(_SOURCE), "-o", str(target), *native._runtimes()]
        run = subprocess.run(command, capture_output=True, text=True, timeout=native._SECONDS)
        if run.returncode == 0:
            return
    last = (run.stderr.strip().splitlines() or ["no message"])[-1]
    raise OSError(f"{compiler} failed with status {run.returncode}: {last}")
