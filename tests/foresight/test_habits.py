"""What trainers' habits change in a forecast, against counts by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from outsize.foresight.layout import Layout, Stack
from outsize.foresight.memory import kept_by, memory, workers
from outsize.foresight.runs import source_named
from outsize.foresight.shape import Shape
from outsize.foresight.sources import Roofline
from outsize.foresight.step import combine, held, layers_at, layers_on, terms
from outsize.foresight.work import CAST
from outsize.hardware import catalogue, parse_spec
from outsize.hardware.cluster import FAR

MEGATRON = Stack("megatron", family="megatron")
LLAMA = Shape(60, 6656, 52, 128000, inner=17920, gated=True, tied=False)
ROUTED = Shape(
    8, 2048, 16, 32000, gated=True, tied=False, experts=8, active=2, expert_inner=1024, groups=4
)
H100 = parse_spec("8 x H100-SXM")


def layout(**more: Any) -> Layout:
    base: dict[str, Any] = {
        "devices": 8, "rows": 4, "batch": 32, "sequence": 2048, "stack": MEGATRON,
    }  # fmt: skip
    return Layout(**(base | more))


def best(weights: list[float], stages: int) -> float:
    """The least weight of the heaviest of so many runs of neighbours, by trying all."""
    if stages == 1:
        return sum(weights)
    ends = range(1, len(weights) - stages + 2)
    return min(max(sum(weights[:end]), best(weights[end:], stages - 1)) for end in ends)


@pytest.mark.parametrize(("layers", "stages"), [(12, 2), (13, 2), (12, 3), (13, 4), (14, 5)])
def test_stages_that_are_cut_by_parameters_have_the_least_heaviest(
    layers: int, stages: int
) -> None:
    """The embedding and the output are items of a pipeline as layers are."""
    shape = replace(LLAMA, layers=layers)
    lay = layout(pipeline=stages, devices=stages, stack=replace(MEGATRON, balanced=True))
    places = [layers_at(shape, lay, place) for place in range(stages)]
    assert sum(places) == layers
    mine = [n + shape.end * (place in (0, stages - 1)) for place, n in enumerate(places)]
    assert max(mine) == pytest.approx(best([shape.end, *[1.0] * layers, shape.end], stages))
    assert layers_on(shape, lay) == (max(places[1:-1] or places[:1]), places[-1])


def test_a_stage_that_is_cut_by_parameters_holds_its_own() -> None:
    """16 stages: two layers and an embedding, four layers, two layers and the output."""
    lay = layout(pipeline=16, devices=16, stack=replace(MEGATRON, balanced=True))
    assert [layers_at(LLAMA, lay, place) for place in (0, 1, 14, 15)] == [2, 4, 4, 2]
    layer = (LLAMA.parameters - 2 * LLAMA.of_vocabulary) / 60
    assert held(LLAMA, lay)[0] == pytest.approx(2 * layer + LLAMA.of_vocabulary, rel=1e-4)
    assert held(LLAMA, lay, ends=False)[0] == pytest.approx(4 * layer, rel=1e-4)
    first, second = (made.states["weights"] for made in list(workers(LLAMA, lay).values())[:2])
    assert first == pytest.approx(2 * (2 * layer + LLAMA.of_vocabulary), rel=1e-4)
    assert second == pytest.approx(2 * 4 * layer, rel=1e-4)
    assert memory(LLAMA, lay).states["weights"] == second > first
    few = layout(pipeline=16, devices=16)
    assert layers_on(LLAMA, few) == (4, 3)


def test_products_of_experts_may_gate_and_cast_what_they_give() -> None:
    """Left is the cast of what comes in and of the gradient that does; gates pass no memory."""
    asked = {"expert": 8, "precision": "mxfp8"}
    cluster = parse_spec("8 x B200-SXM")
    apart, joined = (
        terms(ROUTED, layout(**asked, stack=replace(MEGATRON, joined=joined)), cluster).last
        for joined in (False, True)
    )
    source = Roofline(catalogue("B200-SXM").devices[0])
    tokens = 8 * 4 * 2048 * 2 / 8  # copies that come to a worker, of eight workers
    gate = 3 * source.traffic(2 * 3.0 * 1024 * tokens).seconds
    cast = source.traffic(CAST * tokens * 4 * 1024).seconds
    assert apart["traffic"] - joined["traffic"] == pytest.approx(8 * gate)
    assert apart["cast"] - joined["cast"] == pytest.approx(8 * cast)
    assert apart["narrow"] == joined["narrow"]


def test_experts_alone_may_be_computed_again() -> None:
    """Their products once more and their tokens sent twice more, attention as it was."""
    none, experts, full = (
        layout(expert=8, recompute=again) for again in ("none", "experts", "full")
    )
    plain, again, whole = (terms(ROUTED, lay, H100).last for lay in (none, experts, full))
    assert again["attention"] == plain["attention"] < whole["attention"]
    assert again["exchange"] == pytest.approx(1.5 * plain["exchange"]) == whole["exchange"]
    assert plain["matmul"] < again["matmul"] < whole["matmul"]
    sent = 4 * 2048 * 2 * (4 * 2048 + 6 * 1024)
    assert kept_by(ROUTED, none, 8) - kept_by(ROUTED, experts, 8) == pytest.approx(8 * sent)


def test_exchanges_that_are_woven_into_other_microbatches_hide_better() -> None:
    plain, woven = (
        combine(terms(ROUTED, layout(expert=8, stack=replace(MEGATRON, woven=woven)), H100)).total
        for woven in (False, True)
    )
    of = terms(ROUTED, layout(expert=8), H100).last
    assert woven < plain < woven + 4 * of["exchange"]


def test_some_layers_may_stay_in_16_bits() -> None:
    """A fourth of them has its products there, and no casts."""
    narrow = layout(expert=8, precision="fp8")
    lanes, some, bf16 = (
        terms(ROUTED, lay, H100).last
        for lay in (narrow, replace(narrow, wide=2), replace(narrow, precision="bf16", wide=2))
    )
    for lane in ("narrow", "cast"):
        assert some[lane] == pytest.approx(lanes[lane] * 3 / 4)
    head = lanes["matmul"]
    assert some["matmul"] == pytest.approx(head + (bf16["matmul"] - head) / 4)


def test_deepspeeds_pipelines_send_a_part_of_the_tensor_axis_each() -> None:
    """PipelineEngine.is_pipe_partitioned: with a tensor axis its workers send a part each."""
    stack = source_named("BigScience BLOOM-176B").stack
    cluster = parse_spec("4 x 8 A100-SXM-80 @ 25GB/s")
    asked = {"devices": 32, "pipeline": 4, "batch": 64, "attention": "fused"}
    sends = [
        terms(LLAMA, layout(**asked, tensor=t, stack=stack), cluster).last["stages"] - 2 * FAR
        for t in (1, 2, 4, 8)
    ]
    assert all(more == pytest.approx(2 * less) for more, less in pairwise(sends))
