"""Which pipelines a run can have: rows of microbatches, cuts and seconds, going on."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from subjects import config_of

from outsize.collectives import Mesh
from outsize.errors import OutsizeError
from outsize.hardware import catalogue
from outsize.optim import AdamW
from outsize.plan import Pipelined, Plan, Precision, Sharding
from outsize.plan.plan import per_segment
from outsize.schedule.pipelines import NAMES
from outsize.search import PlanRequest, choose
from outsize.search.candidates import candidates
from outsize.search.pipeline_request import check, continued, row_choices

CONFIG = config_of("llama, untied", num_hidden_layers=5)
HARDWARE = catalogue("H200", 4)
WISH = PlanRequest(
    64, 16, Precision.named("float32"), AdamW(), mesh=Mesh(pipeline=4), documents=(0, 16)
)  # fmt: skip


def counts(request: PlanRequest) -> list[int]:
    """Microbatches of a step, for each choice of rows, as a plan counts them."""
    return [
        Plan(8, per_segment(8), request.rows, rows, mesh=request.mesh).microbatches
        for rows in row_choices(request)
    ]


@pytest.mark.parametrize("rows", [8, 11, 16, 37, 64, 100])
@pytest.mark.parametrize("mesh", [Mesh(pipeline=2), Mesh(pipeline=4), Mesh(2, 1, 4)])
def test_a_step_has_twice_as_many_microbatches_as_workers_where_there_are_rows(rows, mesh):
    found = counts(replace(WISH, rows=rows, mesh=mesh))
    own = rows // mesh.data
    assert found[0] >= min(own, 2 * mesh.pipeline)
    assert found[0] <= 4 * mesh.pipeline  # and no smaller ones than that takes
    assert found == sorted(found)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "skip-pipe"])
@pytest.mark.parametrize("rows", [16, 22, 40])
def test_conditions_of_every_schedule_hold_for_the_rows_that_are_chosen(name, rows):
    request = replace(WISH, rows=rows, pipeline=name)
    check(request, 40)
    for plan in itertools.islice(candidates(request, 40), 3):
        assert plan.microbatches >= 4 and plan.pipeline == Pipelined(name)


def test_what_is_named_as_nearest_holds():
    with pytest.raises(OutsizeError, match=r"batch_tokens to 128, or mesh.pipeline to 2"):
        check(replace(WISH, rows=5, mesh=Mesh(2, 1, 4)), 8)
    check(replace(WISH, rows=8, mesh=Mesh(2, 1, 4)), 8)
    check(replace(WISH, rows=5, mesh=Mesh(2, 1, 2)), 8)
    with pytest.raises(OutsizeError, match=r"expected mesh\.pipeline 4 at most"):
        check(replace(WISH, pipeline="interleaved:2", mesh=Mesh(pipeline=8)), 9)
    check(replace(WISH, pipeline="interleaved:2", mesh=Mesh(pipeline=4)), 9)


def test_cuts_are_those_of_the_smallest_largest_load():
    """By every way to cut seven segments in four, loads being the blocks' own predicted times."""
    made = choose(CONFIG, WISH, HARDWARE)
    seconds = [0.0] * 7
    for event in made.trace.events:
        if event.kind in ("FORWARD", "LOSS", "BACKWARD"):
            seconds[event.stage] += event.end - event.start

    def worst(cuts: tuple[int, ...]) -> float:
        ends = (0, *cuts, 7)
        return max(sum(seconds[a:b]) for a, b in itertools.pairwise(ends))

    best = min(map(worst, itertools.combinations(range(1, 7), 3)))
    assert worst(made.plan.pipeline.cuts) == pytest.approx(best)
    forward = sum(e.end - e.start for e in made.trace.events if e.kind in ("FORWARD", "LOSS"))
    each = forward / made.plan.microbatches / 4
    assert made.plan.pipeline.costs[0] == pytest.approx(each, rel=1e-2)


def test_the_head_has_no_say_in_cuts_where_all_workers_have_rows_of_it():
    """Six blocks in the middle; the head takes as long as many of them."""
    config = config_of("llama, untied", num_hidden_layers=6, vocab_size=30_000)
    two = replace(WISH, mesh=Mesh(pipeline=2))
    whole = choose(config, two, HARDWARE).plan
    assert whole.pipeline.cuts == (7,) and whole.loss_chunk > 0
    for variant in (1, 2):
        made = choose(config, replace(two, pipeline=f"1f1b+vocabulary:{variant}"), HARDWARE)
        line = made.plan.pipeline
        assert line.cuts == (4,) and line.vocabulary == variant and made.plan.loss_chunk == 0
        # A schedule is made for the whole head's seconds, of which a worker has its part.
        passes = [e for e in made.trace.events if e.kind.startswith("OUTPUT") and not e.worker]
        took = sum(e.end - e.start for e in passes) / made.plan.microbatches
        assert sum(line.head) == pytest.approx(2 * took, rel=0.02)
        rows = 2 * 30_000 * config.hidden * 4
        static = [turn.static["parameters"] for turn in made.ranks]
        assert min(static) > rows / 2 and sum(static) < 1.2 * rows
    tight = replace(two, pipeline="1f1b+vocabulary:2", budget=round(0.97 * made.peak))
    assert choose(config, tight, HARDWARE).peak <= tight.budget


def test_a_run_that_goes_on_keeps_its_pipeline_or_has_another():
    plan = choose(CONFIG, WISH, HARDWARE).plan
    assert continued(plan, WISH, Sharding()) == plan
    other = continued(plan, replace(WISH, pipeline="zb-h1"), Sharding())
    assert other.pipeline == Pipelined("zb-h1") and other.microbatch_rows == plan.microbatch_rows
    rows = continued(plan, replace(WISH, pipeline="1f1b+vocabulary:1"), Sharding())
    assert rows.pipeline == Pipelined(vocabulary=1) and rows.loss_chunk == 0 < plan.loss_chunk
    assert continued(rows, WISH, Sharding()).pipeline == Pipelined()
    alone = continued(plan, replace(WISH, mesh=Mesh()), Sharding())
    assert alone.pipeline == Pipelined() and alone.mesh == Mesh()
    whole = replace(alone, microbatch_rows=64, order="layer")
    back = continued(whole, WISH, Sharding())
    assert back.microbatches == 8 and back.order == "microbatch"


def test_microbatches_that_leave_out_stages_go_on_as_they_were():
    request = replace(WISH, pipeline="skip-pipe", approximate=("partial-pipeline",))
    check(request, 7)
    plan = choose(CONFIG, request, HARDWARE).plan
    assert plan.pipeline.cuts[-1] < 6, "the head is with a block"
    assert continued(plan, request, Sharding()) == plan
    with pytest.raises(OutsizeError, match=r"keep mesh pipeline=4 and plan\.pipeline skip-pipe"):
        continued(plan, replace(request, mesh=Mesh(pipeline=3)), Sharding())
