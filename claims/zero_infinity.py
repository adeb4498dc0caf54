"""Claim: states on disk let a model far larger than memory train, fast given enough tokens.

Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning",
2021: model states beyond device and host memory; over 40 TFLOP/s of each V100 of one DGX-2 with up
to 100G parameters and no model parallelism, and 40% of the peak of 512 V100 (25 PFLOP/s, as with
1T parameters). Here a real run under a ledger that raises above its budget; and both, simulated. A
V100 reaches 70 TFLOP/s in products, as the authors measured it, and has a sixteenth of its node's
disks. In both cases the authors keep parameters higher up; here they, the gradients, the
optimizer's states and the activations are all on disk.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace

import sharded
import tiered
from verdict import Figure, conclude

from outsize.collectives import Mesh
from outsize.memory.sizes import format_bytes
from outsize.plan import Rest, Stream, zero

REAL = tiered.llama(256, 12, 8)
DEVICES = 16  # of a machine
READ, WRITE = 1.6, 1.6  # GB/s of a device: 25 of a DGX-2 for 16 devices, as the paper has it
PEAK, CLAIMED = 125, 40.0  # TFLOP/s
REACHED = 70 / PEAK
SEQUENCE = 1024


def real() -> tuple[bool, float, float]:
    """Whether resident and streamed runs are equal, and peaks and states as parts of resident."""
    plan = tiered.plan_of(REAL, 2, 128, stream=Stream(part=1 << 20))
    resident = tiered.train(REAL, plan)
    below = replace(plan, stages=tiered.ends_keep(plan.stages, tiered.ON_DISK))
    with tempfile.TemporaryDirectory() as folder:
        ran = tiered.train(REAL, below, [tiered.disk(folder, tiered.GIB)])
    states = 16 * sum(w.numel() for w in ran.weights.values())
    return ran.equals(resident), ran.peak / resident.peak, states / ran.peak


@dataclass(frozen=True)
class Case:
    """Of a table of the paper: hidden size, layers, rows of each device, machines, devices that
    share each layer; microbatches of a group of these."""

    hidden: int
    layers: int
    rows: int
    machines: int
    shared: int
    microbatches: int


NODE = Case(8192, 125, 24, 1, 1, 3)  # 100G parameters
ALL = Case(25_600, 128, 5, 32, 4, 5)  # 1T parameters
ON_DISK = Rest("disk", "disk", "disk", "disk")


@dataclass(frozen=True)
class Foretold:
    """TFLOP/s of a device; its peak over its memory; its states below over its memory."""

    speed: float
    full: float
    below: float


def foretold(case: Case) -> Foretold:
    """A step with everything on disk."""
    cluster = sharded.cluster(
        "V100-SXM2-32", DEVICES, REACHED, links=((DEVICES, 150),), network=100 / DEVICES, wait=20e-6
    )
    source = "ZeRO-Infinity, a device's share of a DGX-2's 25 GB/s"
    cluster = replace(cluster, tiers=(*cluster.tiers, tiered.tier("disk", READ, WRITE, source)))
    config = tiered.gpt(case.hidden, case.layers, case.hidden // 128, 51_200)
    copies = case.machines * DEVICES // case.shared
    plan = tiered.plan_of(
        config, case.rows * case.shared, SEQUENCE, ON_DISK, microbatches=case.microbatches,
        stream=Stream(part=1 << 24, parts=24),
    )  # fmt: skip
    plan = replace(
        plan, precision=sharded.MIXED, rows=plan.rows * copies, shards=zero(3, copies),
        mesh=Mesh(copies, tensor=case.shared),
    )  # fmt: skip
    made = sharded.Predicted(config, sharded.MIXED).of(plan, cluster)
    memory = cluster.devices[0].memory_bytes
    speed, below = made.flops / made.seconds / 1e12, sum(made.below.values())
    print(
        f"  simulated, {case.layers} layers of {case.hidden} on {case.machines} x {DEVICES} V100,"
        f" {case.rows} rows of each: {made.seconds:.0f} s a step,"
        f" {tiered.computing(made.trace) / made.seconds:.0%} of it computing, {speed:.1f} TFLOP/s"
        f" each, peak {format_bytes(made.peak)}, on disk {format_bytes(below)} of each",
        flush=True,
    )
    return Foretold(speed, made.peak / memory, below / memory)


def main() -> None:
    same, ratio, over = real()
    node, every = foretold(NODE), foretold(ALL)
    conclude(
        'Rajbhandari et al., "ZeRO-Infinity", 2021',
        "states beyond memory at excellent throughput: over 40 TFLOP/s of each V100 of a DGX-2 with"
        " up to 100G parameters; 40% of the peak of 512, 25 PFLOP/s",
        f"real: states {over:.1f} times the peak, which is {ratio:.2f} of resident, losses and"
        f" weights {'equal bit for bit' if same else 'DIFFER'}; simulated: {node.speed:.1f} TFLOP/s"
        f" of each V100 with 100G parameters on a DGX-2, {every.speed:.1f} with 1T on 32,"
        f" {every.speed / PEAK:.1%} of the peak; states {node.below:.1f} and {every.below:.1f}"
        " times a device's memory",
        "real: Llama shape of 12 blocks, AdamW, float32, all on disk; simulated: GPT of 125 layers"
        " of hidden 8192, 24 rows of each device, and of 128 of 25,600, 5 rows of each, four to a"
        f" layer; 16-bit weights and gradients, blocks recomputed, V100 of 32 GB at {REACHED:.0%}"
        " of their peak in products; parameters, gradients, optimizer and activations on disk,"
        f" {READ} GB/s of each device, 100 GB/s of a machine to others; rows of {SEQUENCE}",
        Figure(
            "TFLOP/s of each V100 of a DGX-2, 100G parameters",
            node.speed,
            CLAIMED,
            "",
            nothing=0.0,
            how="simulated",
        ),
        Figure(
            "part of the peak of 512 V100, 1T parameters",
            every.speed / PEAK,
            0.4,
            "%",
            nothing=0.0,
            how="simulated",
        ),
        holds={
            "losses and weights equal bit for bit": same,
            "fits the device": max(node.full, every.full) <= 1,
            "states are larger than memory": min(over, node.below, every.below) > 1,
        },
    )


if __name__ == "__main__":
    main()
