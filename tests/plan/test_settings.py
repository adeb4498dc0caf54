"""Settings of plans that techniques add: passed on by name everywhere, named in their own file."""

from dataclasses import replace

import pytest

from outsize.collectives import Mesh
from outsize.errors import OutsizeError
from outsize.optim import AdamW
from outsize.plan import Pipelined, Plan, from_yaml, to_yaml
from outsize.plan.plan import per_segment
from outsize.plan.settings import PLAN_SETTINGS, Settings
from outsize.search.candidates import candidates
from outsize.search.pipeline_request import continued
from outsize.search.request import PlanRequest, Precision, Sharding
from outsize.train.config import check, config_of, leaves, may_change
from outsize.train.config import leaf as leaf_of

BLOCK = per_segment(5, ("block",))
SOME = (*BLOCK[:2], *per_segment(5)[2:])
CHUNKED = Plan(5, BLOCK, rows=4, sequence=16, sequence_chunk=4)
REQUEST = PlanRequest(4, 16, Precision(), AdamW())


def test_a_setting_is_a_keyword_an_attribute_and_a_key():
    assert CHUNKED.sequence_chunk == 4 and CHUNKED.overlap == 0
    assert Plan(5, BLOCK, rows=4, sequence=16, settings=CHUNKED.settings) == CHUNKED
    assert replace(CHUNKED, rows=5).sequence_chunk == 4
    assert replace(CHUNKED, sequence_chunk=0) == Plan(5, BLOCK, rows=4, sequence=16)
    assert from_yaml(to_yaml(CHUNKED)) == CHUNKED
    text = to_yaml(CHUNKED)
    assert "\nsequence_chunk: 4\n" in text and "\noverlap: 0\n" in text and "settings" not in text
    with pytest.raises(TypeError, match="sequence_chnk"):
        Plan(5, BLOCK, sequence_chnk=4)
    with pytest.raises(AttributeError, match="Plan has no 'sequence_chnk'"):
        CHUNKED.sequence_chnk  # noqa: B018
    for wrong, said in (
        ("sequence_chnk: 4", "unknown key; did you mean 'sequence_chunk'"),
        ("sequence_chunk: x", "sequence_chunk: 'x'; expected a whole number"),
        ("settings: {}", "settings: unknown key"),
    ):
        with pytest.raises(OutsizeError, match=said):
            from_yaml(f"{text}{wrong}\n".replace("\nsequence_chunk: 4\n", "\n"))


def test_a_run_has_a_key_for_each():
    for name, one in PLAN_SETTINGS.items():
        if not one.run:
            assert leaf_of(f"plan.{name}") is None
            continue
        leaf = leaves()[f"plan.{name}"]
        assert leaf.meaning == one.meaning
        assert leaf.default == (None if one.tighter or one.quicker else 0)
        assert may_change(f"plan.{name}") != one.sums
        with pytest.raises(OutsizeError, match=f"plan.{name}: -1; expected at least 0"):
            check(f"plan.{name}", -1, "run.yaml")
    assert not may_change("sequence_chunk") and "plan.settings" not in leaves()
    assert config_of({"plan.overlap": 0}) != config_of({})  # the planner has no choice
    assert config_of({"plan.sequence_chunk": 0}).plan.settings == Settings((("sequence_chunk", 0),))


def test_what_goes_on_keeps_the_order_of_sums_alone():
    request = replace(REQUEST, mesh=Mesh(tensor=2), overlap=3)
    made = continued(replace(CHUNKED, mesh=Mesh(tensor=2), overlap=2), request, Sharding())
    assert (made.sequence_chunk, made.overlap) == (4, 3)


def test_the_planner_leaves_what_is_said():
    long = replace(REQUEST, rows=1, sequence=1024)
    assert {plan.sequence_chunk for plan in candidates(long, 5)} == {0, 64, 128}
    assert {plan.sequence_chunk for plan in candidates(replace(long, sequence_chunk=0), 5)} == {0}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"sequence_parallel": True, "mesh": Mesh(tensor=2), "stages": SOME},
            "some blocks are not recomputed whole",
        ),
        ({"mesh": Mesh(context=2, expert=2)}, "cuts the tokens of rows and another"),
        (
            {"mesh": Mesh(pipeline=2), "pipeline": Pipelined("zb-h1")},
            "takes the gradients of weights later",
        ),
        ({"approximate": ("local-learning",)}, "both change how a stage runs"),
    ],
)
def test_what_does_not_go_with_chunks_is_refused(changes, said):
    with pytest.raises(OutsizeError, match=said) as caught:
        replace(CHUNKED, **changes)
    assert "sequence_chunk" in str(caught.value) and "\n" not in str(caught.value)
