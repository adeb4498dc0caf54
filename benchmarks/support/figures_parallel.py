"""What the parallel benchmark prints: tables and verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import median

from support.contender_parallel import Answer
from support.volume_parallel import SCALARS

MIB = 2**20
LOSS_GAP = 1e-3  # relative, after a few steps of float32 in two orders of summation
AT_LEAST, ON_AVERAGE = 1.0, 1.15  # targets of the ratios, and of their geometric mean


@dataclass(frozen=True)
class Side:
    """One contender: seconds of the steps that count, losses of all, and what its workers said."""

    seconds: list[float]
    losses: list[float]
    answers: list[Answer]

    @property
    def step(self) -> float:
        return median(self.seconds)

    @property
    def peak(self) -> int:
        """Of the worker that holds most: bytes beyond what it held after the imports."""
        return max(a.peak - a.base for a in self.answers)

    @property
    def whole(self) -> int:
        """The same with the imports."""
        return max(a.peak for a in self.answers)

    @property
    def received(self) -> int:
        """Bytes that the worker who has most had from others in a step."""
        return max(sum(a.received.values()) for a in self.answers)


@dataclass(frozen=True)
class Bout:
    """A contest with its figures. volume: bytes a step by formula, over the data axis and over the
    tensor axis."""

    name: str
    title: str
    ranks: int
    theirs: Side
    ours: Side | None
    volume: tuple[float, float]

    @property
    def ratio(self) -> float:
        assert self.ours is not None
        return self.theirs.step / self.ours.step

    @property
    def gap(self) -> float:
        """The largest relative difference of a step's losses."""
        assert self.ours is not None
        pairs = zip(self.theirs.losses, self.ours.losses, strict=True)
        return max(abs(a - b) / abs(a) for a, b in pairs)


def table(bouts: Sequence[Bout]) -> str:
    lines = [
        "| layout | ranks | peer | peer s | ours s | ratio | peer MiB | ours MiB | ours tensors MiB"
        " | received MiB | formula MiB | loss gap |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for b in bouts:
        head = f"| {b.name} | {b.ranks} | {b.title} | {b.theirs.step:.3f} |"
        if b.ours is None:
            lines.append(f"{head} - | - | {b.theirs.peak / MIB:.0f} | - | - | - | - | - |")
            continue
        tensors = max(a.tensors for a in b.ours.answers)
        lines.append(
            f"{head} {b.ours.step:.3f} | {b.ratio:.2f} | {b.theirs.peak / MIB:.0f} |"
            f" {b.ours.peak / MIB:.0f} | {tensors / MIB:.0f} | {b.ours.received / MIB:.2f} |"
            f" {sum(b.volume) / MIB:.2f} | {b.gap:.1e} |"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class Verdict:
    met: bool
    text: str


def verdicts(bouts: Sequence[Bout]) -> Iterator[Verdict]:
    """The targets, one by one."""
    full = [b for b in bouts if b.ours is not None]
    for b in full:
        assert b.ours is not None
        yield Verdict(b.ratio >= AT_LEAST, f"{b.name}: {b.ratio:.2f}x of {b.title}'s speed, 1.00x")
        mine, theirs = b.ours.peak / MIB, b.theirs.peak / MIB
        yield Verdict(mine <= theirs, f"{b.name}: {mine:.0f} MiB a rank, theirs {theirs:.0f}")
        most = sum(b.volume) + SCALARS
        yield Verdict(
            b.ours.received <= most,
            f"{b.name}: {b.ours.received} bytes received a step, formula {most:.0f}",
        )
        yield Verdict(b.gap <= LOSS_GAP, f"{b.name}: losses agree, {b.gap:.1e} of {LOSS_GAP:.0e}")
    if len(full) > 1:
        mean = exp(sum(log(b.ratio) for b in full) / len(full))
        yield Verdict(mean >= ON_AVERAGE, f"geometric mean {mean:.2f}x of {ON_AVERAGE:.2f}x")
