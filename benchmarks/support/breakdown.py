"""Where Outsize's step goes: its own trace by action, and PyTorch's profiler by sort of operator.

Both of the same step after a warm-up: the trace's actions are ranges in the profile, so that what
runs inside UPDATE and NORM can be told from the rest. Not one of the timed steps.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

from support.contender import start
from support.ours import batch_of, job_of
from torch.profiler import ProfilerActivity, profile, record_function

from outsize.runtime import Job
from outsize.runtime.engine import Step

WARM = 2
PRODUCTS = frozenset({"mm", "addmm", "addmm_", "bmm", "baddbmm", "linear", "matmul"})
FINISHING = ("UPDATE", "NORM")
PREFIX = "action "
LISTED = 8
ATEN = "aten::"


@dataclass(frozen=True)
class Breakdown:
    """Seconds of one step: by action, by sort of operator, of the costliest other operators; of
    the whole step with the profiler on, and of the step before it, with the profiler off."""

    actions: dict[str, float]
    sorts: dict[str, float]
    others: dict[str, float]
    profiled: float
    plain: float


def name_actions(job: Job) -> None:
    """Make every action of the job a range of the profile."""

    def named(step: Step) -> Step:
        def call() -> None:
            with record_function(PREFIX + step.action.kind):
                for each in step.calls:
                    each()

        return replace(step, calls=(call,))

    job.loaded = replace(job.loaded, steps=tuple(map(named, job.loaded.steps)))


def action_of(event: Any) -> str:
    """The action inside which an event of the profile lies, "" outside of all."""
    while event is not None:
        if event.name.startswith(PREFIX):
            return str(event.name.removeprefix(PREFIX))
        event = event.cpu_parent
    return ""


def sort_of(event: Any) -> str:
    """The row of the table that an event's own time belongs to."""
    if event.name.startswith("mkldnn::"):
        return "matrix products"
    if event.name.startswith("outsize::attention"):
        return "attention"
    if not event.name.startswith(ATEN):
        return "Python and autograd"
    if action_of(event) in FINISHING:
        return "optimizer, norm and clipping"
    name = event.name.removeprefix(ATEN)
    if "scaled_dot_product" in name:
        return "attention"
    return "matrix products" if name in PRODUCTS else "element-wise, norms, copies"


def measure(job: Job, batches: list[Any]) -> Breakdown:
    """Profile the last of the batches."""
    name_actions(job)
    for batch in batches[:-1]:
        job.step(batch)
    plain = job.report.seconds
    with profile(activities=[ProfilerActivity.CPU]) as found:
        begin = time.perf_counter()
        job.step(batches[-1])
        seconds = time.perf_counter() - begin
    sorts: Counter[str] = Counter()
    others: Counter[str] = Counter()
    for event in found.events():
        own = event.self_cpu_time_total / 1e6
        sort = sort_of(event)
        sorts[sort] += own
        if sort.startswith("element-wise"):
            others[event.name.removeprefix(ATEN)] += own
    sorts["Python and autograd"] += max(0.0, seconds - sum(sorts.values()))
    actions: Counter[str] = Counter()
    for ran in job.report.trace.events:
        actions[ran.kind] += ran.end - ran.start
    return Breakdown(dict(actions), dict(sorts), dict(others.most_common(LISTED)), seconds, plain)


def main() -> None:
    task, path = start()
    job, _ = job_of(task)
    steps = task.steps()
    batches = [batch_of(steps[i % len(steps)]) for i in range(WARM + 1)]
    path.write_text(json.dumps(asdict(measure(job, batches))), encoding="utf-8")


if __name__ == "__main__":
    main()
