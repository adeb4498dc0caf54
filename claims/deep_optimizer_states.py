"""Claim: updates interleaved between host and device make iterations 2.5 times faster.

Maurya et al., "Deep Optimizer States: Towards Scalable Training of Transformer Models Using
Interleaved Offloading", 2024: optimizer states rest on the host; some subgroups are updated there,
the others on the device, so that the host's arithmetic and the link run at the same time; how many
follows from the rates. Against every update on the host. Simulated on an H100 with a quarter of its
node's host, several interleavings, all printed, of which the best is judged; every update on the
device stands beside it. Real runs must agree bit for bit with the resident run.
"""

from __future__ import annotations

from dataclasses import replace

import tiered
from verdict import Figure, conclude

from outsize.hardware import Hardware
from outsize.memory.tiers import TierSpec
from outsize.plan import Rest, Stream
from outsize.schedule.talk import Spoken
from outsize.simulate.forecast import Clock
from outsize.simulate.replay import annotate, play

REAL = tiered.llama(256, 4, 8)
LARGE = tiered.llama(5120, 15, 40, 32000, 13824)
ROWS, SEQUENCE = 1, 2048
LINK = 50.0  # GB/s each way, PCIe 5 with pinned memory
# Parameters a second: a quarter of two sockets' 130 GB/s over the 30 bytes that an Adam of one
# kernel moves of each; forecasts count 48, by the rate of the host's own memory.
HOST_UPDATES, COUNTED = 1.0e9, 48
REACHED, CLAIMED = 0.5, 2.5
AHEAD = 4  # parts in the pool at once
HOST = frozenset({"host"})
BELOW = Rest("device", "host", "host")
ALL_ON_HOST, ALL_ON_DEVICE = Stream(host=1 << 30), Stream(host=1)
MIXED = tuple(
    Stream(host=host, over=over)
    for host, over in ((8, 1), (4, 1), (3, 1), (2, 1), (3, 2), (4, 3), (5, 4), (8, 7))
)


def name_of(way: Stream) -> str:
    if way == ALL_ON_HOST:
        return "all on the host"
    return (
        "all on the device" if way == ALL_ON_DEVICE else f"{way.over} of {way.host} on the device"
    )


def seconds(way: Stream, hardware: Hardware) -> float:
    """Of a step with so many parts of so many updated on the device."""
    plan = tiered.plan_of(
        LARGE, ROWS, SEQUENCE, BELOW, precision="bfloat16", update="apart",
        stream=replace(way, resident=AHEAD, part=16 << 20),
    )  # fmt: skip
    costs = tiered.costs_of(LARGE, plan)
    costs = replace(costs, facts=replace(costs.facts, host=HOST))
    placement = costs.facts.placement(plan)
    says = Spoken(placement.items, 0).says(placement.schedule)
    clock = Clock(placement, costs, hardware, says)
    return play(annotate(placement.schedule, costs), {}, clock.seconds).span()


def real() -> bool:
    """Whether the host's, the device's and interleaved updates give the resident run's weights."""
    base = tiered.plan_of(REAL, 2, 128, update="apart")
    resident = tiered.train(REAL, base, clip=0.5)
    stages = tiered.ends_keep(base.stages, BELOW)
    same = True
    ways = (ALL_ON_HOST, Stream(host=2), Stream(host=3), Stream(host=4, over=3), ALL_ON_DEVICE)
    for way in ways:
        plan = replace(base, stages=stages, stream=replace(way, part=1 << 20))
        ran = tiered.train(REAL, plan, [TierSpec("host", "memory", (), tiered.GIB)], clip=0.5)
        same = same and ran.equals(resident)
    return same


def main() -> None:
    same = real()
    link = tiered.tier("host", LINK, LINK, "PCIe 5, declared", own=HOST_UPDATES * COUNTED / 1e9)
    hardware = tiered.machine("H100-SXM", REACHED, [link])
    ways = (ALL_ON_HOST, *MIXED, ALL_ON_DEVICE)
    spent = {way: seconds(way, hardware) for way in ways}
    for way, step in spent.items():
        print(f"  simulated, {name_of(way)}: {step:.2f} s a step")
    best = min(MIXED, key=lambda way: spent[way])
    gain = spent[ALL_ON_HOST] / spent[best]
    conclude(
        'Maurya et al., "Deep Optimizer States", 2024',
        f"iterations {CLAIMED} times faster",
        f"(simulated) {gain:.1f} times, with {name_of(best)} ({spent[ALL_ON_HOST]:.2f} s to"
        f" {spent[best]:.2f} s; {name_of(ALL_ON_DEVICE)} {spent[ALL_ON_DEVICE]:.2f} s); weights of"
        f" real runs {'equal bit for bit' if same else 'DIFFER'}",
        f"5G parameters of a device (20G over four), {ROWS * SEQUENCE:,} tokens, bfloat16 with"
        f" float32 master, H100 at {REACHED:.0%} of its peak, link {LINK:.0f} GB/s each way, host"
        f" {HOST_UPDATES / 1e9:.1f}G updates a second (declared)",
        Figure("speed over all updates on the host", gain, CLAIMED, how="simulated"),
        holds={"weights equal bit for bit": same},
    )


if __name__ == "__main__":
    main()
