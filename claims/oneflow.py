"""Claim: with S, B and P as layouts, parallel programs are written as layouts and no more.

Yuan et al., "OneFlow: Redesign the Distributed Deep Learning Framework from Scratch", 2021. A
transformer block is written for one worker; a table says how its weights lie. The conversions that
are found are run by two workers and compared with the plain block; bytes are counted by the
collectives and set beside what hand-written tensor parallelism sends (Megatron-LM).
"""

from __future__ import annotations

import copy
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from verdict import verdict

from outsize.collectives import Mesh, World, along
from outsize.parallel.convert_run import Placed
from outsize.parallel.layouts import Layout, Sharded

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from threads import play

HIDDEN, INNER, HEADS, ROWS, TOKENS, WORKERS = 64, 256, 4, 2, 16, 2


class Block(nn.Module):
    """Attention and a feed-forward network; nothing in it knows of workers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.up = nn.Linear(HIDDEN, INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (
            p(h).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)
            for p in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


LAYOUTS: dict[str, Layout] = {
    **dict.fromkeys(("q", "k", "v", "up"), Sharded(0)),
    **dict.fromkeys(("o", "down"), Sharded(1)),
}


def main() -> None:
    torch.manual_seed(0)
    plain = Block().double()
    x = torch.randn(ROWS, TOKENS, HIDDEN, dtype=torch.float64)
    whole = x.clone().requires_grad_()
    expected = plain(whole)
    g = torch.randn_like(expected)
    expected.backward(g)
    assert whole.grad is not None

    def work(world: World) -> tuple[float, int, float, float]:
        axis = along(world, "tensor")
        placed = Placed(copy.deepcopy(plain), axis, LAYOUTS)
        mine = x.clone().requires_grad_()
        start = time.perf_counter()
        chosen = placed.program((mine,), {}).chosen
        seconds = time.perf_counter() - start
        y = placed(mine)
        y.backward(g)
        assert mine.grad is not None and whole.grad is not None
        worst = max(float((y - expected).abs().max()), float((mine.grad - whole.grad).abs().max()))
        return worst, sum(axis.received.values()), chosen.received, seconds

    play(Mesh(tensor=WORKERS), work)  # what PyTorch imports at its first trace is not counted
    results = play(Mesh(tensor=WORKERS), work)
    worst = max(r[0] for r in results)
    received, foretold, seconds = results[0][1], results[0][2], results[0][3]
    by_hand = 4 * 2 * (WORKERS - 1) / WORKERS * x.nbytes  # two sums forward, two back
    verdict(
        'Yuan et al., "OneFlow", 2021',
        "any parallelism by layouts alone; conversions found automatically",
        f"6 weights' layouts given, conversions found in {seconds * 1e3:.0f} ms;"
        f" {received:,} bytes received, {foretold:,.0f} foretold, {by_hand:,.0f} by hand;"
        f" largest difference {worst:.1e}",
        worst < 1e-10 and abs(received - foretold) < 16 and received <= by_hand,
        f"{WORKERS} workers as threads, a block of hidden {HIDDEN}, {ROWS} x {TOKENS} tokens,"
        " float64",
    )


if __name__ == "__main__":
    main()
