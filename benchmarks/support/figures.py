"""From what the processes found to tables and verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from support.breakdown import Breakdown
from support.contender import Result

OURS, COMPILED = "outsize", "compile"
UNCOMPILED = ("plain", "trainer")
TITLES = {
    OURS: "Outsize",
    "plain": "plain PyTorch loop",
    "trainer": "Hugging Face Trainer",
    COMPILED: "plain PyTorch, torch.compile",
}
FASTER, AS_FAST, LEANER = 1.3, 1.0, 0.7  # the targets
MIB, GIGA = 2**20, 1e9
# Relative, of the last step's loss. fp32: other orders of summation, grown by a few Adam steps;
# bf16: autocast rounds in other places than bfloat16 parameters do.
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3}


@dataclass(frozen=True)
class Work:
    """Of one step. products, attention: operations that the model needs, in FLOPs."""

    tokens: int
    products: float
    attention: float
    formula: str

    @property
    def flops(self) -> float:
        return self.products + self.attention


def work_of(parameters: int, layers: int, sequence: int, hidden: int, tokens: int) -> Work:
    """The usual count: 2 operations a weight and token forward, 4 backward; recompute adds none.

    parameters: without the embedding table, which is looked up and not multiplied. Attention: two
    products forward and four backward of S x S x D, 12 L S D a token in all, half of it causal.
    """
    attention = 6 * layers * sequence * hidden * tokens
    formula = (
        f"6 x {parameters:,} parameters (without the embedding table) x {tokens:,} tokens"
        f" + 6 x {layers} layers x {sequence} x {hidden} x {tokens:,} tokens (causal attention:"
        f" half of 12 L S D) = {(6 * parameters * tokens + attention) / 1e12:.3f} TFLOP a step"
    )
    return Work(tokens, 6.0 * parameters * tokens, float(attention), formula)


@dataclass(frozen=True)
class Contender:
    """All rounds of one contender in one precision. warm: steps that do not count."""

    name: str
    results: Sequence[Result]
    warm: int
    tokens: int

    @property
    def rates(self) -> list[float]:
        """Tokens/s of each round: of its median step."""
        return [self.tokens / median(r.seconds[self.warm :]) for r in self.results]

    @property
    def rate(self) -> float:
        return median(self.rates)

    @property
    def peak(self) -> float:
        """Bytes: the median round's peak."""
        return median(r.peak for r in self.results)

    @property
    def base(self) -> float:
        return median(r.base for r in self.results)

    @property
    def loss(self) -> float:
        return self.results[0].losses[-1]


Contenders = Mapping[str, Contender]


def best_uncompiled(found: Contenders) -> Contender | None:
    """The peer with the most tokens/s among those that are not compiled."""
    return max((c for n, c in found.items() if n in UNCOMPILED), key=lambda c: c.rate, default=None)


def leanest_uncompiled(found: Contenders) -> Contender | None:
    """The peer with the smallest peak among those that are not compiled; not always the fastest."""
    return min((c for n, c in found.items() if n in UNCOMPILED), key=lambda c: c.peak, default=None)


def table(found: Contenders, work: Work, peak: float) -> str:
    """Markdown: a row a contender."""
    fast, lean, compiled = best_uncompiled(found), leanest_uncompiled(found), found.get(COMPILED)
    head = (
        "contender", "tokens/s", "min", "max", "to best uncompiled", "to compiled", "MFU",
        "peak RSS, MiB", "before training", "to leanest uncompiled", "last loss",
    )  # fmt: skip
    rows = [
        (
            TITLES[c.name],
            f"{c.rate:,.0f}",
            f"{min(c.rates):,.0f}",
            f"{max(c.rates):,.0f}",
            _ratio(c.rate, fast and fast.rate),
            _ratio(c.rate, compiled and compiled.rate),
            f"{work.flops * c.rate / c.tokens / peak:.1%}",
            f"{c.peak / MIB:,.0f}",
            f"{c.base / MIB:,.0f}",
            _ratio(c.peak, lean and lean.peak),
            f"{c.loss:.5f}",
        )
        for c in found.values()
    ]
    return markdown(head, rows)


def _ratio(value: float, to: float | None) -> str:
    return "-" if to is None else f"{value / to:.2f}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns are aligned, the first to the left and the others to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(
        "| " + " | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + " |"
        for row in (head, rule, *rows)
    )


@dataclass(frozen=True)
class Verdict:
    """One target. met is None where a contender is missing, so that it cannot be judged."""

    text: str
    met: bool | None


def verdicts(found: Contenders, precision: str) -> list[Verdict]:
    """Every target of a precision."""
    fast, lean, compiled = best_uncompiled(found), leanest_uncompiled(found), found.get(COMPILED)
    return [
        _speed(found.get(OURS), fast, FASTER, f"{precision}: tokens/s to the best uncompiled peer"),
        _speed(found.get(OURS), compiled, AS_FAST, f"{precision}: tokens/s to the compiled peer"),
        _memory(found.get(OURS), lean, precision),
        _losses(found, precision),
    ]


def _speed(ours: Contender | None, peer: Contender | None, least: float, what: str) -> Verdict:
    if ours is None or peer is None:
        return Verdict(f"{what}: not judged, a contender is missing", None)
    ratio = ours.rate / peer.rate
    each = [a / b for a, b in zip(ours.rates, peer.rates, strict=True)]
    return Verdict(
        f"{what} ({TITLES[peer.name]}): {ratio:.2f}, by round {min(each):.2f} to {max(each):.2f};"
        f" target at least {least:.1f}",
        ratio >= least,
    )


def _memory(ours: Contender | None, peer: Contender | None, precision: str) -> Verdict:
    what = f"{precision}: peak RSS to the smallest among uncompiled peers"
    if ours is None or peer is None:
        return Verdict(f"{what}: not judged, a contender is missing", None)
    ratio = ours.peak / peer.peak
    text = f"{what} ({TITLES[peer.name]}): {ratio:.2f}; target at most {LEANER:.1f}"
    return Verdict(text, ratio <= LEANER)


def _losses(found: Contenders, precision: str) -> Verdict:
    """All contenders did the same work, or the speeds say nothing."""
    losses = [r.losses[-1] for c in found.values() for r in c.results]
    spread = (max(losses) - min(losses)) / min(losses)
    return Verdict(
        f"{precision}: losses of the last step differ by {spread:.1e} at most, relative; tolerance"
        f" {TOLERANCE[precision]:.0e}",
        spread <= TOLERANCE[precision],
    )


def breakdown(found: Breakdown, work: Work, peak: float) -> str:
    """Where Outsize's step goes, beside what the model's operations take at the matmul peak."""
    ideal = {"matrix products": work.products / peak, "attention": work.attention / peak}
    total = sum(found.sorts.values())
    rows = [
        (
            sort,
            f"{seconds:.3f}",
            f"{seconds / total:.1%}",
            f"{ideal.get(sort, 0.0):.3f}",
            f"{ideal[sort] / seconds:.0%}" if sort in ideal else "-",
        )
        for sort, seconds in sorted(found.sorts.items(), key=lambda item: -item[1])
    ]
    rows.append(
        ("whole step", f"{total:.3f}", "100.0%", f"{work.flops / peak:.3f}",
         f"{work.flops / peak / total:.0%}")
    )  # fmt: skip
    head = ("profiled step", "seconds", "share", "seconds at matmul peak", "of the peak")
    whole = sum(found.actions.values())
    lines = [
        markdown(head, rows),
        f"(with the profiler {found.profiled:.3f} s a step, without {found.plain:.3f} s)",
        "costliest of the element-wise: "
        + ", ".join(f"{name} {seconds / total:.1%}" for name, seconds in found.others.items()),
        "by action, from Outsize's trace: "
        + ", ".join(f"{kind} {seconds / whole:.1%}" for kind, seconds in found.actions.items()),
    ]
    return "\n".join(lines)
