"""Write what techniques save and the thresholds into docs/memory.md, between its markers.

    python tools/ladder.py            # write
    python tools/ladder.py --check    # exit with 1 where the page is not what this would write

Figures are predicted on rates that are written here, so that they are the same everywhere:
a processor of two cores and a disk, as measured on 2026-11-21.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from outsize.hardware import Device, Hardware, Rate, Tier
from outsize.memory import format_bytes
from outsize.memory.tiers import TierSpec
from outsize.models.families import parse
from outsize.models.presets import PRESETS
from outsize.optim import AdamW
from outsize.plan import Precision
from outsize.search import PlanRequest, choose, forecaster_of
from outsize.search.thresholds import thresholds
from outsize.search.tiers import states
from outsize.search.tradeoffs import tradeoffs

PAGE = Path(__file__).parent.parent / "docs" / "memory.md"
BEGIN, END = "<!-- tools/ladder.py begins -->", "<!-- tools/ladder.py ends -->"
DATE = "2026-11-21"
GIB = 1 << 30
FP32, BANDWIDTH, READ, WRITE = 187e9, 36e9, 1.5e9, 2.4e9  # FLOP/s; bytes/s
BUDGETS = (2.3, 5, 12, 18)


def machine() -> Hardware:
    """Two cores, and a disk."""

    def speed(value: float) -> Rate:
        return Rate(value, "B/s", "probe", DATE)

    size = Rate(24 * GIB, "B", "probe", DATE)
    peak = {"fp32": Rate(FP32, "FLOP/s", "probe", DATE)}
    device = Device("two cores", "cpu", size, peak, speed(BANDWIDTH))
    tiers = (
        Tier("device", 24 * GIB, speed(BANDWIDTH), speed(BANDWIDTH)),
        Tier("disk", 200 * GIB, speed(READ), speed(WRITE)),
    )
    return Hardware((device,), tiers, (), "tools/ladder.py")


def written() -> str:
    """The tables as Markdown."""
    config = parse(dict(PRESETS["llama-1.1b"]))
    disk = TierSpec("disk", "disk", (Path("."),), 200 * GIB)
    documents = (0, 1024)
    request = PlanRequest(
        8, 1024, Precision.named("float32"), AdamW(), None, tiers=(disk,), documents=documents
    )
    hardware = machine()
    forecaster = forecaster_of(config, request, hardware)
    lines = [
        "llama-1.1b, float32, AdamW, no clipping, 8 rows of 1,024 tokens a step; predicted for"
        f" {FP32 / 1e9:.0f} GFLOP/s, {BANDWIDTH / 1e9:.0f} GB/s of memory and a disk that reads"
        f" {READ / 1e9} GB/s and writes {WRITE / 1e9}.",
        "",
        "| technique, on top of those above | on the device | saves | on disk | a step | costs |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    before = None
    for rung in tradeoffs(forecaster, len(config.layers) + 2):
        saves = "" if before is None else format_bytes(before.bytes - rung.bytes)
        costs = "" if before is None else f"{rung.seconds / before.seconds - 1:+.1%}"
        lines.append(
            f"| {rung.technique} | {format_bytes(rung.bytes)} | {saves} |"
            f" {format_bytes(rung.below)} | {rung.seconds:.1f} s | {costs} |"
        )
        before = rung
    lines += ["", "What the planner chooses, by budget:", ""]
    lines += [
        "| `--memory` | peak | on disk | blocks computed again | stages with optimizer, gradients,"
        " parameters below | a step |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for budget in BUDGETS:
        made = choose(config, replace(request, budget=int(budget * GIB)), hardware)
        stages = made.plan.stages
        below = [
            sum(getattr(s.rest, kind) != "device" for s in stages)
            for kind in ("optimizer", "gradients", "parameters")
        ]
        lines.append(
            f"| {budget} GiB | {format_bytes(made.peak)} |"
            f" {format_bytes(sum(made.below.values()))} | {sum(s.whole for s in stages)} |"
            f" {', '.join(map(str, below))} of {len(stages)} | {made.seconds:.1f} s |"
        )
        if budget == BUDGETS[0]:
            limits = thresholds(made, states(forecaster.facts, made.plan), (disk,), hardware)
    lines += ["", f"Thresholds of the plan for {BUDGETS[0]} GiB:", ""]
    lines += ["| hidden | from tokens |", "| --- | --- |"]
    for limit in limits:
        name = limit.what if limit.hides else f"{limit.what}: a tenth of a step"
        lines.append(f"| {name} | {limit.tokens:,.0f} a {limit.of} |")
    return "\n".join(lines)


def main() -> int:
    """Write or compare."""
    page = PAGE.read_text(encoding="utf-8")
    head, _, rest = page.partition(BEGIN)
    tail = rest.partition(END)[2]
    made = f"{head}{BEGIN}\n{written()}\n{END}{tail}"
    if "--check" in sys.argv[1:]:
        print("docs/memory.md is as written" if made == page else "docs/memory.md has changed")
        return int(made != page)
    PAGE.write_text(made, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
