"""Claim: which layout trains a Llama fastest follows a few rules, and a planner finds them itself.

Hagemann et al., "Efficient Parallelization Layouts for Large-Scale Distributed Model Training",
2023 (Aleph Alpha): microbatches of one row; tensor and pipeline parallelism rather than recompute;
sequence parallelism for models from 30B on. On the authors' own sweeps, whose 519 runs are in the
package's table: of every sweep (model, devices, length) the layout that the forecast has as the
fastest that fits, by constants fitted without this publication, against the fastest that they
measured. No rule is written into the forecast or the search.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from verdict import Figure, conclude

from outsize.foresight.measured import seconds_of
from outsize.foresight.runs import shipped
from outsize.foresight.score import Row, forecasts

PUBLICATION = "Aleph Alpha"
LARGE = 25e9  # parameters, from which the paper asks for sequence parallelism
WITHIN = 1.01  # of the best measured time


def sweeps() -> dict[tuple[str, int, int], list[Row]]:
    """Forecasts of the publication's rows by model, devices and length."""
    runs = [run for run in shipped() if not run.missing and run.source.name == PUBLICATION]
    found = defaultdict(list)
    for row in forecasts(runs, lambda run: run.source.name):
        lay = row.run.layout
        assert lay is not None
        found[row.run.model, lay.devices, lay.sequence].append(row)
    return dict(found)


def said(row: Row) -> str:
    lay = row.run.layout
    assert lay is not None
    norms = ", sequence parallel" if lay.sequence_parallel else ""
    return (
        f"rows {lay.rows}, tensor {lay.tensor}, pipeline {lay.pipeline}, recompute"
        f" {lay.recompute}{norms}"
    )


def measured(row: Row) -> float:
    return seconds_of(row.run) or float("inf")


def both(rows: Sequence[Row]) -> bool:
    """Whether a sweep has layouts with and without sequence parallelism, of a large model."""
    first = rows[0].run
    assert first.shape is not None
    ways = {row.run.layout.sequence_parallel for row in rows if row.run.layout is not None}
    return first.shape.parameters > LARGE and len(ways) == 2


def main() -> None:
    found, chosen, losses = sweeps(), {}, {}
    for sweep, rows in found.items():
        chosen[sweep] = best = min((row for row in rows if row.fits), key=lambda row: row.seconds)
        fastest = min(rows, key=measured)
        losses[sweep] = measured(best) / measured(fastest)
        model, devices, length = sweep
        print(
            f"  (simulated) {model}, {devices} devices, {length} tokens, {len(rows)} layouts:"
            f" {said(best)}; measured best: {said(fastest)}; measured {losses[sweep]:.3f} times"
        )
    layouts = [row.run.layout for row in chosen.values() if row.run.layout is not None]
    large = [chosen[sweep].run.layout for sweep, rows in found.items() if both(rows)]
    count, parallel = len(found), sum(lay is not None and lay.sequence_parallel for lay in large)
    single = sum(lay.rows == 1 for lay in layouts)
    plain = sum(lay.recompute == "none" for lay in layouts)
    near = sum(loss <= WITHIN for loss in losses.values())
    conclude(
        'Hagemann et al., "Efficient Parallelization Layouts", 2023',
        "microbatches of one row, model parallelism before recompute, sequence parallelism for"
        " large models",
        f"(simulated) of {count} sweeps the fastest foretold has one row in {single}, no recompute"
        f" in {plain}; of {len(large)} of large models with both ways, sequence parallelism in"
        f" {parallel}; the choice was measured at most {max(losses.values()):.3f} times the best",
        "among the layouts that the authors ran, constants fitted without them; what fits is"
        " foretold too",
        Figure("sweeps with one row", single, count, "", 0.0, how="simulated"),
        Figure("sweeps without recompute", plain, count, "", 0.0, how="simulated"),
        Figure("sweeps of large models, cut norms", parallel, len(large), "", 0.0, how="simulated"),
        Figure("choices within 1% of the best measured", near, count, "", 0.0, how="simulated"),
    )


if __name__ == "__main__":
    main()
