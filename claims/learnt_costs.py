"""Claim: a model that reads operators as text foretells what they take, better than formulas.

Das and Mannarswamy, "ML-driven Hardware Cost Model for MLIR", 2023: models over the text of
operators predict what hardware does with them "with low error bounds"; the abstract has no number.
Here products of random sizes are run on this processor, one thread, in processor time; a model of
two thirds of them (outsize/foresight/learnt.py) foretells the rest, beside a roofline and beside a
table of the same samples.
"""

from __future__ import annotations

import random
import time

import numpy as np
import torch
from verdict import Figure, conclude

from outsize.foresight.learnt import Learnt, better, held_out
from outsize.foresight.learnt import learnt as fitted
from outsize.foresight.sources import CostSource, Roofline, Table
from outsize.hardware.hardware import Device, Matmul, Measured, Rate

SAMPLES, FOLDS, TRIES = 120, 3, 5
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
SIZES = (64, 96, 128, 192, 200, 256, 320, 384, 500, 512, 768, 1000, 1024, 1536, 2048)


def took(m: int, n: int, k: int) -> float:
    """Seconds of the processor, the least of some runs of 2 ms or more each."""
    x, w = torch.randn(m, k), torch.randn(n, k)
    once = time.process_time()
    torch.nn.functional.linear(x, w)
    runs = max(1, int(2e-3 / max(1e-6, time.process_time() - once)))
    found = []
    for _ in range(TRIES):
        begin = time.process_time()
        for _ in range(runs):
            torch.nn.functional.linear(x, w)
        found.append((time.process_time() - begin) / runs)
    return min(found)


def rate(value: float, unit: str) -> Rate:
    return Rate(value, unit, "processor time", "2026-11-26")  # type: ignore[arg-type]


def device_of(entries: tuple[Matmul, ...]) -> Device:
    """This processor by its own peaks: the quickest product; bytes of one vector's."""
    peak = max(one.rate.value for one in entries)
    m, n = 1, 4096
    wide = n * n * 4 / took(m, n, n)
    return Device(
        "one thread", "cpu", rate(2**34, "B"),
        {"fp32": rate(peak, "FLOP/s"), "bf16": rate(peak, "FLOP/s")}, rate(wide, "B/s"),
        measured=Measured(entries),
    )  # fmt: skip


def error(source: CostSource, entries: tuple[Matmul, ...]) -> float:
    """The mean relative error of products that the source has not seen."""
    off = [
        abs(source.product(e.tokens, e.d_out, e.d_in, "fp32").seconds * e.rate.value / e.flops - 1)
        for e in entries
    ]
    return float(np.mean(off))


def main() -> None:
    torch.set_num_threads(1)
    draw, entries = random.Random(0), list[Matmul]()
    while len(entries) < SAMPLES:
        m, k, n = draw.choice(ROWS), draw.choice(SIZES), draw.choice(SIZES)
        if (m, k, n) not in {(e.tokens, e.d_in, e.d_out) for e in entries}:
            flops = 2.0 * m * n * k
            entries.append(Matmul(m, k, n, "fp32", rate(flops / took(m, n, k), "FLOP/s")))
    off = np.zeros(3)
    for first in range(FOLDS):
        held, seen = tuple(entries[first::FOLDS]), list[Matmul]()
        for other in range(FOLDS):
            seen += entries[other::FOLDS] if other != first else []
        device = device_of(tuple(seen))
        sheet = Roofline(device)
        sources = Learnt(device, sheet, fitted(device)), Table(device, sheet), sheet
        off += [error(source, held) / FOLDS for source in sources]
    learnt, table, roofline = map(float, off)
    whole = device_of(tuple(entries))
    before = held_out(whole, fitted(whole))
    taken = "is not taken" if better(whole) is None else "is taken"
    other = "products alone; processor time"
    conclude(
        'Das and Mannarswamy, "ML-driven Hardware Cost Model for MLIR", 2023',
        "models over operators' text predict with low error bounds; the abstract has no number",
        f"{SAMPLES} products, a third not seen in turn: learnt {learnt:.1%}, table {table:.1%},"
        f" roofline {roofline:.1%} off; held out one by one {before['learnt']:.1%},"
        f" {before['table']:.1%}, {before['roofline']:.1%}: it {taken}",
        "float32 products of random sizes, least of five runs",
        Figure("a roofline's error over the learnt one", roofline / learnt, None, other=other),
        Figure("a table's error over the learnt one", table / learnt, None, other=other),
    )


if __name__ == "__main__":
    main()
