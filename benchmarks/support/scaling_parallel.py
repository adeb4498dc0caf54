"""How a step's time and memory grow over 1, 2, 4 and 8 workers of one machine, and over the model's
size: the rows of a step stay as they are, so that the work does."""

from __future__ import annotations

from dataclasses import replace

from support.bench_parallel import CONTESTS, OURS, Bench
from support.figures_parallel import MIB
from support.worlds_parallel import Spot

RANKS = (1, 2, 4, 8)
SIZES = ("small", "25m")
NAMES = ("data", "fully-sharded")


def show_scaling(bench: Bench) -> None:
    """A table: sizes by layouts by ranks."""
    print("| model | layout | ranks | peer | peer s | ours s | peer MiB a rank | ours MiB a rank |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for preset in SIZES:
        sized = replace(bench, preset=preset)
        sized.prepare()
        for name in NAMES:
            for ranks in RANKS:
                each = replace(CONTESTS[name], data=ranks)
                modules = (each.module, OURS)
                b = sized.bout(name, each, modules, Spot(ranks), sized.task(each))
                assert b.ours is not None
                print(
                    f"| {preset} | {name} | {ranks} | {each.title} | {b.theirs.step:.3f} |"
                    f" {b.ours.step:.3f} | {b.theirs.peak / MIB:.0f} | {b.ours.peak / MIB:.0f} |",
                    flush=True,
                )
