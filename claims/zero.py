"""Claim: cutting states over workers gives each 1/N of them, for 1, 1 or 1.5 times the messages.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2019
(sections 3, 5 and 7, figure 1, table 1). By placement alone, to the byte: what 7.5G parameters hold
on one of 64 workers at 2 + 2 + 12 bytes each, and the largest model in 32 GB. By real workers: the
bytes that each holds and has from others in a step, beside the paper's formulas, and that all
stages train the same weights. Foretold: the paper's model of 100G parameters on 400 V100, 38
TFLOP/s on each, as 25 times 16 of a DGX-2 that share each layer, states of stage 2, activations
divided too. A V100 reaches 70 TFLOP/s in products, as the same authors measured it (ZeRO-Infinity,
2021); a machine has 100 GB/s to others.
"""

from __future__ import annotations

import math

import sharded
import torch
from verdict import Figure, conclude

from outsize.collectives import Mesh
from outsize.memory import format_bytes
from outsize.memory.chunk import ChunkTable, Dtypes, Slot
from outsize.models.families import parse
from outsize.optim import AdamW
from outsize.plan import Plan, Precision, zero
from outsize.plan.plan import per_segment
from outsize.schedule.chunks import Chunks
from outsize.schedule.items import Items
from outsize.schedule.kept import Kept
from outsize.schedule.layout import Placement

NUMEL, WORKERS, BLOCKS = 7_500_000_000, 64, 60
PAPER = (120.0, 31.4, 16.6, 1.9)  # GB of 7.5G parameters, stages 0 to 3
LARGEST = (2.0, 7.6, 14.4, 128.0)  # G parameters in 32 GB
MEMORY = 32e9
MIXED = Dtypes(torch.bfloat16, torch.bfloat16, torch.float32, torch.float32)
REAL, STEPS = 4, 3
SPEED, NODE, NODES, ROWS = 38, 16, 25, 8  # TFLOP/s; V100 of a machine; rows of each machine, few
REACHED = 70 / 125  # of a V100's peak


def placement_of(stage: int, index: int) -> Placement:
    """7.5G parameters in equal blocks, as the worker at `index` has them."""
    plan = Plan(
        BLOCKS, per_segment(BLOCKS), WORKERS, precision=sharded.MIXED, mesh=Mesh(WORKERS),
        shards=zero(stage, WORKERS),
    )  # fmt: skip
    tables = tuple(
        ChunkTable(i, True, (Slot(f"weights {i}", (NUMEL // BLOCKS,), 0, 0),))
        for i in range(BLOCKS)
    )
    kept = Kept(MIXED, AdamW().states)
    return Placement(Items(Chunks(plan, tables, ((),) * BLOCKS, kept, index)))


def held(chunks: Chunks) -> int:
    """Bytes between uses."""
    total = 0
    for index in range(BLOCKS):
        total += sum(chunks.nbytes(index, what) for what, _ in chunks.held(index))
    return total


def formula(stage: int, numel: float, workers: int) -> float:
    """The paper's: 2 + 2 + 12 bytes, each divided from its stage on."""
    return sum(
        size * numel / (workers if stage >= least else 1)
        for least, size in ((3, 2), (2, 2), (1, 12))
    )


def arithmetic() -> bool:
    good = True
    for stage, (paper, largest) in enumerate(zip(PAPER, LARGEST, strict=True)):
        found = {held(placement_of(stage, index).chunks) for index in (0, 7, WORKERS - 1)}
        pool = placement_of(stage, 0).pool
        (mine,) = found
        most = MEMORY / formula(stage, 1, WORKERS) / 1e9
        print(
            f"  stage {stage}: {mine:,} bytes of 7.5G parameters on one of {WORKERS}, beside a pool"
            f" of {pool / 1e9:.2f} GB; {most:.1f}G parameters in 32 GB"
        )
        good &= mine == formula(stage, NUMEL, WORKERS)
        good &= abs(mine / 1e9 - paper) < 0.06 and abs(most - largest) < 0.06
    return good


def real() -> tuple[bool, list[float], list[float]]:
    """Bytes had by real workers over the parameters' and held over the formula's, by stage; whether
    float64 weights are those of stage 0."""
    good, sent, of = True, [], []
    numel = sharded.numel(sharded.SMALL)
    plans = [
        sharded.plan_of(
            sharded.SMALL, Mesh(REAL), zero(stage, REAL), 2, 32, precision=precision, order="layer"
        )
        for stage in range(4)
        for precision in (sharded.MIXED, Precision.named("float64"))
    ]
    found = sharded.run(*(sharded.Steps(sharded.SMALL, plan, STEPS) for plan in plans))
    for stage in range(4):
        every, exact = found[2 * stage : 2 * stage + 2]
        holds = sum(ran.held for ran in every)
        of.append(holds / (REAL * formula(stage, numel, REAL)))
        had = sum(ran.bytes for ran in every) / REAL
        whole = 2 * numel * (REAL - 1) / REAL
        most = 3 if stage == 3 else 2
        good &= 0.7 * most <= had / whole <= most * 1.01
        apart = max(ran.apart(found[1][0]) for ran in exact)
        good &= apart < 1e-10
        sent.append(had / whole)
        print(
            f"  stage {stage}, {REAL} real workers: {holds:,} bytes held in all, {of[-1]:.3f} of"
            f" the formula's; messages {had / whole:.3f} times the parameters; float64"
            f" weights differ from stage 0's by {apart:.0e}"
        )
    return good, sent, of


def foretold() -> tuple[float, bool]:
    """TFLOP/s of each of 400 V100 with 100G parameters, and whether the step fits each."""
    config = parse(
        {
            "model_type": "gpt2", "vocab_size": 51_200, "n_embd": 8192, "n_layer": 125,
            "n_head": 64, "n_positions": 1024, "n_ctx": 1024,
        }
    )  # fmt: skip
    plan = sharded.plan_of(
        config, Mesh(NODES, tensor=NODE), zero(2, NODES), ROWS, 1024, 1, sharded.MIXED, ("block",),
        sequence_parallel=True,
    )  # fmt: skip
    cluster = sharded.cluster(
        "V100-SXM2-32", NODE, REACHED, links=((NODE, 150),), network=100 / NODE, wait=20e-6
    )
    made = sharded.Predicted(config, sharded.MIXED).of(plan, cluster)
    speed = made.flops / made.seconds / 1e12
    print(
        f"  (simulated) 100G parameters on {NODES * NODE} V100: a step {made.seconds:.1f} s,"
        f" {speed:.1f} TFLOP/s each, peak {format_bytes(made.peak)}"
    )
    return speed, made.peak <= MEMORY


def main() -> None:
    told = arithmetic()
    speed, fits = foretold()
    good, sent, of = real()
    each = ", ".join(f"{one:.2f}" for one in sent)
    conclude(
        'Rajbhandari et al., "ZeRO", 2019',
        "7.5G parameters on 64 workers: 120, 31.4, 16.6, 1.9 GB by stage; 2, 2, 2 and 3 times the"
        " parameters sent",
        f"the same{'' if told else ' NOT'}, to the byte; {each} times the"
        f" parameters sent by real workers; one set of weights; (simulated) {speed:.1f} TFLOP/s of"
        f" each of {NODES * NODE} V100",
        f"placement of 2 + 2 + 12 bytes; real: {REAL} workers, Llama of {len(sharded.SMALL.layers)}"
        " layers, bfloat16 (held, sent) and float64 (weights); stage 3 keeps its last stages for"
        f" their backward passes, so it sends less than 3; simulated: 125 layers of hidden 8192,"
        f" {ROWS} rows of 1,024 a machine, {REACHED:.0%} of peak in products",
        Figure(
            "bytes of states of real workers over the formula's, the most of stages 0 to 3",
            max(of),
            1.0,
            nothing=math.inf,
            less=True,
        ),
        Figure(
            "messages of stages 0 to 2 over the parameters",
            round(max(sent[:3]), 2),
            2.0,
            nothing=math.inf,
            less=True,
        ),
        Figure(
            "messages of stage 3 over the parameters", sent[3], 3.0, nothing=math.inf, less=True
        ),
        Figure("TFLOP/s of each of 400 V100", speed, SPEED, "", nothing=0.0, how="simulated"),
        holds={
            "bytes of states as the paper's, to the byte": told,
            "one set of weights, messages as many as stages have": good,
            "no stage holds less than the formula has": min(of) == 1.0,
            "100G parameters fit 400 V100": fits,
        },
    )


if __name__ == "__main__":
    main()
