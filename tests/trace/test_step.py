"""The trace of a step that several workers have really run."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
from plain import batches
from streamed import model_of, plan_of
from subjects import SEQUENCE, VOCAB
from threads import play

from outsize.collectives import Mesh
from outsize.optim import AdamW
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.trace import merged
from outsize.trace.gather import gathered


def test_steps_lie_to_each_other_as_they_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("float64", rows=4, microbatch_rows=2, mesh=Mesh(data=2))
    (batch,) = batches(1, plan.rows, SEQUENCE, VOCAB)

    begun = threading.Event()

    def began(count):
        return lambda batch: (begun.set(), count(batch))[1]

    def work(world):
        model = model_of("llama, untied", "float64")
        job = Job(NativeFlow(model, plan), plan, Recipe(AdamW()), Here(world))
        if world.rank:
            assert begun.wait(600), "the second worker comes later"
        else:
            monkeypatch.setattr(job.flow, "count", began(job.flow.count))
        begin = time.perf_counter()
        job.step(batch.rows(*plan.rows_at(job.place)))
        end, trace = time.perf_counter(), job.report.trace
        job.close()
        assert begin <= trace.begin <= end - trace.span()
        return gathered(world, trace), trace

    results = play(plan.mesh, work)
    traces = [trace for _, trace in results]
    whole = results[0][0]
    assert results[1][0] is None and whole.workers == (0, 1) and whole == merged(traces)
    norms = sorted((e for e in whole.events if e.kind == "NORM"), key=lambda e: e.worker)
    assert max(e.start for e in norms) <= min(e.end for e in norms), "all leave together"
    at = [t.begin + next(e for e in t.events if e.kind == "NORM").start for t in traces]
    assert norms[1].start - norms[0].start == pytest.approx(at[1] - at[0], abs=1e-6)
    assert traces[1].begin > traces[0].begin
    unknown = merged([replace(trace, begin=None) for trace in traces])
    ends = [e.end for e in unknown.events if e.kind == "NORM"]
    assert ends[0] == ends[1], "without clocks, aligned where all leave the norm"
