"""What the pipeline benchmark prints: its table and verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import exp, log

from support.bench_pipeline import Bout
from support.figures_parallel import LOSS_GAP, MIB, Verdict

GRADIENT_GAP = 1e-3  # of the largest of its tensor: sums of float32 in two orders
AT_LEAST, ON_AVERAGE = 1.0, 1.1  # targets of the ratios, and of their geometric mean


def table(bouts: Sequence[Bout]) -> str:
    lines = [
        "| theirs | ours | theirs s | ours s | ratio | of minima | theirs MiB | ours MiB |"
        " loss gap | gradient gap |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for b in bouts:
        name, theirs = b.pair.theirs.removeprefix("Schedule"), b.theirs
        if b.ours is None or b.gradients is None:
            lines.append(
                f"| {name} | - | {theirs.step:.3f} | - | - | - | {theirs.peak / MIB:.0f} | - |"
                " - | - |"
            )
            continue
        minima = min(theirs.seconds) / min(b.ours.seconds)
        lines.append(
            f"| {name} | {b.pair.ours} | {theirs.step:.3f} | {b.ours.step:.3f} | {ratio(b):.2f} |"
            f" {minima:.2f} | {theirs.peak / MIB:.0f} | {b.ours.peak / MIB:.0f} | {gap(b):.1e} |"
            f" {b.gradients:.1e} |"
        )
    return "\n".join(lines)


def ratio(bout: Bout) -> float:
    """How many times as fast as theirs a median step of ours is."""
    assert bout.ours is not None
    return bout.theirs.step / bout.ours.step


def gap(bout: Bout) -> float:
    """The largest relative difference of a step's losses."""
    assert bout.ours is not None
    pairs = zip(bout.theirs.losses, bout.ours.losses, strict=True)
    return max(abs(a - b) / abs(a) for a, b in pairs)


def verdicts(bouts: Sequence[Bout]) -> Iterator[Verdict]:
    """The targets, one by one."""
    full = [b for b in bouts if b.ours is not None]
    for b in full:
        assert b.ours is not None and b.gradients is not None
        name = b.pair.theirs.removeprefix("Schedule")
        yield Verdict(
            ratio(b) >= AT_LEAST,
            f"{b.pair.ours}: {ratio(b):.2f}x of {name}'s speed, {AT_LEAST:.2f}x",
        )
        mine, theirs = b.ours.peak / MIB, b.theirs.peak / MIB
        yield Verdict(mine <= theirs, f"{b.pair.ours}: {mine:.0f} MiB a rank, theirs {theirs:.0f}")
        agree = gap(b) <= LOSS_GAP and b.gradients <= GRADIENT_GAP
        yield Verdict(
            agree, f"{b.pair.ours}: losses apart by {gap(b):.1e}, gradients by {b.gradients:.1e}"
        )
    if len(full) > 1:
        mean = exp(sum(log(ratio(b)) for b in full) / len(full))
        yield Verdict(mean >= ON_AVERAGE, f"geometric mean {mean:.2f}x of {ON_AVERAGE:.2f}x")
