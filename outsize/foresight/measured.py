"""A measured figure as seconds of a step or bytes, by what its publication counts."""

from __future__ import annotations

from outsize.foresight.conventions import COUNTS
from outsize.foresight.runs import MEMORY, TIMES, Run
from outsize.foresight.sources import Roofline

BILLION = 300e9  # tokens of the column that counts days for so many


def seconds_of(run: Run) -> float | None:
    """Seconds of a step as a row has measured it; None where it has not."""
    if run.metric not in TIMES or run.value is None or run.layout is None or run.shape is None:
        return None
    lay, value = run.layout, run.value
    tokens = float(lay.batch * lay.sequence)
    if run.metric == "step_time_s":
        return value
    if run.metric == "tokens_per_s_per_gpu" or run.metric == "tokens_per_s":
        return tokens / (value * lay.devices)  # what is printed as tokens a second is of one device
    if run.metric == "train_days_300B_tokens":
        return value * 86400 * tokens / BILLION
    if run.metric == "gpu_hours_total":
        return None
    rate = value * 1e12
    if run.metric.endswith("_pct"):
        assert run.cluster is not None
        rate = value / 100 * Roofline(run.cluster.groups[0].device).peak(lay.precision)
    again = run.metric.startswith("hfu") and lay.recompute == "full"
    count = COUNTS[run.source.operations](run.shape, tokens, lay.sequence, again)
    return count / (rate * lay.devices)


def bytes_of(run: Run) -> float | None:
    """Bytes as a row has measured them; None where it has not."""
    if run.metric not in MEMORY or run.value is None:
        return None
    return run.value * MEMORY[run.metric]
