"""A processor whose rates were measured: priced by them, and not by a GPU's kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from rates import known_hardware, rate

from outsize.foresight.named import shape_of
from outsize.foresight.planning.asked import Asked, Conditions, conditions
from outsize.foresight.planning.choose import choose
from outsize.foresight.planning.explain import figures
from outsize.foresight.sources import Roofline, source_of
from outsize.foresight.step import combine, held, terms
from outsize.hardware import Attention, Device, Hardware, Matmul, Measured, parse_spec
from outsize.hardware.cluster import of_machine
from outsize.hardware.measure import CPU_SHAPES
from outsize.simulate.counter import Work
from outsize.simulate.forecast import duration
from outsize.train.resolve import values_of
from outsize.train.setup import set_up

RATE = {"fp32": 5e10, "bf16": 5e9}  # of products; attention is half as fast


def processor() -> Hardware:
    """Products in 16 bits are slow, as on processors without instructions for them."""
    measured = Measured(
        tuple(Matmul(*shape, name, rate(value, "FLOP/s")) for shape in CPU_SHAPES
              for name, value in RATE.items()),
        tuple(Attention(512, 6, 64, name, way, rate(value / 2, "FLOP/s"))
              for name, value in RATE.items() for way in ("forward", "backward")),
        rate(1e-6, "s"),
    )  # fmt: skip
    made = known_hardware()
    peak = {name: rate(value, "FLOP/s") for name, value in RATE.items()}
    return replace(made, devices=(replace(made.devices[0], measured=measured, peak=peak),))


def device() -> Device:
    return processor().devices[0]


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("name", RATE)
def test_attention_takes_the_rate_that_was_measured_in_its_dtype(name: str, back: bool) -> None:
    found = source_of(device(), name).attention(1e9, (512, 64), "flash", back)
    assert found.seconds == pytest.approx(1e9 / (RATE[name] / 2))
    assert "measured" in found.source
    sheet = Roofline(replace(device(), measured=Measured()), name)
    ratio = RATE["fp32"] / RATE[name]
    other = Roofline(sheet.device, "fp32").attention(1e9, (512, 64), "flash", back)
    assert sheet.attention(1e9, (512, 64), "flash", back).seconds == pytest.approx(
        other.seconds * ratio
    )


CALL, OPERATION, BYTE, OPERATOR = 5e-6, 1 / 8e10, 1 / 5e10, 3e-5


def took(tokens: int, d_in: int, d_out: int) -> float:
    """Seconds of a product in float32."""
    moved = 4 * (tokens * d_in + d_in * d_out + tokens * d_out)
    return CALL + 2 * tokens * d_in * d_out * OPERATION + moved * BYTE


def lawful() -> Hardware:
    """A processor whose products follow a law, on which an operator of a step takes 30 us."""
    entries = tuple(
        Matmul(*shape, "fp32", rate(2 * math.prod(shape) / took(*shape), "FLOP/s"))
        for shape in CPU_SHAPES
    )
    made = device()
    measured = replace(made.measured, matmul=entries, handed=rate(OPERATOR, "s"))
    return replace(processor(), devices=(replace(made, measured=measured),))


@pytest.mark.parametrize("shape", [(3, 40, 7), (700, 96, 96), (64, 2048, 8192), (16384, 512, 512)])
def test_shapes_that_were_not_measured_follow_the_law_of_those_that_were(
    shape: tuple[int, int, int],
) -> None:
    """Far from all of them too; beside it an operator takes what a step's operators take."""
    one, (m, k, n) = lawful().devices[0], shape
    assert source_of(one, "fp32").product(m, n, k, "fp32").seconds == pytest.approx(took(*shape))
    whole = duration(Work({(*shape, "float32"): 3}, calls=5), one)
    assert whole == pytest.approx(3 * (took(*shape) - CALL) + 5 * OPERATOR)


def test_a_measured_shape_takes_what_it_took_and_its_neighbours_nearly_so() -> None:
    entries = list(lawful().devices[0].measured.matmul)
    at = CPU_SHAPES.index((256, 192, 192))
    slow = entries[at].rate
    entries[at] = replace(entries[at], rate=replace(slow, value=slow.value / 3))
    measured = Measured(tuple(entries))
    seconds = measured.product_seconds(CPU_SHAPES[at], "fp32")[0]
    assert seconds == pytest.approx(3 * took(*CPU_SHAPES[at]))
    law, near = measured.laws["fp32"], (256, 192, 200)
    assert measured.product_seconds(near, "fp32")[0] > 2 * law.plain(near)
    few = Measured(tuple(entries[:4]))
    assert few.laws == {}
    assert few.product_seconds(near, "fp32")[0] * few.matmul_rate(*near, "fp32") == pytest.approx(
        2 * math.prod(near)
    )


@pytest.mark.parametrize(
    ("machine", "model", "sequence", "rows"),
    [(processor, "small", 256, 4), (lawful, "mini", 128, 8), (lawful, "tiny", 64, 1)],
)
def test_seconds_are_those_of_the_rehearsal_by_the_same_rates(
    machine: Callable[[], Hardware], model: str, sequence: int, rows: int
) -> None:
    """Counted from the shape here, operator by operator on fake tensors there."""
    made = set_up(
        values_of(None, (
            f"model.name={model}", f"train.sequence={sequence}", "precision=float32",
            f"train.batch_tokens={2 * sequence * rows}", f"plan.microbatch_rows={rows}",
            "plan.recompute=[]", "device=cpu",
        )),
        hardware=machine(),
    ).forecast  # fmt: skip
    fixed = Conditions(conditions((f"rows={rows}", "recompute=none"), "--require"))
    asked = Asked(sequence, 2 * rows, "fp32", fixed)
    shape, cluster = shape_of(model), of_machine(machine())
    best = choose(shape, asked, cluster, 1).plans[0]
    assert best.seconds == pytest.approx(made.seconds, rel=0.2)
    counted = terms(shape, best.layout, cluster)
    assert best.lanes["matmul"] == pytest.approx(counted.slots * counted.last["matmul"])


def test_a_processor_keeps_no_driver_nor_its_communicators() -> None:
    """Its process has an interpreter beside tensors; a GPU's keeps its context, the buffers of
    communicators, and what the allocator cannot use. What fits goes by them."""
    shape, asked = shape_of("mini"), Asked(128, 8, "fp32")
    cluster = of_machine(replace(processor(), devices=(replace(device(), count=2),)))
    best = choose(shape, asked, cluster, 1).plans[0]
    gpu = choose(shape, replace(asked, precision="bf16"), parse_spec("2xL40S"), 1).plans[0]
    beside = best.memory.process - best.memory.tensors
    assert beside == best.memory.kept.libraries and 0 < beside < 2**29
    assert gpu.memory.process - gpu.memory.tensors > 0.85 * 2**30
    assert best.room == cluster.groups[0].device.memory_bytes  # all of it
    tight = replace(asked, memory=int(best.memory.process) + 1)
    assert choose(shape, tight, cluster, 1).plans[0].fits
    none = choose(shape, replace(asked, memory=2**27), cluster, 1)
    assert none.nearest is not None and none.nearest.memory.kept == best.memory.kept
    said = {one.name: one.value for one in figures(shape, cluster, best)}
    assert said["reserve: a communicator"] == "0.00 GiB"


def test_workers_of_a_processor_pay_for_all_that_they_say() -> None:
    """Their cores carry it, so nothing hides it: weights that are gathered in every pass cost what
    their bytes do, of four each in float32, and states alone are cut."""
    shape, asked = shape_of("small"), Asked(256, 16, "fp32")
    cluster = of_machine(replace(lawful(), devices=(replace(lawful().devices[0], count=2),)))
    both = {
        p.layout.shards: p
        for zero in ("zero=1", "zero=3")
        for fixed in [Conditions(conditions((zero, "rows=8", "recompute=none"), "--require"))]
        for p in choose(shape, replace(asked, conditions=fixed), cluster, 1).plans
    }
    layout = both[2].layout
    counted = terms(shape, layout, cluster)
    sums = sum(counted.last.values()) + sum(counted.end.values())
    assert combine(counted).total == pytest.approx(sums)
    weights, level = sum(held(shape, layout)), cluster.groups[0].levels[0]
    moved = 3 * 4 * weights / 2 / level.bandwidth.value  # two passes and the gradients
    assert moved < counted.last["gathers"] < moved + 1e-3
    assert both[1].seconds < both[2].seconds
    assert choose(shape, asked, cluster, 1).plans[0].layout.shards == 1
