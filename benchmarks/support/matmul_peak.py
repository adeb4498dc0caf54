"""This machine's matmul peak: the best of several calls on square matrices, in FLOP/s by dtype.

By torch.mm, and in float32 by oneDNN too, whichever is faster: on AMD processors MKL, which
torch.mm calls, leaves half of the vectors idle, and half of a peak is no peak.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def rate(size: int, dtype: torch.dtype, calls: int) -> float:
    """FLOP/s of the fastest of `calls` products of (size, size) matrices."""
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    out = torch.empty(size, size, dtype=dtype)
    ways = [lambda: torch.mm(a, b, out=out)]
    if dtype == torch.float32 and torch.backends.mkldnn.is_available():
        onednn = torch.ops.mkldnn._linear_pointwise.default
        ways.append(lambda: onednn(a, b, None, "none", [], ""))
    return max(2 * size**3 / _best(way, calls) for way in ways)


@torch.no_grad()
def _best(way: Callable[[], Tensor], calls: int) -> float:
    way()
    best = float("inf")
    for _ in range(calls):
        begin = time.perf_counter()
        way()
        best = min(best, time.perf_counter() - begin)
    return best


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--calls", type=int, required=True)
    parser.add_argument("--precision", nargs="+", choices=tuple(DTYPES), required=True)
    parser.add_argument("--sizes", nargs="+", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = {
        name: max(rate(size, DTYPES[name], options.calls) for size in options.sizes)
        for name in options.precision
    }
    options.result.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
