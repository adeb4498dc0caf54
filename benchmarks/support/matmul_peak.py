"""This machine's matmul peak: the best of several calls on square matrices, in FLOP/s by dtype."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def rate(size: int, dtype: torch.dtype, calls: int) -> float:
    """FLOP/s of the fastest of `calls` products of (size, size) matrices."""
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    out = torch.empty(size, size, dtype=dtype)
    torch.mm(a, b, out=out)
    best = float("inf")
    for _ in range(calls):
        begin = time.perf_counter()
        torch.mm(a, b, out=out)
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best


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
