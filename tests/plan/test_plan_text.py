"""Plans as YAML: what is written is read back, what is not known is refused with its place."""

from __future__ import annotations

import copy
import itertools

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from outsize.collectives import Mesh
from outsize.errors import OutsizeError
from outsize.plan import Pipelined, Plan, Precision, Stage, explain, from_yaml, to_yaml
from outsize.plan.plan import DTYPES, per_segment
from outsize.plan.spread import pipelined

PARTS = st.lists(st.sampled_from(["attention", "mlp", "mlp.gate"]), max_size=3).map(tuple)


@st.composite
def stages(draw, segments: int):
    cuts = draw(st.sets(st.integers(1, segments - 1)))
    edges = sorted({0, segments, *cuts})
    made = []
    for first, last in itertools.pairwise(edges):
        inner = first > 0 and last < segments
        recompute = draw(st.one_of(PARTS, st.just(("block",)))) if inner else draw(PARTS)
        made.append(Stage(first, last, recompute))
    return tuple(made)


@st.composite
def plans(draw):
    segments = draw(st.integers(2, 9))
    master = draw(st.sampled_from([None, "float32"]))
    precision = Precision(
        draw(st.sampled_from(DTYPES)), master, draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from(DTYPES)),
    )  # fmt: skip
    count = st.integers(0, 2**40)
    cuts = st.sets(st.integers(1, 99)).map(lambda found: tuple(sorted(found)))
    seconds = st.tuples(*[st.floats(1e-6, 1e3)] * 3)
    cut, split = draw(stages(segments)), draw(st.booleans())
    chunks = any(stage.whole for stage in cut) and not split
    return Plan(
        segments=segments,
        stages=cut,
        sequence_chunk=draw(count) if chunks else 0,
        rows=draw(st.integers(1, 1000)),
        microbatch_rows=draw(st.integers(1, 1000)),
        sequence=draw(count),
        precision=precision,
        loss_chunk=draw(count),
        mlp_tile=draw(count),
        split_backward=split,
        pipeline=Pipelined(
            draw(st.sampled_from(["1f1b", "hanayo:2"])),
            draw(cuts),
            draw(seconds),
            draw(st.sampled_from([0, 1, 2])),
            draw(seconds),
        ),
        budget=draw(st.one_of(st.none(), st.integers(1, 2**50))),
        approximate=("bfloat16-weights",),
    )


@given(plans())
def test_what_is_written_is_read_back(plan):
    text = to_yaml(plan)
    assert from_yaml(text) == plan
    assert to_yaml(from_yaml(text)) == text
    assert yaml.safe_load(text)["rows"] == plan.rows, "any YAML reader can read it"


GOOD = yaml.safe_load(to_yaml(Plan(3, per_segment(3), rows=4)))


def edited(path: str, value) -> str:
    """The good plan with one key set to a value."""
    data = copy.deepcopy(GOOD)
    *outer, key = (int(step) if step.isdigit() else step for step in path.split("."))
    place = data
    for step in outer:
        place = place[step]
    place[key] = value
    return yaml.safe_dump(data)


REFUSED = [
    ("microbatch_row", 1, "plan: microbatch_row: unknown key; did you mean 'microbatch_rows'"),
    ("precision.compte", "float32", "precision.compte: unknown key; did you mean 'compute'"),
    ("stages.1.frist", 1, r"stages\[1\].frist: unknown key; did you mean 'first'"),
    ("rows", "many", "plan: rows: 'many'; expected a whole number"),
    ("rows", 2.5, "rows: 2.5; expected a whole number"),
    ("rows", True, "rows: True; expected a whole number"),
    ("rows", None, "rows: None; expected a whole number"),
    ("rows", [4], r"rows: \[4\]; expected a whole number"),
    ("budget", "2GiB", "budget: '2GiB'; expected a whole number"),
    ("split_backward", "yes please", "split_backward: 'yes please'; expected true or false"),
    ("split_backward", 1, "split_backward: 1; expected true or false"),
    ("stages", 3, "stages: 3; expected a list"),
    ("stages.0", 7, r"stages\[0\]: 7; expected a mapping of first, last, recompute"),
    ("stages.0.recompute", "mlp", r"stages\[0\].recompute: 'mlp'; expected a list, each text"),
    ("stages.1.recompute", [1], r"stages\[1\].recompute\[0\]: 1; expected text"),
    ("precision", "bfloat16", "precision: 'bfloat16'; expected a mapping of compute, master"),
    ("precision.compute", "fp32", "precision.compute: 'fp32'; expected one of float64, float32"),
    ("precision.master", "int8", "precision.master: 'int8'; expected one of float64"),
    ("pipeline", "1f1b", "pipeline: '1f1b'; expected a mapping of schedule, cuts, costs"),
    ("pipeline.cuts", [2, 1], r"pipeline.cuts is \[2, 1\]; expected rising numbers from 1 on"),
    ("pipeline.cuts", [0], r"pipeline.cuts is \[0\]; expected rising numbers from 1 on"),
    ("pipeline.costs", [1, 0, 1], "pipeline.costs is .*; expected positive seconds"),
    ("pipeline.vocabulary", 3, r"pipeline.vocabulary is 3; expected 0 \(whole layers\)"),
    ("pipeline.head", [1, 0, 1], "pipeline.head is .*; expected positive seconds"),
    ("pipeline.costs", [1, 1], r"pipeline.costs: \[1, 1\]; expected a list of 3, each a number"),
    ("rows", 0, "plan: rows is 0; expected 1 or more"),
]


@pytest.mark.parametrize(("path", "value", "message"), REFUSED)
def test_what_is_refused(path, value, message):
    with pytest.raises(OutsizeError, match=message) as caught:
        from_yaml(edited(path, value))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["segments", "stages"])
def test_what_is_missing_is_named(key):
    data = {k: v for k, v in GOOD.items() if k != key}
    with pytest.raises(OutsizeError, match=f"plan: {key}: missing; expected"):
        from_yaml(yaml.safe_dump(data))


def test_defaults_may_be_left_out():
    text = "{segments: 2, stages: [{first: 0, last: 1}, {first: 1, last: 2}]}"
    assert from_yaml(text) == Plan(2, per_segment(2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows: [", "plan: not YAML"),
        ("- 1", r"plan: \[1\]; expected a mapping of segments, stages"),
        ("", "plan: None; expected a mapping"),
        ("rows: 1\nrows: 2\n", "not YAML: .*key 'rows' occurs twice"),
        ("!!python/object/apply:os.system ['true']", "not YAML"),
    ],
)
def test_what_is_no_plan_at_all(text, message):
    with pytest.raises(OutsizeError, match=message):
        from_yaml(text)


@pytest.mark.parametrize("variant", [1, 2])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved:2"])
def test_a_pipeline_is_read_as_people_write_it(schedule, variant):
    text = f"{schedule}+vocabulary:{variant}"
    assert pipelined(text) == Pipelined(schedule, vocabulary=variant)
    assert pipelined(text).said == text and pipelined(schedule).said == schedule
    plan = Plan(2, per_segment(2), mesh=Mesh(pipeline=2), pipeline=pipelined(text))
    assert [value for what, value, _ in explain(plan) if what == "vocabulary"] == [
        f"variant {variant}"
    ]


@pytest.mark.parametrize("text", ["1f1b+vocabulary", "1f1b+", "1f1b+vocabulary:0", "+tables:1"])
def test_what_is_no_pipeline(text):
    with pytest.raises(OutsizeError, match=r"expected a schedule, or one with \+vocabulary:1 or"):
        pipelined(text)
