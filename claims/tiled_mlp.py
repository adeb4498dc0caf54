"""Claim: tiling a feed-forward layer along the sequence cuts its memory about tenfold.

Bekman et al., "Arctic Long Sequence Training", 2025: about 10x for one Llama MLP at a very long
sequence. Bytes are counted by the ledger; outputs and gradients are compared in float64.
"""

from __future__ import annotations

import torch
from verdict import Figure, conclude

from outsize.memory import Ledger
from outsize.models.mlp import MLP
from outsize.runtime.again import tiled

# A thirty-second of the widths of Llama 3 8B: bytes are in proportion to both.
TOKENS, HIDDEN, INNER, TILE = 16384, 4096 // 32, 14336 // 32, 512


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
    conclude(
        'Bekman et al., "Arctic Long Sequence Training", 2025',
        "about 10x less memory for one MLP layer",
        f"{peaks[0] / peaks[1]:.1f}x less: {peaks[0]:,} to {peaks[1]:,} bytes;"
        f" largest relative difference {worst:.1e}",
        f"{TOKENS} tokens, hidden {HIDDEN}, inner {INNER}, tile {TILE}, float64",
        Figure("less memory of one layer", peaks[0] / peaks[1], 10.0),
        holds={"outputs and gradients equal at 1e-10": worst < 1e-10},
    )


if __name__ == "__main__":
    main()
