"""Claim: where links between machines differ, which machine has which ranks makes a plan faster.

Yim et al., "Pipette", 2024: rates between machines are measured pair by pair, and a configurator
that puts workers on them by annealing beats those that take the nominal rate. On the rates that the
authors measured between 16 machines of eight A100 and ship with their code, and on matrices drawn
at random: the product's plan with these rates against its own plan for the best rate everywhere,
and against its own layout, both on the machines as they are numbered.
"""

from __future__ import annotations

import csv
import random
import statistics
from dataclasses import replace
from pathlib import Path

from verdict import Figure, conclude

from outsize.foresight.memory import memory
from outsize.foresight.named import shape_of
from outsize.foresight.planning.asked import Asked
from outsize.foresight.planning.choose import at_best, choose, forecast, room_of
from outsize.foresight.shape import Shape
from outsize.hardware import Cluster, parse_spec

MODELS = ("llama2-13b", "llama2-70b")
ROWS, SEQUENCE = 512, 2048
MACHINES, EACH = 16, 8
NOMINAL = 25e9 / EACH  # HDR InfiniBand, one adapter a machine, of one of its devices
DRAWS, LEAST = 5, 0.2  # matrices; the least part of the nominal rate that a link attains


# -- simulated -------------------------------------------------------------------------------------


def measured() -> tuple[tuple[float, ...], ...]:
    """Of one device of a machine: the authors' rates are of its adapter, which eight share."""
    with (Path(__file__).parent / "pipette_rates.csv").open() as lines:
        rows = [row for row in csv.reader(lines) if not row[0].startswith("#")]
    return tuple(tuple(float(value) * 1e6 / EACH for value in row) for row in rows)


def drawn(seed: int) -> tuple[tuple[float, ...], ...]:
    draw = random.Random(seed)
    return tuple(
        tuple(NOMINAL * draw.uniform(LEAST, 1) for _ in range(MACHINES)) for _ in range(MACHINES)
    )


def gains(shape: Shape, cluster: Cluster) -> tuple[float, float]:
    """Of the product's plan over that of one who takes every link to be the best, as numbered; over
    the same layout as numbered."""
    asked = Asked(SEQUENCE, ROWS, seconds=60)
    ours = choose(shape, asked, cluster, 1).plans[0]
    blind = choose(shape, asked, at_best(cluster), 1).plans[0].layout
    room = room_of(asked, cluster)
    theirs = forecast(shape, [blind], cluster, [memory(shape, blind)], room)[0]
    return theirs.seconds / ours.seconds, ours.given / ours.seconds


def main() -> None:
    base = parse_spec(f"{MACHINES} x {EACH} A100-SXM-80")
    authors, others = [], []
    for model in MODELS:
        shape = shape_of(model)
        authors.append(gains(shape, replace(base, rates=measured())))
        print(f"  (simulated) {model}, the authors' rates: {authors[-1][0]:.4f} over nominal rates,"
              f" {authors[-1][1]:.4f} over machines as numbered")  # fmt: skip
        for seed in range(DRAWS):
            others.append(gains(shape, replace(base, rates=drawn(seed))))
            print(f"  (simulated) {model}, drawn {seed}: {others[-1][0]:.3f} over nominal rates,"
                  f" {others[-1][1]:.3f} over machines as numbered")  # fmt: skip
    middle = statistics.median(one for one, _ in others)
    placed = statistics.median(one for _, one in others)
    best, best_placed = (max(pair[i] for pair in authors) for i in (0, 1))
    conclude(
        'Yim et al., "Pipette", 2024',
        "a significant speedup over the prior art on large clusters by better models of time and"
        " memory and by which GPU has which worker",
        f"(simulated) {best:.3f} times a plan for nominal rates on the authors' rates,"
        f" {middle:.2f} at the median of {len(others)} drawn matrices; {best_placed:.3f} and"
        f" {placed:.2f} times the same layout on machines in turn",
        f"{MACHINES} x {EACH} A100, {', '.join(MODELS)}, {ROWS} rows of {SEQUENCE} tokens; drawn:"
        f" each link {LEAST:.0%} to 100% of the nominal rate; the abstract has no number",
        Figure("gain on the authors' rates", best, None, how="simulated"),
        Figure("gain on drawn rates", middle, None, how="simulated"),
        Figure("gain of the order alone on drawn rates", placed, None, how="simulated"),
    )


if __name__ == "__main__":
    main()
