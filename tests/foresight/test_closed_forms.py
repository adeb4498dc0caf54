"""Foresight against closed forms worked out by hand and against the package's own simulator."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from outsize.collectives import Mesh
from outsize.errors import OutsizeError
from outsize.foresight.conventions import COUNTS
from outsize.foresight.layout import Layout, Stack
from outsize.foresight.links import FLAG, HOP, exchange, ranks, seconds
from outsize.foresight.memory import kept_by, memory
from outsize.foresight.planning.layouts import WIDE
from outsize.foresight.shape import Latent, Shape
from outsize.foresight.sources import Roofline, Table, systolic, tiled
from outsize.foresight.step import LANES, Terms, beat, combine, layers_of, layers_on, terms
from outsize.foresight.work import BLOCKED, KERNELS, LAUNCH, MERGED, OF_EXPERT, ROUTED
from outsize.hardware import Matmul, Measured, Rate, catalogue, parse_spec
from outsize.hardware.cluster import FAR, NEAR
from outsize.models.families import parse
from outsize.optim import AdamW
from outsize.plan import Plan, Precision
from outsize.plan.plan import per_segment
from outsize.schedule.pipelines import Shape as PipelineShape
from outsize.schedule.pipelines import make
from outsize.search import PlanRequest
from outsize.search.request import Forecaster, facts_of_model
from outsize.simulate.coarse import Times, play
from outsize.simulate.forecast import compose

A100 = parse_spec("4 x 8 A100-SXM-80 @ 25GB/s").groups[0]
GPT = Shape(layers=48, hidden=6144, heads=64, vocab=51200, dropout=True)
MEGATRON = Stack("megatron", attention="fused", family="megatron")
LONG = 2048  # tokens of a row
LLAMA = Shape(80, 8192, 64, 128256, inner=28672, groups=8, gated=True, tied=False)


def layout(**more: Any) -> Layout:
    base: dict[str, Any] = {
        "devices": 8, "rows": 4, "batch": 4, "sequence": 2048, "stack": MEGATRON, "tensor": 8,
        "attention": "fused",
    }  # fmt: skip
    return Layout(**(base | more))


# -- collectives -----------------------------------------------------------------------------------


def test_all_reduce_in_a_node_is_a_ring() -> None:
    """2 (g - 1) / g of the bytes over 300 GB/s, and the waits of 14 steps and one message."""
    size = 1 << 30
    expected = 2 * 7 / 8 * size / 300e9 + 2 * 7 * NEAR * FLAG + NEAR
    assert seconds("all_reduce", size, ranks(8, 1, 8), A100) == pytest.approx(expected, rel=1e-12)


def test_a_group_over_nodes_uses_the_adapters_of_all_its_ranks() -> None:
    """32 ranks on 4 nodes share eight adapters of 25 GB/s each; 4 ranks with stride 8 have one."""
    size = 8 << 30
    wide = 31 / 32 * size / 200e9
    waits = 28 * NEAR * FLAG + NEAR + 3 * FAR * HOP
    assert seconds("gather", size, ranks(32, 1, 8), A100) == pytest.approx(wide + waits, rel=1e-12)
    thin = 3 / 4 * size / 25e9 + NEAR + 3 * FAR * HOP
    assert seconds("gather", size, ranks(4, 8, 8), A100) == pytest.approx(thin, rel=1e-12)


def test_small_messages_take_a_tree_and_rings_wait_for_every_call() -> None:
    large = parse_spec("128 x 8 A100-SXM-80 @ 25GB/s").groups[0]
    group = ranks(1024, 1, 8)
    assert seconds("all_reduce", 1024, group, large) < seconds("gather", 1024, group, large)
    once = seconds("gather", 1 << 30, group, large)
    twice = seconds("gather", 1 << 30, group, large, calls=2)
    assert twice - once == pytest.approx(896 * NEAR * FLAG + NEAR + 127 * FAR * HOP)


def test_exchanges_and_sends() -> None:
    """Of 16 ranks, half on each of two nodes: half of the tokens leave, over one adapter each; of
    two copies of each one of four stays at home, so that three quarters leave, once."""
    expected = 0.5 * 1e9 / 25e9 + FAR
    assert exchange(1e9, 1, ranks(16, 1, 8), A100) == pytest.approx(expected)
    assert exchange(1e9, 2, ranks(16, 1, 8), A100) == pytest.approx(0.75 * 1e9 / 25e9 + FAR)
    assert exchange(1e9, 2, ranks(8, 1, 8), A100) == pytest.approx(2 * 7 / 8 * 1e9 / 300e9 + NEAR)
    assert seconds("send", 1e9, ranks(2, 16, 8), A100) == pytest.approx(1e9 / 25e9 + FAR)
    assert seconds("send", 1e9, ranks(1, 1, 8), A100) == 0.0


def test_a_pipeline_within_a_node_sends_over_its_border_to_the_next_one() -> None:
    """16 stages of a device each: one of 15 borders is between nodes. Chunks hide what is sent."""
    cluster = parse_spec("2 x 8 A100-SXM-80 @ 25GB/s")
    lay = layout(devices=16, tensor=1, pipeline=16, batch=64)
    sent = 4 * 2048 * GPT.hidden * 2
    far, near = (2 * seconds("send", sent, ranks(2, each, 8), A100) for each in (8, 1))
    made = terms(GPT, lay, cluster)
    assert made.middle["stages"] == pytest.approx(far) and far > 5 * near
    assert made.spare == pytest.approx(14 * (far - near))
    chunks = terms(GPT, replace(lay, chunks=3), cluster)
    assert "stages" not in chunks.middle and chunks.spare == 0.0
    assert chunks.middle["passed"] == pytest.approx(3 * far)


@pytest.mark.parametrize("how", ["cut", "interlaced"])
def test_a_vocabulary_over_all_stages_says_what_its_ends_need(how: Any) -> None:
    """Vocabulary passes have it beside them and wait two beats for two barriers; interlaced ones
    wait for sums to all, and half a pipeline of beats. A stage keeps as many microbatches more."""
    cluster = parse_spec("2 x 8 A100-SXM-80 @ 25GB/s")
    own = layout(devices=16, tensor=1, pipeline=16, batch=64)
    last, made = (terms(GPT, replace(own, vocabulary=v), cluster) for v in ("last", how))
    size, group = 4 * 2048 * GPT.hidden * 2, ranks(16, 1, 8)
    sums: Any = "scatter" if how == "cut" else "all_reduce"
    said = 2 * sum(seconds(each, size, group, A100) for each in ("gather", sums))
    if how == "cut":
        assert made.middle["passed"] == pytest.approx(said)
        assert made.middle["stages"] == last.middle["stages"]
    else:
        assert made.middle["stages"] - last.middle["stages"] == pytest.approx(said)
        assert "passed" not in made.middle
    later = {"cut": 2, "interlaced": 8}[how]
    assert made.slots == last.slots + later == 16 * 4 + later - 48
    many = replace(own, batch=4096)
    whole = [memory(GPT, replace(many, vocabulary=v)).activations for v in ("last", how)]
    assert whole[1] / whole[0] == pytest.approx((16 + later) / 16)


def test_sums_of_a_backward_pass_go_on_beside_products_of_weights() -> None:
    """Of six sums of a layer that is computed again two, of 14 gathers and scatters four."""
    cluster = parse_spec("8 x A100-SXM-80")
    for more, hidden, whole in (({}, 2, 6), ({"sequence_parallel": True}, 4, 14)):
        lay = layout(recompute="full", **more)
        held = replace(lay, stack=replace(MEGATRON, behind=True))
        before, after = (terms(GPT, each, cluster).last for each in (lay, held))
        assert after["passed"] == pytest.approx(before["tensor"] * hidden / whole)
        assert after["passed"] + after["tensor"] == pytest.approx(before["tensor"])


# -- products --------------------------------------------------------------------------------------


def test_waves_of_tiles() -> None:
    """108 tiles of 256 x 128 fill an A100 once; one tile more starts a wave almost idle."""
    assert tiled(256 * 12, 128 * 9, 108) == pytest.approx(1.0)
    assert tiled(256 * 109, 128, 108) < 0.96
    assert tiled(100, 100, 0) == pytest.approx(0.88 * 1e4 / 128**2)


@pytest.mark.parametrize(
    ("device", "dtype", "cores", "peak"),
    [("A100-SXM-80", "bf16", 108, 312e12), ("H100-SXM", "fp8", 132, 1979e12),
     ("B200-SXM", "bf16", 148, 2250e12)],
)  # fmt: skip
def test_a_tile_begins_and_ends_as_slowly_on_a_faster_core(
    device: str, dtype: str, cores: int, peak: float
) -> None:
    """Whole waves: what a product takes beyond its operations is the same wait for each tile."""
    source = Roofline(catalogue(device).devices[0])
    m, n, waves = 256 * cores, 128 * 8, 8
    for k in (1024, 8192):
        wait = source.product(m, n, k, dtype).seconds - 2.0 * m * n * k / peak
        assert wait / waves == pytest.approx(2 * 256 * 128 * 64 / (312e12 / 108))


def test_sizes_that_are_no_whole_lines_are_slower() -> None:
    """BLOOM's hidden size of 14,400 on eight workers is 1,800, a multiple of 8 and not of 16."""
    source = Roofline(A100.device)
    whole, half = (source.product(4096, 14336, k, "bf16").seconds / k for k in (1792, 1800))
    assert half / whole == pytest.approx(1 / 0.8, rel=2e-3)
    assert source.product(4096, 4096, 1801, "bf16").seconds > 1.9 * 1801 / 1792 * (
        source.product(4096, 4096, 1792, "bf16").seconds
    )


def test_systolic_array() -> None:
    """Weights fill the cells where sizes are whole multiples; rows enter and leave in 2 a - 2."""
    assert systolic(1024, 256, 256, 128) == pytest.approx(1024 / (1024 + 254))
    assert systolic(1024, 64, 128, 128) == pytest.approx(0.5 * 1024 / (1024 + 254))


def test_a_table_goes_before_the_roofline_near_its_shapes() -> None:
    (device,) = catalogue("H100-SXM").devices
    rate = Rate(5e14, "FLOP/s", "test", "2026-11-26")
    known = replace(device, measured=Measured((Matmul(4096, 4096, 4096, "bf16", rate),)))
    table = Table(known, Roofline(known))
    made = table.product(4096, 4096, 4096, "bf16")
    assert made.seconds == pytest.approx(2 * 4096**3 / 5e14) and "measured" in made.source
    far = table.product(64, 64, 64, "bf16")
    assert far == Roofline(known).product(64, 64, 64, "bf16")
    assert far.low <= far.seconds <= far.high


def test_a_dtype_that_a_device_lacks_is_refused() -> None:
    (device,) = catalogue("A100-SXM-80").devices
    assert Roofline(device).peak("fp16") == Roofline(device).peak("bf16")
    with pytest.raises(OutsizeError, match="no rate in fp8; it has bf16"):
        Roofline(device).product(64, 64, 64, "fp8")


# -- pipelines -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("devices", "microbatches", "chunks"), [(4, 8, 1), (2, 6, 1), (4, 8, 2)])
def test_beats_and_fill_are_what_the_simulator_plays(
    devices: int, microbatches: int, chunks: int
) -> None:
    name = "1f1b" if chunks == 1 else "interleaved"
    shape = PipelineShape(devices, microbatches, chunks=chunks if chunks > 1 else None)
    played = play(make(name, shape), Times(1.0, 1.0, 1.0))
    makespan = max(event.end for event in played.trace().events)
    made = combine(_terms(3.0, 3.0, microbatches, devices, chunks)).total
    assert made == pytest.approx(makespan, rel=1e-6)


def test_a_slow_last_stage_sets_the_beat() -> None:
    stages = (1.0, 1.0, 1.0, 1.5)
    played = play(make("1f1b", PipelineShape(4, 16)), Times(1.0, 1.0, 1.0, stages=stages))
    makespan = max(event.end for event in played.trace().events)
    made = combine(_terms(3.0, 4.5, 16, 4, 1)).total
    assert made == pytest.approx(makespan, rel=0.02)


def _terms(middle: float, last: float, slots: int, stages: int, chunks: int) -> Terms:
    lanes = dict.fromkeys(LANES, 0.0)
    of = [{**lanes, "matmul": value} for value in (middle, last)]
    return Terms(of[0], of[1], {"sums": 0.0, "update": 0.0}, slots, stages, chunks, 1, 0.0)


def test_sums_of_interleaved_chunks_go_on_beside_a_round_of_microbatches() -> None:
    """Two stages of four chunks: three of four chunks have their sums two beats before the end;
    parameters that were updated in parts come back beside the forward pass as well."""
    cluster = parse_spec("4 x 8 A100-SXM-80 @ 25GB/s")
    shape = {"tensor": 8, "devices": 32, "pipeline": 2, "batch": 64}
    torch, apart = replace(MEGATRON, family="torch"), replace(MEGATRON, beside_data=False)
    windows = [
        terms(GPT, layout(**shape, chunks=chunks, stack=stack, states=states), cluster).window
        for chunks, stack, states in (
            (4, MEGATRON, 2), (1, MEGATRON, 2), (1, MEGATRON, 1), (4, torch, 2), (4, apart, 2)
        )
    ]  # fmt: skip
    assert windows == pytest.approx([1.5, 1.0, 2 / 3, 1.0, 0.0])


@pytest.mark.parametrize(("again", "part"), [("full", 1.0), ("half", 0.5)])
def test_computing_again_may_stop_at_the_last_tensor_that_a_gradient_needs(
    again: Any, part: float
) -> None:
    """PyTorch's checkpoints since 2.1: all products of a block but the one that ends it."""
    cluster = parse_spec("A100-SXM-80")
    asked = {"devices": 1, "tensor": 1, "recompute": again}
    stacks = (MEGATRON, replace(MEGATRON, stops=True))
    whole, less = (terms(GPT, layout(**asked, stack=s), cluster).last["matmul"] for s in stacks)
    source = Roofline(catalogue("A100-SXM-80").devices[0])
    last = source.product(4 * 2048, GPT.hidden, 4 * GPT.hidden, "bf16").seconds
    assert whole - less == pytest.approx(GPT.layers * part * last)


def test_parameters_gathered_one_by_one_wait_for_every_call() -> None:
    """ZeRO-3 as it began: twelve calls a layer, forward, back and for gradients, beside nothing."""
    cluster = parse_spec("4 x 8 A100-SXM-80 @ 25GB/s")
    many = replace(MEGATRON, calls=12, prefetched=False)
    asked = {"tensor": 1, "devices": 32, "batch": 32, "rows": 1, "shards": 32, "states": 32}
    one, other = (terms(GPT, layout(**asked, stack=s), cluster).last for s in (MEGATRON, many))
    wait = 28 * NEAR * FLAG + NEAR + 3 * FAR * HOP
    more = 11 * 3 * GPT.layers * wait
    assert other["waited"] == pytest.approx(one["gathers"] + more) and "gathers" not in other
    assert beat(_zeros() | other) > beat(_zeros() | one) + more


def test_kernels_that_the_processor_waits_for_are_added() -> None:
    """CUDA_LAUNCH_BLOCKING: kernels of a layer, forward and twice back, for every microbatch."""
    cluster = parse_spec("A100-SXM-80")
    asked = {"devices": 1, "tensor": 1, "rows": 1}
    held = replace(MEGATRON, blocking=True)
    free, slow = (terms(GPT, layout(**asked, stack=s), cluster).last for s in (MEGATRON, held))
    expected = GPT.layers * 3 * KERNELS * BLOCKED
    assert slow["blocked"] == pytest.approx(expected) and "blocked" not in free
    assert beat(_zeros() | slow) - beat(_zeros() | free) == pytest.approx(expected)


def test_fused_softmax_takes_four_rows_of_heads_at_once() -> None:
    cluster = parse_spec("A100-SXM-80")
    made = [
        terms(replace(GPT, heads=heads), layout(devices=1, tensor=1, rows=1), cluster).last
        for heads in (64, 48, 66)
    ]
    per_head = [each["scores"] / heads for each, heads in zip(made, (64, 48, 66), strict=True)]
    assert per_head[0] == pytest.approx(per_head[1]) and per_head[2] > 1.5 * per_head[0]


def test_layers_of_stages() -> None:
    assert layers_of(96, 8) == (12, 12)
    assert layers_of(70, 12) == (6, 5)  # BLOOM: the two ends count as layers
    assert layers_of(78, 12) == (7, 6)


@pytest.mark.parametrize(
    ("layers", "stages", "chunks", "further", "expected"),
    [
        (61, 16, 1, 1, (4, 2)),  # DeepSeek-V3, as Megatron-Bridge lays it out
        (61, 8, 2, 1, (8, 6)),
        (61, 4, 4, 0, (16, 13)),
        (78, 12, 1, 0, (7, 1)),  # BigScience: "the last stage has 1 block, while the rest have 7"
        (126, 8, 1, 0, (16, 15)),  # the ends count as layers
        (9, 4, 1, 0, (3, 2)),  # three stages of three would leave none
    ],
)
def test_a_stack_may_leave_the_rest_to_its_last_stage(
    layers: int, stages: int, chunks: int, further: int, expected: tuple[int, int]
) -> None:
    made = layout(
        devices=8 * stages, pipeline=stages, chunks=chunks, stack=replace(MEGATRON, left=True)
    )
    assert layers_on(replace(GPT, layers=layers), made, further) == expected


def test_gradients_are_sent_in_32_bits_at_most_and_as_they_are_summed() -> None:
    """An all-reduce of 8 bytes a parameter asks for what one of 4 does; added up they are 8."""
    cluster = parse_spec("4 x 8 A100-SXM-80 @ 25GB/s")
    of = {"devices": 32, "batch": 64}
    whole, wide, thin = (
        terms(GPT, layout(**of, stack=replace(MEGATRON, gradients=size, summed=summed)), cluster)
        for size, summed in ((4, 0), (8, 0), (4, 2))
    )
    assert wide.end["sums"] == whole.end["sums"] and thin.end["sums"] < whole.end["sums"]
    assert wide.last["adding"] == pytest.approx(2 * whole.last["adding"])
    assert thin.last["adding"] == pytest.approx(whole.last["adding"] / 2)


@pytest.mark.parametrize(
    ("more", "megatron", "distributed"),
    [
        ({}, 10, 8),  # gathers and scatters forward and back; inputs once more
        ({"recompute": "full"}, 14, 12),
        ({"recompute": "half"}, 10, 10),
        ({"precision": "fp8"}, 10, 6),  # four gathers in 8 bits
        ({"precision": "fp8-rows"}, 10, 8),
    ],
)
def test_what_a_layer_passes_on_under_sequence_parallelism(
    more: dict[str, Any], megatron: float, distributed: float
) -> None:
    cluster = parse_spec("8 x H100-SXM")
    one = seconds("gather", 4 * 2048 * GPT.hidden * 2, ranks(8, 1, 8), cluster.groups[0])
    for stack, count in ((MEGATRON, megatron), (replace(MEGATRON, distributed=True), distributed)):
        made = terms(GPT, layout(sequence_parallel=True, stack=stack, **more), cluster).last
        assert made["tensor"] == pytest.approx(GPT.layers * count * one)


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "form"),
    [
        ({}, lambda s, h, a, t: 10 + 24 / t + 5 * a * s / (h * t)),
        ({"sequence_parallel": True}, lambda s, h, a, t: (34 + 5 * a * s / h) / t),
        ({"sequence_parallel": True, "recompute": "attention"}, lambda s, h, a, t: 34 / t),
        ({"attention": "flash"}, lambda s, h, a, t: 10 + 24 / t),
    ],
)
def test_activations_are_korthikantis(more: dict[str, Any], form: Any) -> None:
    """s b h times the bytes of its tables 2 and 4, for each layer of the 22B model."""
    made = memory(GPT, layout(**more))
    s, b, h, a, t = 2048, 4, GPT.hidden, GPT.heads, 8
    assert made.activations == pytest.approx(GPT.layers * s * b * h * form(s, h, a, t), rel=1e-12)


def test_states_of_a_cut_optimizer() -> None:
    """Two bytes of weights and four of gradients whole, twelve of the optimizer over eight."""
    made = memory(LLAMA, layout(tensor=1, devices=8, states=8, attention="flash"))
    n = LLAMA.parameters - LLAMA.hidden  # but for the last norm
    assert sum(made.states.values()) == pytest.approx((2 + 4 + 12 / 8) * n, rel=1e-3)
    whole = memory(LLAMA, layout(tensor=1, devices=8, shards=8, states=8, attention="flash"))
    assert sum(whole.states.values()) == pytest.approx((2 + 4 + 12) / 8 * n, rel=1e-3)


def test_the_first_stage_holds_as_many_microbatches_as_there_are_stages() -> None:
    flat = memory(GPT, layout(tensor=1, devices=1, batch=32, attention="flash")).activations
    piped = memory(GPT, layout(tensor=1, devices=4, pipeline=4, batch=32, attention="flash"))
    assert piped.activations == pytest.approx(flat)  # a quarter of the layers, four times


# -- shapes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "billions"),
    [
        (Shape(96, 12288, 96, 50257, positions=2048), 174.6),
        (LLAMA, 70.55),
        (
            Shape(61, 7168, 128, 129280, inner=18432, gated=True, tied=False, experts=256, active=8,
                  expert_inner=2048, shared=2048, dense=3,
                  latent=Latent(1536, 512, 128, 64, 128)),
            671.0,
        ),
        (
            Shape(94, 4096, 64, 151936, groups=4, head=128, gated=True, tied=False, experts=128,
                  active=8, expert_inner=1536),
            235.1,
        ),
    ],
)  # fmt: skip
def test_parameters_of_published_models(shape: Shape, billions: float) -> None:
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=3e-3)


def test_conventions() -> None:
    """96 B s L H^2 (1 + s / 6 H + V / 16 L H) of Narayanan et al. with recompute."""
    s, h, v, layers = 2048, GPT.hidden, GPT.vocab, GPT.layers
    form = 96 * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert COUNTS["megatron-2021"](GPT, s, s, True) == pytest.approx(form, rel=1e-12)
    dense = 6 * (LLAMA.working + LLAMA.of_vocabulary) * 8192
    scores = 12 * LLAMA.layers * LLAMA.hidden * 8192 * 8192
    assert COUNTS["megatron-core"](LLAMA, 8192, 8192, False) == pytest.approx(dense + scores)
    assert COUNTS["causal"](LLAMA, 8192, 8192, False) == pytest.approx(dense + scores / 2)


def test_products_of_a_layer_are_six_operations_a_parameter() -> None:
    """At the peak without tiles: 6 N operations of a token, 8 N where it is computed again."""

    class Peak(Roofline):
        def _fill(self, m: int, n: int, k: int, dtype: str) -> float:
            return 1.0

    cluster = parse_spec("A100-SXM-80")
    source = Peak(cluster.groups[0].device)
    lay = layout(devices=1, tensor=1, attention="flash")
    plain = terms(GPT, lay, cluster, source).last["matmul"]
    n = GPT.working + GPT.of_vocabulary
    assert plain == pytest.approx(6 * n * 4 * 2048 / 312e12, rel=1e-6)
    again = terms(GPT, layout(devices=1, tensor=1, recompute="full"), cluster, source)
    extra = again.last["matmul"] - plain
    assert extra == pytest.approx(2 * GPT.working * 4 * 2048 / 312e12, rel=1e-6)
    assert math.isfinite(beat(dict.fromkeys(again.last, 0.0) | _zeros() | again.last))


def test_experts_that_are_called_when_their_tokens_are_counted_and_steps_launched_as_a_whole() -> (
    None
):
    """What experts' calls take is by itself, or nothing where a step is one graph."""
    shape = Shape(8, 2048, 16, 32000, experts=8, active=2, expert_inner=1024)
    cluster = parse_spec("8 x A100-SXM-80")
    lay = layout(tensor=1, expert=8, batch=32)
    plain, told, graphs = (
        terms(shape, replace(lay, stack=replace(MEGATRON, told=told, graphs=graphs)), cluster).last
        for told, graphs in ((False, False), (True, False), (False, True))
    )
    assert told["called"] > 0 and "called" not in plain
    assert told["called"] + told["launch"] == pytest.approx(plain["launch"])
    assert told["called"] == pytest.approx(8 * 3 * (ROUTED + OF_EXPERT) * LAUNCH)
    assert graphs["launch"] == 0.0 and graphs["matmul"] == plain["matmul"]


def _zeros() -> dict[str, float]:
    return dict(_terms(0.0, 0.0, 1, 1, 1).middle) | {"matmul": 0.0}


def kept(workers: int) -> int:
    """Activations at the peak of a worker's step, as the runtime rehearses it."""
    config = parse(
        {
            "model_type": "llama", "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 6,
            "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 704,
        }
    )  # fmt: skip
    mesh, float32 = Mesh(context=workers), Precision.named("float32")
    request = PlanRequest(1, LONG, float32, AdamW(), documents=(0, LONG), mesh=mesh)
    facts, device = facts_of_model(config, request), catalogue("H100-SXM")
    plan = Plan(8, per_segment(8), 1, 1, LONG, float32, 512, mesh=mesh)
    (costs,) = Forecaster(config, request, device, facts).costs(plan)
    return compose(plan, costs, device).peak_by_kind["activations"]


def test_parts_of_a_sequence_are_merged_by_kernels_of_their_own() -> None:
    """Keys and values of a group repeated for its eight heads, computed again and with gradients in
    32 bits; every other part of the sequence is added up once more where that is computed again."""
    cluster = parse_spec("8 x H100-SXM")
    own = Layout(8, 1, 1, 8 * LONG, WIDE, context=8, recompute="full")
    stacks = WIDE, replace(WIDE, merged=True)
    plain, merged = (terms(LLAMA, replace(own, stack=stack), cluster).last for stack in stacks)
    once = 2 * 8192 * 2 * LONG * 8
    one = seconds("gather", once, ranks(8, 1, 8), cluster.groups[0])
    assert merged["ring"] == pytest.approx(80 * 5 * one)
    one = seconds("gather", once / 8, ranks(8, 1, 8), cluster.groups[0])
    assert plain["ring"] == pytest.approx(80 * 4 * one)
    moved = 80 * 7 * (2 * MERGED[0] + MERGED[1]) * 8192 * LONG
    more = merged["traffic"] - plain["traffic"]
    assert more == pytest.approx(moved / cluster.groups[0].device.bandwidth.value)


def test_keys_and_values_stay_as_a_context_axis_gathers_them() -> None:
    """What a worker of four keeps beyond a fourth of what one keeps: every layer's keys and values
    of the others, and while one layer gathers its own, these in both orders."""
    shape = Shape(6, 256, 8, 512, inner=704, groups=4, gated=True, tied=False)
    own = Layout(4, 1, 1, LONG, WIDE, context=4, precision="fp32")
    one = replace(own, devices=1, context=1)
    more = kept_by(shape, own, 6) - kept_by(shape, one, 6) / 4
    layer = LONG * 4 * (32 + 32) * 4
    assert more == 6 * layer * 3 / 4
    assert more <= kept(4) - kept(1) / 4 <= more + 2 * layer
    theirs = replace(own, stack=MEGATRON)
    assert kept_by(shape, theirs, 6) == kept_by(shape, replace(one, stack=MEGATRON), 6) / 4
