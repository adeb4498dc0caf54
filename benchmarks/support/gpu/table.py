"""What was found, as Markdown for docs/gpu.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from support.figures import markdown

from outsize.memory.sizes import format_bytes

FRACTION = "a fraction is FLOPs (below) / seconds of the median step / this peak"
READ = (
    "steps/s (tokens/s over requests at once) x bytes of weights / the memory's bytes/s as probed"
)
Found = Mapping[str, Any]  # the JSON of a run


def text(found: Found) -> str:
    """Every part that was run: a table of what it found, then what it did not find, with why."""
    blocks = []
    for name, part in found["parts"].items():
        done = {n: c["figures"] for n, c in part["cases"].items() if c["state"] == "done"}
        blocks.append(f"## {name}\n\n{conditions(part)}")
        if done and (table := TABLES[name](done)):
            blocks.append(table)
        blocks += formulas(done)
        others = [
            f"- {case}: {each['state']}: {each['why']}"
            for case, each in part["cases"].items()
            if each["state"] != "done"
        ]
        blocks += ["\n".join(others)] if others else []
    return "\n\n".join(blocks) + "\n"


def conditions(part: Found) -> str:
    of = part["machine"]
    return (
        f"{'DRY RUN, no figure counts. ' if part['dry'] else ''}{of['device']}"
        f" ({format_bytes(of['device bytes'])} free), torch {of['torch']},"
        f" {of['cores']} cores, {format_bytes(of['host bytes'])} of host memory;"
        f" {part['date']}, {part['seconds']:.0f} s"
    )


def formulas(done: Found) -> list[str]:
    """How operations are counted, once for each model."""
    every = {figures["formula"]: None for figures in done.values() if "formula" in figures}
    return ["\n".join(f"- FLOPs: {formula}" for formula in every)] if every else []


def _bytes(size: float | None) -> str:
    return "-" if size is None else format_bytes(int(size))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _ratio(measured: float | None, foretold: float) -> str:
    return "-" if measured is None else f"{measured / foretold:.3f}"


def tests(done: Found) -> str:
    lines = []
    for figures in done.values():
        lines.append(", ".join(f"{n} {word}" for word, n in figures["counts"].items()))
        lines += [f"- {line}" for line in figures["failed"]]
    return "\n".join(lines)


def probe(done: Found) -> str:
    rates, tiers = done["probe"]["FLOP/s"], done["probe"]["tiers"]
    rows = [(f"products, {name}", f"{value / 1e12:.4g} TFLOP/s") for name, value in rates.items()]
    rows.append(("memory", f"{done['probe']['bytes/s'] / 1e9:.4g} GB/s"))
    for name, tier in tiers.items():
        for way in ("read", "write"):
            if name != "device" and tier[way]:
                rows.append((f"{name}, {way}", f"{tier[way] / 1e9:.4g} GB/s"))
    return markdown(("rate", "measured"), rows)


def plans(done: Found) -> str:
    head = ("plan", "bytes foretold", "measured", "ratio", "seconds foretold", "measured", "ratio")
    return markdown(head, [
        (
            name, _bytes(f["foretold"]), _bytes(f["peak"]), _ratio(f["peak"], f["foretold"]),
            f"{f['foretold seconds']:.4g}", f"{f['seconds']:.4g}",
            _ratio(f["seconds"], f["foretold seconds"]),
        )
        for name, f in done.items()
    ])  # fmt: skip


def steps(done: Found) -> str:
    peak = done.get("matmul peak", {}).get("FLOP/s")
    head = ("contender", "tokens/s", "of the matmul peak", "bytes", "last loss", "how")
    rows = _steps({n: f for n, f in done.items() if n != "matmul peak"}, peak)
    best = f"\n\nmatmul peak: {peak / 1e12:.4g} TFLOP/s in bfloat16; {FRACTION}" if peak else ""
    return markdown(head, list(rows)) + best


def _steps(done: Found, peak: float | None) -> Iterator[Sequence[str]]:
    for name, f in done.items():
        part = "-" if peak is None else f"{f['FLOP/s'] / peak:.1%}"
        loss = f"{f['losses'][-1]:.4f}"
        yield name, f"{f['tokens/s']:,.0f}", part, _bytes(f["peak"]), loss, f["plan"]


def offloaded(done: Found) -> str:
    head = ("contender", "tokens/s", "TFLOP/s", "bytes", "foretold", "seconds", "foretold", "how")
    return markdown(head, [
        (
            name, f"{f['tokens/s']:,.1f}", f"{f['FLOP/s'] / 1e12:.4g}", _bytes(f["peak"]),
            _bytes(f.get("foretold")), f"{f['seconds']:.4g}",
            f"{f['foretold seconds']:.4g}" if "foretold seconds" in f else "-", f["plan"],
        )
        for name, f in done.items()
    ])  # fmt: skip


def tokens(done: Found) -> str:
    head = ("who", "tokens/s", "of the bandwidth", "first token, s", "bytes", "may hold", "weights")
    table = markdown(head, [
        (
            name, _number(f["tokens/s"]), _share(f["of the bandwidth"]),
            f"{f['first token']:.4g}", _bytes(f["peak"]), _bytes(f.get("budget")),
            _bytes(f.get("weights")),
        )
        for name, f in done.items()
        if "tokens/s" in f
    ])  # fmt: skip
    return f"{table}\n\nof the bandwidth: {READ}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


TABLES = {
    "tests": tests, "probe": probe, "plans": plans, "steps": steps, "offloaded": offloaded,
    "tokens": tokens,
}  # fmt: skip
