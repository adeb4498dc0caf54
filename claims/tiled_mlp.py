"""Claim: tiling a feed-forward layer along the sequence cuts its memory about tenfold.

Bekman et al., "Arctic Long Sequence Training", 2025: about 10x for one Llama MLP at a very long
sequence. Bytes are counted by the ledger; outputs and gradients are compared in float64.
"""

from __future__ import annotations

import torch
from verdict import verdict

from outsize.memory import Ledger
from outsize.models.mlp import MLP
from outsize.runtime.again import tiled

TOKENS, HIDDEN, INNER, TILE = 16384, 128, 448, 512


def main() -> None:
    torch.manual_seed(0)
    mlp = MLP(HIDDEN, INNER, "silu").double()
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    results, peaks = [], []
    for forward in (mlp.forward, tiled(mlp, TILE)):
        mlp.zero_grad()
        x.grad = None
        with Ledger() as ledger:
            y = forward(x)
            ledger.reset_peak()
            y.sum().backward()
        # The layer's own input gradient, output and its gradient are there in any case.
        fixed = 2 * x.nbytes + sum(p.nbytes for p in mlp.parameters())
        peaks.append(ledger.peak - fixed)
        results.append([y.detach(), x.grad, *(p.grad.clone() for p in mlp.parameters())])
    worst = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(*results, strict=True))
    verdict(
        'Bekman et al., "Arctic Long Sequence Training", 2025',
        "about 10x less memory for one MLP layer",
        f"{peaks[0] / peaks[1]:.1f}x less: {peaks[0]:,} to {peaks[1]:,} bytes;"
        f" largest relative difference {worst:.1e}",
        peaks[0] / peaks[1] >= 10 and worst < 1e-10,
        f"{TOKENS} tokens, hidden {HIDDEN}, inner {INNER}, tile {TILE}, float64",
    )


if __name__ == "__main__":
    main()
