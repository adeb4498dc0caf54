"""Claim: with the optimizer on the host, one device trains models ten times as large.

Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", 2021: parameters stay on the
device, gradients leave as they come, optimizer states rest on the host and are updated there; 13G
parameters on a V100 of 32 GB against 1.4G by PyTorch alone. The largest depth that fits is found by
predicted peaks (which are those measured, to the byte), at the paper's scale and at a small one,
where the largest is run for real under a ledger that raises over its budget. Beside it: parameters
on the host as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import tiered
from verdict import Figure, conclude

from outsize.errors import OutsizeError
from outsize.hardware import Hardware
from outsize.memory import Ledger
from outsize.memory.sizes import format_bytes
from outsize.memory.tiers import TierSpec, open_stores
from outsize.models.build import build
from outsize.models.config import DecoderConfig
from outsize.optim import AdamW
from outsize.plan import Rest, Stream
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.simulate import Forecast

HOST = frozenset({"host"})
OFFLOADED = Rest("device", "host", "host")
WAYS = {
    "everything on the device": Rest(),
    "gradients and optimizer on the host": OFFLOADED,
    "parameters too": Rest("host", "host", "host", "host"),
}
ON_HOST = 1 << 30  # of so many parts one goes over the device: none
SMALL_BUDGET = 64 << 20
CLAIMED, DEEPEST = 10.0, 128


def large(layers: int) -> DecoderConfig:
    return tiered.llama(4096, layers, 32, 32000, 10922)


def small(layers: int) -> DecoderConfig:
    return tiered.llama(256, layers, 8, 1024, 688)


def predicted(config: DecoderConfig, rest: Rest, tokens: int, hardware: Hardware) -> Forecast:
    precision = "bfloat16" if tokens > 512 else "float32"
    part = 1 << 26 if tokens > 512 else 1 << 20
    host = 0 if rest.optimizer == "device" or rest.parameters != "device" else ON_HOST
    plan = tiered.plan_of(
        config, 1, tokens, rest, precision=precision, update="apart" if host else "behind",
        stream=Stream(part=part, host=host),
    )  # fmt: skip
    return tiered.simulated(config, plan, hardware, HOST)


def deepest(shape: Callable[[int], DecoderConfig], rest: Rest, tokens: int, budget: int) -> int:
    """Blocks of the deepest model that fits, by bisection."""
    source = "PCIe 3, declared"
    hardware = tiered.machine("V100-SXM2-32", 0.4, [tiered.tier("host", 12.0, 12.0, source)])

    def fits(layers: int) -> bool:
        return predicted(shape(layers), rest, tokens, hardware).peak <= budget

    low, high = 0, 1
    while high <= DEEPEST and fits(high):
        low, high = high, 2 * high
    while high - low > 1 and low < DEEPEST:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def numel(config: DecoderConfig) -> int:
    return sum(p.numel() for p in build(config).parameters())


def confirmed(layers: int) -> bool:
    """A real step of the largest small model: the ledger raises over its budget; equal weights."""
    config = small(layers)
    plan = tiered.plan_of(
        config, 1, 256, OFFLOADED, update="apart", stream=Stream(part=1 << 20, host=ON_HOST)
    )
    spec = TierSpec("host", "memory", (), tiered.GIB)
    with open_stores([spec]) as stores:
        ledger = Ledger(SMALL_BUDGET)
        job = Job(
            NativeFlow(build(config, seed=0), plan),
            plan,
            Recipe(AdamW()),
            Here(ledger=ledger, stores=stores),
        )
        try:
            job.step(tiered.batch_of(config, plan, 0), 1e-3)
        except OutsizeError as error:
            print(f"  {error}")
            return False
    ran = tiered.train(config, plan, [spec], steps=2)
    bare = replace(plan, stages=tiered.ends_keep(plan.stages, Rest()), stream=Stream())
    return ran.equals(tiered.train(config, bare, steps=2))


def main() -> None:
    sizes: dict[str, list[int]] = {}
    found: dict[str, list[int]] = {}
    memory = tiered.machine("V100-SXM2-32", 0.4, []).devices[0].memory_bytes
    for shape, tokens, budget in ((large, 1024, memory), (small, 256, SMALL_BUDGET)):
        for way, rest in WAYS.items():
            layers = deepest(shape, rest, tokens, budget)
            found.setdefault(way, []).append(layers)
            sizes.setdefault(way, []).append(numel(shape(max(1, layers))) if layers else 0)
            more = " or more" if layers >= DEEPEST else ""
            print(
                f"  {format_bytes(budget)}, {way}: {layers} blocks{more},"
                f" {sizes[way][-1] / 1e9:.3f}G parameters"
            )
    bare, offloaded, _ = WAYS
    ratio, tiny = (b / a for a, b in zip(sizes[bare], sizes[offloaded], strict=True))
    real = confirmed(found[offloaded][1])
    conclude(
        'Ren et al., "ZeRO-Offload", 2021',
        "13G against 1.4G parameters on one V100 of 32 GB: 10 times",
        f"(simulated) {sizes[offloaded][0] / 1e9:.1f}G against {sizes[bare][0] / 1e9:.1f}G:"
        f" {ratio:.1f} times, small {tiny:.1f} times; the small one"
        f" {'ran in its budget with equal weights' if real else 'FAILED'}",
        "Llama shapes of hidden 4096, bfloat16 with float32 master, 1,024 tokens, blocks recomputed"
        " in all; small: hidden 256, float32 without a master copy, 256 tokens",
        Figure("larger model on one V100", ratio, CLAIMED, how="simulated"),
        Figure("TFLOP/s of a V100 at 10G parameters", None, 40, ""),
        holds={"the small one runs in its budget with equal weights": real},
    )


if __name__ == "__main__":
    main()
