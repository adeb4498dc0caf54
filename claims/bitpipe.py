"""Claim: BitPipe is 1.05 to 1.28 times as fast as other synchronous pipelines.

Wu et al., "BitPipe: Bidirectional Interleaved Pipeline Parallelism for Accelerating Large Models
Training", 2024, compares with 1F1B, its interleaved form and Chimera. Judged as the authors' code
is run: BERT in as many microbatches as devices, GPT in twice as many. Hanayo stands beside these.

Every stage is on two workers, so that a step has sums of gradients that the others lack: here each
is sent as soon as the last gradient of its stage is there, as the runtime does it, and counted.
What a sum and a transfer take beside a forward follows from the catalogue's rates: two bytes of a
parameter cross, and a token of a forward takes two operations of it, at the device's peak.

Below it tokens of a microbatch and p, 2p and 8p microbatches, in a table: with many the bubble of
both is small, (p - 2)B / 2 here and (p - 1)(F + B) / 2 of the interleaved form, so that no order
of theirs is 1.05 times as fast as the other.
"""

from __future__ import annotations

from functools import cache

from hanayo import MODELS
from verdict import Figure, conclude

from outsize.hardware import catalogue
from outsize.schedule.pipelines import (
    Costs,
    Pipeline,
    bitpipe,
    chimera,
    hanayo,
    interleaved,
    one_f_one_b,
)
from outsize.simulate.coarse import Times, play

DEVICES, COUNTS, TRANSFER = 8, (8, 16, 64), 0.02
TOKENS = (4096, 2048, 1024, 512)  # of a microbatch, in the table
CASES = {"BERT": (4, 8), "GPT": (1, 16)}  # rows of a microbatch, microbatches: the authors' README
DEVICE, BYTES, OPERATIONS = "A100-SXM-80", 2, 2
BESIDE = "Hanayo"  # with which the authors do not compare


def merge_of(tokens: int) -> float:
    """Seconds of a unit's sum over those of its forward."""
    hardware = catalogue(DEVICE, DEVICES)
    rate = hardware.devices[0].peak["bf16"].value
    bandwidth = max(link.bandwidth.value for link in hardware.links if link.name == "nvlink")
    return BYTES / bandwidth / (OPERATIONS * tokens / rate)


@cache
def orders(count: int, costs: Costs) -> dict[str, Pipeline]:
    """BitPipe, what the authors compare with, and Hanayo."""
    return {
        "BitPipe": bitpipe(DEVICES, count, 2, costs),
        "1F1B": one_f_one_b(DEVICES, count),
        "interleaved": interleaved(DEVICES, count, 2),
        "Chimera": chimera(DEVICES, count, costs),
        BESIDE: hanayo(DEVICES, count, 2, costs),
    }


def gains(tokens: int, count: int, transfer: float) -> dict[str, float]:
    """Times as fast as each of the others."""
    costs, merge = Costs(1, 1, 1, transfer), merge_of(tokens)
    times, late = Times(1, 1, 1, transfer, merge=merge), Times(1, 1, 1, transfer)
    others = dict(orders(count, costs))
    made = others.pop("BitPipe")
    run = play(made, times).run
    after = play(made, late).run.makespan + 2 * merge  # a worker's two units, at the end
    found = {name: play(one, times).run.makespan / run.makespan for name, one in others.items()}
    print(
        f"  {tokens} tokens, a sum {merge:.2f} of a forward, {count} microbatches: {shown(found)};"
        f" {after / run.makespan:.3f}x its own sums at the end; {max(run.peaks):.1f} held"
    )
    return found


def shown(found: dict[str, float]) -> str:
    return ", ".join(f"{gain:.3f}x {name}" for name, gain in found.items())


def main() -> None:
    judged, words = dict[str, list[float]](), list[str]()
    for name, (rows, count) in CASES.items():
        model = MODELS[name]
        print(f"  {name}, a transfer {model.transfer(DEVICE):.4f} of a stage's forward")
        found = gains(rows * model.tokens, count, model.transfer(DEVICE))
        words.append(f"{name}, m = {count // DEVICES}p: {shown(found)}")
        judged[name] = [gain for other, gain in found.items() if other != BESIDE]
    table = {(n, m): gains(n, m, TRANSFER) for n in TOKENS for m in COUNTS}
    last = [min(table[n, COUNTS[-1]].values()) for n in TOKENS]
    conclude(
        'Wu et al., "BitPipe", 2024',
        "1.05x to 1.28x the throughput of other synchronous pipelines",
        f"{'; '.join(words)}; over the best of all four with m = {COUNTS[-1] // DEVICES}p"
        f" {min(last):.3f}x to {max(last):.3f}x",
        f"simulated, {DEVICES} devices, two chunks a direction, F = I = W = 1; transfers, and sums"
        f" sent as they come, by {DEVICE}'s rates; models, rows and microbatches of the authors'"
        f" README; the table: transfer {TRANSFER}",
        *(
            Figure(f"over the best of the others, {name}", min(found), 1.05, how="simulated")
            for name, found in judged.items()
        ),
        Figure(
            "over the slowest of the others, the most",
            max(map(max, judged.values())), 1.28, how="simulated",
        ),
    )  # fmt: skip


if __name__ == "__main__":
    main()
