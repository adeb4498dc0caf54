"""A Plan refuses what cannot be carried out, naming field, value and expectation."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from outsize.errors import OutsizeError
from outsize.plan import Plan, Precision, Stage, explain
from outsize.plan.plan import per_segment

GOOD = Plan(5, per_segment(5), rows=7, microbatch_rows=2, sequence=16)

REFUSED = {
    "segments": (dict(segments=0, stages=()), "segments is 0; expected 1 or more"),
    "rows": (dict(rows=0), "rows is 0; expected 1 or more"),
    "microbatch_rows": (dict(microbatch_rows=-2), "microbatch_rows is -2; expected 1 or more"),
    "sequence": (dict(sequence=-1), "sequence is -1; expected 0 or more"),
    "loss_chunk": (dict(loss_chunk=-5), "loss_chunk is -5; expected 0 or more"),
    "mlp_tile": (dict(mlp_tile=-1), "mlp_tile is -1; expected 0 or more"),
    "sequence_chunk": (dict(sequence_chunk=-1), "sequence_chunk is -1; expected 0 or more"),
    "chunks of nothing": (
        dict(sequence_chunk=64),
        r"sequence_chunk is 64, but no stage has recompute \[block\]",
    ),
    "chunks kept": (
        dict(sequence_chunk=64, split_backward=True, stages=per_segment(5, ("block",))),
        "sequence_chunk is 64, and split_backward is set; .* would hold every chunk",
    ),
    "budget": (dict(budget=0), "budget is 0; expected 1 or more"),
    "a gap": (
        dict(stages=(Stage(0, 2), Stage(3, 5))),
        r"stage 1 holds segments \[3, 5\); expected it to begin at 2",
    ),
    "an overlap": (
        dict(stages=(Stage(0, 3), Stage(2, 5))),
        r"stage 1 holds segments \[2, 5\); expected it to begin at 3",
    ),
    "an empty stage": (
        dict(stages=(Stage(0, 2), Stage(2, 2), Stage(2, 5))),
        r"stage 1 holds segments \[2, 2\); expected it to begin at 2 and to hold one at least",
    ),
    "too few": (dict(stages=per_segment(4)), "stages cover 4 segments of 5; every segment"),
    "too many": (dict(stages=per_segment(6)), "stages cover 6 segments of 5; every segment"),
    "none": (dict(stages=()), "stages cover 0 segments of 5"),
    "the prologue again": (
        dict(stages=(Stage(0, 2, ("block",)), Stage(2, 5))),
        r"stage 0 recomputes the model's prologue or epilogue; .* set its recompute to \[\]",
    ),
    "the epilogue again": (
        dict(stages=(Stage(0, 4), Stage(4, 5, ("block",)))),
        "stage 1 recomputes the model's prologue or epilogue",
    ),
    "approximate": (
        dict(approximate=("bfloat16-wieghts",)),
        "approximate holds 'bfloat16-wieghts'; did you mean 'bfloat16-weights'",
    ),
    "no master": (
        dict(precision=Precision("bfloat16")),
        "without a master copy loses updates .* set precision.master to float32, or name",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    changes, message = REFUSED[name]
    with pytest.raises(OutsizeError, match=message) as caught:
        replace(GOOD, **changes)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("plan: ")


def test_bfloat16_without_a_master_is_taken_when_it_is_named():
    plan = replace(GOOD, precision=Precision("bfloat16"), approximate=("bfloat16-weights",))
    assert ("approximate", "bfloat16-weights", "changes the maths, as asked") in explain(plan)


@pytest.mark.parametrize(("rows", "size"), [(7, 2), (6, 2), (1, 1), (3, 5), (8, 8)])
def test_microbatches_cover_every_row_once(rows, size):
    plan = replace(GOOD, rows=rows, microbatch_rows=size)
    spans = [plan.rows_of(m) for m in range(plan.microbatches)]
    assert [row for start, stop in spans for row in range(start, stop)] == list(range(rows))
    assert all(0 < stop - start <= size for start, stop in spans)


def test_named_precisions():
    assert Precision.named("float64") == Precision("float64", None, "float64", "float64")
    assert Precision.named("float32") == Precision("float32", None, "float32", "float32")
    assert Precision.named("bfloat16") == Precision("bfloat16", "float32", "float32", "float32")
    with pytest.raises(OutsizeError, match="'bfloat61' is not known; did you mean 'bfloat16'"):
        Precision.named("bfloat61")


def test_a_stage_a_segment():
    stages = per_segment(4, ("mlp",))
    assert stages == (Stage(0, 1), Stage(1, 2, ("mlp",)), Stage(2, 3, ("mlp",)), Stage(3, 4))
    assert not any(stage.whole for stage in stages)
    assert [s.whole for s in per_segment(4, ("block",))] == [False, True, True, False]


def test_a_plan_is_frozen():
    with pytest.raises(FrozenInstanceError):
        GOOD.rows = 3


def rows_of(plan):
    return {what: (value, meaning) for what, value, meaning in explain(plan)}


def test_explanations_state_what_the_plan_does():
    plain = rows_of(GOOD)
    assert plain["microbatches"] == ("4", "7 rows a step, 2 at a time; gradients add up")
    # AdamW in float32: parameter, gradient, two moments of 4 bytes each.
    assert "16 bytes a parameter" in plain["precision"][1]
    assert plain["recompute"][0] == "nothing" and plain["loss chunk"][0] == "all"
    assert "budget" not in plain and "split backward" not in plain

    full = rows_of(
        replace(
            GOOD, precision=Precision.named("bfloat16"), loss_chunk=1024, mlp_tile=64,
            split_backward=True, budget=2**30,
            stages=(Stage(0, 1), Stage(1, 3, ("block",)), Stage(3, 4, ("attention", "mlp")),
                    Stage(4, 5)),
        )
    )  # fmt: skip
    # bfloat16 parameter 2, fp32 gradient, master and two moments 16.
    assert "18 bytes a parameter" in full["precision"][1]
    assert full["precision"][0] == "bfloat16" and "master float32" in full["precision"][1]
    assert full["recompute"][0] == "block of 2 blocks, attention+mlp of 1 block"
    assert full["loss chunk"][0] == "1,024" and full["MLP tile"][0] == "64"
    assert full["budget"][0] == "1,073,741,824 bytes" and full["split backward"][0] == "yes"


def test_a_part_is_computed_again_or_spilled_not_both():
    with pytest.raises(OutsizeError, match="'mlp' in recompute and in spill"):
        Plan(1, (Stage(0, 1, ("mlp",), spill=("attention", "mlp")),))
