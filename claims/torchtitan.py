"""Claim: sharded data, tensor and sequence parallelism compose, one plan beside another.

Liang et al., "TorchTitan: One-stop PyTorch native solution for production ready LLM pre-training",
2024. Real: 4 workers on four meshes from 1-D to 2-D, with accumulation, recompute and clipping, in
float64 against one worker: losses and updated weights. Simulated: Llama 3.1 on the authors' H100
(96 GB, 8 a machine) against their published throughput in bfloat16: 1-D on 8 and 128 devices, 2-D
on 64 and 256. The paper's gains by compilation and float8 are those of kernels on its GPUs and have
no figure here. Its gain by interleaved chunks over 1F1B (405B on 512 devices, tensor and pipeline
axes of 8, 32 rows of a copy: 100 to 128 tokens a second, docs/performance.md) is foretold by the
price of steps that `outsize plan --hardware` has, of 2 and of 4 chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import sharded
from verdict import Figure, conclude

from outsize.collectives import Lone, Mesh
from outsize.foresight.layout import Layout
from outsize.foresight.memory import memory
from outsize.foresight.planning.choose import forecast
from outsize.foresight.planning.layouts import STACK
from outsize.foresight.shape import Shape
from outsize.hardware import Hardware, parse_spec
from outsize.memory import format_bytes
from outsize.models.config import DecoderConfig
from outsize.plan import Plan, Sharding, zero
from outsize.simulate import Forecast

MESHES = {
    "1-D, 4 shards": (Mesh(4), False),
    "2-D, 2 shards x 2": (Mesh(2, 2), False),
    "2-D, sequence parallel": (Mesh(2, 2), True),
    "1-D, tensor 4, sequence parallel": (Mesh(1, 4), True),
}
ROWS, SEQUENCE, STEPS = 8, 32, 2
REACHED = 0.42  # of an H100's peak: what their 8 devices reach without compilation
LLAMA_8B = sharded.llama(4096, 32, 32, 128256, 14336, 8)
LLAMA_70B = sharded.llama(8192, 80, 64, 128256, 28672, 8)
MLP, BLOCK = ("mlp",), ("block",)
LLAMA_405B = Shape(
    layers=126, hidden=16384, heads=128, groups=8, vocab=128256, inner=53248, gated=True, tied=False
)  # fmt: skip
CHUNKS, INTERLEAVED = (2, 4), 128 / 100 - 1


def real() -> float:
    """The largest difference from one worker."""
    plans = {
        name: sharded.plan_of(
            sharded.SMALL, mesh, zero(3, mesh.data), ROWS // mesh.data, SEQUENCE, 2,
            recompute=("block",), sequence_parallel=parallel,
        )
        for name, (mesh, parallel) in MESHES.items()
    }  # fmt: skip
    wanted = alone(plans["1-D, 4 shards"])
    found = sharded.run(*(sharded.Steps(sharded.SMALL, plan, STEPS) for plan in plans.values()))
    worst = 0.0
    for (name, plan), every in zip(plans.items(), found, strict=True):
        apart = max(ran.apart(wanted) for ran in every)
        worst = max(worst, apart)
        print(
            f"  4 real workers, {name} ({plan.mesh}): losses and weights differ from one worker's"
            f" by {apart:.0e}; {sum(ran.held for ran in every):,} bytes of states in all"
        )
    return worst


def alone(plan: Plan) -> sharded.Ran:
    """One worker with the rows of all."""
    plan = replace(plan, mesh=Mesh(), shards=Sharding(), microbatch_rows=plan.rows)
    job = sharded.job_of(sharded.SMALL, plan, Lone())
    losses = []
    for step in range(STEPS):
        losses.append(float(job.step(sharded.batch_of(sharded.SMALL, plan, step), 1e-3)))
    weights = {name: weight.numpy().copy() for name, weight in job.weights()}
    seconds, trace = job.report.seconds, job.report.trace
    return sharded.Ran(losses, weights, 0, 0, sharded.held_by(job), 0, seconds, trace)


@dataclass(frozen=True)
class Case:
    """A run of the authors'. rows: of each worker of the data axis; published: tokens a second and
    device in bfloat16."""

    name: str
    config: DecoderConfig
    mesh: Mesh
    rows: int
    recompute: tuple[str, ...]
    published: float


CASES = (
    Case("8B, 1-D", LLAMA_8B, Mesh(8), 2, MLP, 5762),
    Case("8B, 1-D", LLAMA_8B, Mesh(128), 2, MLP, 5605),
    Case("8B, 2-D", LLAMA_8B, Mesh(8, 8), 12, MLP, 4378),
    Case("70B, 2-D", LLAMA_70B, Mesh(32, 8), 16, BLOCK, 597.3),
)


def machines() -> Hardware:
    return sharded.cluster("H100-SXM-96", 8, REACHED, wait=20e-6)


def predicted(case: Case) -> Forecast:
    plan = sharded.plan_of(
        case.config, case.mesh, zero(3, case.mesh.data), case.rows, 8192, 1, sharded.MIXED,
        case.recompute, sequence_parallel=case.mesh.tensor > 1,
    )  # fmt: skip
    return sharded.Predicted(case.config, sharded.MIXED).of(plan, machines())


def simulated() -> list[float]:
    """Throughput predicted over published."""
    ratios = []
    for case in CASES:
        made = predicted(case)
        speed = made.plan.rows * 8192 / made.seconds / case.mesh.size
        ratios.append(speed / case.published)
        within = made.received.get("tensor")
        print(
            f"  (simulated) {case.name}, {case.mesh}: {speed:,.0f} tokens a second and device"
            f" (published {case.published:,.0f}), peak {format_bytes(made.peak)}, from others"
            f" {format_bytes(round(sharded.foretold(made)))} a step, of it the tensor axis"
            f" {format_bytes(round(within.total)) if within else '-'}"
        )
    return ratios


def interleaved() -> float:
    """The most by which chunks are faster than 1F1B."""
    cluster = parse_spec("64 x 8 H100-SXM")
    base = Layout(
        512, 1, 256, 8192, STACK, tensor=8, pipeline=8, recompute="full", sequence_parallel=True,
        shards=8, states=8,
    )  # fmt: skip
    seconds = {}
    for chunks in (1, *CHUNKS):
        layout = replace(base, chunks=chunks)
        (made,) = forecast(LLAMA_405B, [layout], cluster, [memory(LLAMA_405B, layout)], 0)
        seconds[chunks] = made.seconds
        print(
            f"  (simulated) 405B on 512, {chunks} chunks: {made.tokens / made.seconds / 512:.0f}"
            " tokens a second and device"
        )
    return seconds[1] / min(seconds.values()) - 1


def main() -> None:
    worst = real()
    ratios = simulated()
    chunked = interleaved()
    kept = ratios[1] / ratios[0] * CASES[1].published / CASES[0].published
    conclude(
        'Liang et al., "TorchTitan", 2024',
        "1-D to 2-D in one system; 8B keeps 97% of its speed from 8 to 128 devices",
        f"real: every mesh gives one worker's losses and weights to {worst:.0e}; (simulated)"
        f" {kept:.0%} kept from 8 to 128; throughput over the published"
        f" {', '.join(f'{ratio:.2f}' for ratio in ratios)}; chunks {chunked:+.1%} over 1F1B",
        f"real: Llama of {len(sharded.SMALL.layers)} layers, float64, 2 microbatches, blocks"
        f" recomputed, clipped; simulated: {REACHED:.0%} of peak, set by the first of the four,"
        " feed-forward layers recomputed in 8B (theirs: by operator), blocks in 70B",
        Figure(
            "speed kept from 8 to 128 devices",
            kept,
            CASES[1].published / CASES[0].published,
            "%",
            nothing=8 / 128,
            how="simulated",
        ),
        Figure(
            "throughput over the published, least", min(ratios), 1.0, nothing=0.0, how="simulated"
        ),
        Figure(
            "gain of 3-D by interleaved chunks, 405B on 512",
            chunked,
            INTERLEAVED,
            "%",
            nothing=0.0,
            how="simulated",
        ),
        Figure("gain of 1-D by compilation and float8", None, 0.6508, "%"),
        holds={"one worker's numbers at 1e-10": worst < 1e-10},
    )


if __name__ == "__main__":
    main()
