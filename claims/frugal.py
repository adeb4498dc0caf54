"""Claim: signs where there are no moments learn better than GaLore, with no more states.

Zmushko et al., "FRUGAL: Memory-Efficient Optimization by Reducing State Overhead for Scalable
Training", 2024 (arXiv 2411.07837): at each memory budget ahead of GaLore and BAdam, with LLaMAs of
up to 1B parameters on C4.

A small decoder over bytes of Python's standard library learns with moments of a quarter of each
block's matrix, by GaLore and by FRUGAL, whose subspace are rows, random ones or singular vectors,
and by AdamW with all of them. Each has the best of RATES for the first seed. BAdam, which leaves
embeddings and head as they are, learns nothing from scratch and is not judged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean

from slimfit import CONFIG, LAYERS, ROWS, SEQUENCE, batches, loss_of, text
from verdict import Figure, conclude

from outsize.data import Batch
from outsize.memory import Ledger
from outsize.models.build import build
from outsize.models.families import parse
from outsize.optim import AdamW, Optimizer
from outsize.plan import Plan
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.techniques.optim import frugal, galore

STEPS, WARM, HELD, GAP, RANK = 150, 15, 32, 25, 16
RATES, SEEDS = (6e-3, 1.2e-2, 2.4e-2), (1, 2)
PLAIN = AdamW(weight_decay=0.0)
GALORE, WAYS = "GaLore", ("rows", "random", "svd")
OPTIMIZERS: Mapping[str, Optimizer] = {
    "AdamW": PLAIN,
    GALORE: galore.GaLore(PLAIN, galore.Settings(RANK, GAP)),
    **{way: frugal.Frugal(PLAIN, frugal.Settings(way, RANK, GAP)) for way in WAYS},
}


def learnt(name: str, rate: float, seed: int, held: list[Batch]) -> tuple[float, int]:
    """Bits a byte of what is held out, and bytes of states."""
    size, ledger = LAYERS + 2, Ledger()
    own = () if name == "AdamW" else (frugal.NAME if name in WAYS else galore.NAME,)
    plan = Plan(size, per_segment(size), ROWS, ROWS, SEQUENCE, approximate=own)
    flow = NativeFlow(build(parse(CONFIG), seed=seed), plan)
    job = Job(flow, plan, Recipe(OPTIMIZERS[name], 1.0), Here(ledger=ledger))
    states = ledger.live["optimizer"]
    for step, batch in enumerate(batches(text("[a-m]*.py", 1 << 21), STEPS, seed)):
        job.step(batch, rate * min((step + 1) / WARM, 1 - step / STEPS))
    bits = loss_of(job, held) / math.log(2)
    job.close()
    return bits, states


def main() -> None:
    held = batches(text("[n-z]*.py", 1 << 20), HELD, 7)
    bits, bytes_ = dict[str, float](), dict[str, int]()
    for name in OPTIMIZERS:
        tried = {rate: learnt(name, rate, SEEDS[0], held) for rate in RATES}
        rate = min(tried, key=lambda one: tried[one][0])
        others = [learnt(name, rate, seed, held)[0] for seed in SEEDS[1:]]
        bits[name], bytes_[name] = fmean([tried[rate][0], *others]), tried[rate][1]
        shown = ", ".join(f"{one:.4f} at {r:g}" for r, (one, _) in tried.items())
        print(f"  {name}: {shown}; {bytes_[name]:,} bytes of states", flush=True)
    gaps = {way: bits[way] / bits[GALORE] - 1 for way in WAYS}
    above = {way: bits[way] / bits["AdamW"] - 1 for way in WAYS}
    most = max(bytes_[way] for way in WAYS) / bytes_[GALORE]
    smaller = f"{LAYERS} blocks of {CONFIG['hidden_size']}, {STEPS} steps"
    conclude(
        'Zmushko et al., "FRUGAL", 2024',
        "ahead of GaLore and BAdam at each memory budget, LLaMAs of up to 1B parameters",
        f"bits a byte {gaps['rows']:+.2%} from GaLore's by rows, {gaps['random']:+.2%} by random"
        f" subspaces, {gaps['svd']:+.2%} by singular vectors; {above['rows']:+.2%},"
        f" {above['random']:+.2%} and {above['svd']:+.2%} from AdamW's; at most {most:.3f}x of"
        f" GaLore's states, {bytes_['rows'] / bytes_['AdamW']:.3f}x of AdamW's by rows, embeddings"
        " and head among them",
        f"run: {smaller} of {ROWS} x {SEQUENCE} bytes of Python files, rank {RANK}, {GAP} steps of"
        f" a subspace, each at the best of {len(RATES)} learning rates, mean of {len(SEEDS)} seeds,"
        " float32",
        Figure("bits a byte above GaLore's, rows", gaps["rows"], 0.0, "%", nothing=0.0, less=True,
               other=smaller),
        Figure("bits a byte above GaLore's, random", gaps["random"], 0.0, "%", nothing=0.0,
               less=True, other=smaller),
        Figure("bits a byte above GaLore's, singular vectors", gaps["svd"], 0.0, "%", nothing=0.0,
               less=True, other=smaller),
        Figure("bits a byte above BAdam's", None, 0.0, "%", less=True),
        holds={"no more states than GaLore": most <= 1.0},
    )  # fmt: skip


if __name__ == "__main__":
    main()
