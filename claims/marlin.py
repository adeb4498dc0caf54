"""Claim: weights of 4 bits give close to 4x the speed of 16 bits up to batches of 16 to 32.

Frantar et al., "MARLIN", 2024: a matrix of a large layer on an A10, codes of 4 bits in groups of
128 beside FP16, activations in 16 bits: close to the 3.87x that bytes allow. Here on a processor:
a matrix of Llama-2-7B's layer, the product's own pass by codes of int4:128 that lie as in files,
activations in bfloat16 as in the paper, or rounded to 8 bits (+a8), which is another method. Beside
them the quickest of the wide products: the product's in bfloat16, PyTorch's in bfloat16 and in
float32. Weights come from memory: several matrices take turns, more than a cache holds. What is
timed is the processor's seconds a thread, the least of rounds in which all contenders take turns.

    python claims/marlin.py [--threads 1 2] [--rounds 15]
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from verdict import Figure, conclude

from outsize.kernels import rows
from outsize.kernels.codes import Laid
from outsize.models.coding import Grid, format_of

OUTPUTS, INPUTS = 11008, 4096  # of Llama-2-7B's gate and up
COUNTS = (1, 2, 4, 8, 16, 32, 64)  # rows
FORM, CACHES = "int4:128", 256 << 20  # bytes of codes that no processor's cache holds
OWN, ROUNDED = "int4", "int4+a8"
OTHER, PAPER = "a processor's vectors", 3.87
Call = Callable[[Tensor], object]


def contenders() -> dict[str, Iterator[Call]]:
    """By name, products of rows in bfloat16, by one matrix after another."""
    draw = torch.Generator().manual_seed(0)
    form = format_of(FORM)
    weight = torch.randn(OUTPUTS, INPUTS, generator=draw)
    codes, _ = form.encode(weight)
    wide = weight.bfloat16()
    narrow = [codes.clone() for _ in range(-(-CACHES // codes.nbytes))]
    many = [wide.clone() for _ in range(-(-CACHES // wide.nbytes))]
    whole = [weight, weight.clone()]

    def by_codes(held: Laid, how: rows.Rounding) -> Call:
        return lambda x: rows.by_codes(x, held, OUTPUTS, None, how)

    def laid(held: Tensor) -> Laid:
        found = form.laid(held, None, Grid(INPUTS // form.group))
        assert found is not None, "it has blocks"
        return found

    def by(held: Tensor, call: Callable[[Tensor, Tensor], object]) -> Call:
        return lambda x: call(x, held)

    made = {
        OWN: [by_codes(laid(held), "") for held in narrow],
        ROUNDED: [by_codes(laid(held), "+a8") for held in narrow],
        "bfloat16": [by(held, lambda x, w: rows.linear(x, w, None)) for held in many],
        "PyTorch's bfloat16": [by(held, F.linear) for held in many],
        "PyTorch's float32": [by(held, lambda x, w: F.linear(x.float(), w)) for held in whole],
    }
    return {name: itertools.cycle(calls) for name, calls in made.items()}


def spent(calls: dict[str, Iterator[Call]], count: int, rounds: int) -> dict[str, float]:
    """Seconds of a thread for a product of so many rows, by contender."""
    x = torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(count)).bfloat16()
    least = dict.fromkeys(calls, float("inf"))
    for _, (name, cycle) in itertools.product(range(rounds), calls.items()):
        call, begin = next(cycle), time.process_time()
        call(x)
        least[name] = min(least[name], time.process_time() - begin)
    return {name: found / torch.get_num_threads() for name, found in least.items()}


def gain(found: dict[str, float], name: str) -> float:
    """Over the quickest product whose weights are wide."""
    return min(value for one, value in found.items() if one not in (OWN, ROUNDED)) / found[name]


@torch.no_grad()
def swept(threads: Sequence[int], rounds: int) -> dict[tuple[int, int], dict[str, float]]:
    """Seconds by contender, by threads and rows."""
    calls, found = contenders(), {}
    for many in threads:
        torch.set_num_threads(many)
        found |= {(many, count): spent(calls, count, rounds) for count in COUNTS}
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    found = swept(options.threads, options.rounds)
    most = max(options.threads)
    said = []
    for threads in options.threads:
        of = {count: found[threads, count] for count in COUNTS}
        each = ", ".join(
            f"{count}: {gain(one, OWN):.2f}x and {gain(one, ROUNDED):.2f}x"
            for count, one in of.items()
        )
        ms = "; ".join(f"{name} {value * 1e3:.1f}" for name, value in of[16].items())
        said.append(f"{threads} threads by rows {each} (ms of 16 rows: {ms})")
    figures = [
        Figure(f"speed of {name} at {count} rows", gain(found[most, count], name), paper,
               timed=True, other=other)
        for name, other in ((OWN, OTHER), (ROUNDED, f"{OTHER}, activations in 8 bits"))
        for count, paper in ((1, PAPER), (16, PAPER), (64, None))
    ]  # fmt: skip
    conclude(
        'Frantar et al., "MARLIN", 2024',
        f"close to {PAPER}x (4x less the scales' bytes) up to 16 to 32 rows, less beyond",
        f"{FORM} and with +a8 over the quickest wide product: {'; '.join(said)}",
        f"a matrix of {OUTPUTS:,} x {INPUTS:,}, the least processor's seconds a thread of"
        f" {options.rounds} rounds",
        *figures,
    )


if __name__ == "__main__":
    main()
