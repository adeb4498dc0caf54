"""Triton's kernels against the plain twins: its interpreter runs them on the host."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from outsize.kernels import blockwise
from outsize.kernels.blockwise import Moments, Rates

HERE, NAME = Path(__file__).parent, Path(__file__).stem


def moments(count: int, block: int, draw: torch.Generator) -> Moments:
    """Of some updates before."""
    blocks = -(-count // block)
    codes = torch.randint(0, 256, (2, count), generator=draw).to(torch.uint8)
    scales = torch.rand(2, blocks, generator=draw)
    scales[:, -1] = 0.0
    return Moments(codes[0], scales[0], codes[1], scales[1])


def blockwise_adam() -> None:
    from outsize.kernels import blockwise_kernels

    draw = torch.Generator().manual_seed(0)
    rates = Rates(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, decay=0.1, step=3)
    for count, block in ((1, 1), (300, 64), (1000, 100), (5000, 4096)):
        for held, given in ((torch.float32, torch.bfloat16), (torch.float16, torch.float32)):
            w = torch.randn(count, generator=draw).to(held)
            g = (torch.randn(count, generator=draw) * 1e-3).to(given)
            g[: count // 3] = 0.0
            before = moments(count, block, draw)
            states = [before.mean, before.mean_scale, before.square, before.square_scale]
            wanted, found = ([x.clone() for x in (w, *states)] for _ in range(2))
            blockwise.plain(wanted[0], g, Moments(*wanted[1:]), block, rates.numbers)
            blockwise_kernels.update(
                found[0], g, (found[1], found[2]), (found[3], found[4]),
                blockwise._tables_on(torch.device("cpu")), block, rates.numbers,
            )  # fmt: skip
            for a, b in zip(found, wanted, strict=True):
                assert torch.equal(a, b), (count, block, held)


KERNELS = {"blockwise_adam": blockwise_adam}


def as_a_gpu_does() -> None:
    """Every kernel, in a process whose Triton interprets."""
    for run in KERNELS.values():
        run()


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with PyTorch for GPUs")
def test_the_kernels_of_a_gpu_give_the_same() -> None:
    run = f"import sys; sys.path.insert(0, {str(HERE)!r}); import {NAME}; {NAME}.as_a_gpu_does()"
    subprocess.run(
        [sys.executable, "-c", run], check=True, env={**os.environ, "TRITON_INTERPRET": "1"}
    )
