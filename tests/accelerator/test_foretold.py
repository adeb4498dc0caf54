"""Bytes foretold for a device are those that its allocator counts, its rounding included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import strict
import torch
from foretelling import OVER, ROWS, SEQUENCE, asked, decoder, hardware, measured
from streamed import resting
from tiered import missing
from torch import nn

import outsize
from outsize import accelerator
from outsize.errors import OutsizeError
from outsize.hardware import measure
from outsize.hardware.handing import handed
from outsize.memory import OverBudget, meter
from outsize.plan import Plan, Precision, Stream
from outsize.plan.plan import per_segment
from outsize.runtime import spill
from outsize.search import choose, predict
from outsize.simulate.counter import Counter

BASE = Plan(5, per_segment(5), ROWS, ROWS, SEQUENCE, Precision.named("float32"))
STATES = ("parameters", "gradients", "optimizer")
LAYERS = {"order": "layer", "microbatch_rows": 2, "stream": Stream()}
PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "microbatches": {"microbatch_rows": 1},
    "uneven": {"microbatch_rows": 3},
    "recompute": {"stages": per_segment(5, ("block",))},
    "parts again": {"stages": per_segment(5, ("mlp", "attention")), "microbatch_rows": 2},
    "chunks": {"loss_chunk": 16, "mlp_tile": 16},
    "split": {"split_backward": True, "loss_chunk": 7, "microbatch_rows": 2},
    "bfloat16": {"precision": Precision.named("bfloat16")},
    "float16": {"precision": Precision.named("float16")},
    "float16 on host": {
        **LAYERS,
        "precision": Precision.named("float16"),
        "rest": dict.fromkeys(STATES, "host"),
    },
    "host": {**LAYERS, "rest": dict.fromkeys(STATES, "host")},
    "disk": {**LAYERS, "rest": dict.fromkeys(STATES, "disk")},
    "spilled": {**LAYERS, "rest": {"activations": "host"}},
}


@pytest.mark.parametrize("name", PLANS)
def test_of_a_native_decoder(name: str) -> None:
    device = _started()
    changes = dict(PLANS[name])
    rest = changes.pop("rest", {})
    plan, config = resting(replace(BASE, **changes), **rest), decoder()
    with patch.object(spill, "LEAST", 64):  # tiny activations leave, too
        made = predict(config, asked(device, plan.precision), plan, hardware())
        step, evaluation = measured(config, plan, meter(device), device)
    assert step <= made.peak <= OVER * step
    assert made.evaluation <= OVER * evaluation
    assert name == "chunks" or evaluation <= made.evaluation  # ids are checked, which takes some


@pytest.mark.parametrize("tiers", [True, False])
def test_the_least_is_enough_and_one_byte_less_is_refused(tiers: bool) -> None:
    device, config = _started(), decoder()
    request, machine = asked(device, BASE.precision), hardware()
    request = request if tiers else replace(request, tiers=())
    with pytest.raises(OutsizeError) as small:
        choose(config, replace(request, budget=1), machine)
    least = 1 + missing(small.value)
    with pytest.raises(OutsizeError, match="1 byte missing"):
        choose(config, replace(request, budget=least - 1), machine)
    plan = choose(config, replace(request, budget=least), machine).plan
    measured(config, plan, meter(device, least), device)
    with pytest.raises(OverBudget):
        measured(config, plan, meter(device, least * 98 // 100), device)


class Own(nn.Module):
    """A module of somebody's own, with dropout, which draws on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(48, 96)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(96, 200), nn.GELU(), nn.Dropout(0.1), nn.Linear(200, 96))
            for _ in range(3)
        )
        self.last = nn.Linear(96, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x).square().mean()


@contextmanager
def _library() -> Iterator[int]:
    """Bytes that a library of products takes at its first call, and keeps, as cuBLAS does."""
    held, multiply, nbytes = list[torch.Tensor](), accelerator.multiply, 3 << 20

    def once(device: torch.device) -> None:
        if not held:
            held.append(torch.empty(nbytes, dtype=torch.uint8, device=device))
        multiply(device)

    accelerator.reserved.cache_clear()
    with patch.object(accelerator, "multiply", once):
        yield nbytes
    held.clear()
    accelerator.reserved.cache_clear()


def test_what_a_library_keeps_is_foretold_andmeasured() -> None:
    device, config, plan, machine = _started(), decoder(), BASE, hardware()
    with _library() as nbytes:
        assert accelerator.reserved(device) == nbytes
        one = replace(machine.devices[0], reserved=nbytes)
        request = asked(device, plan.precision)
        plain = predict(config, request, plan, machine)
        made = predict(config, request, plan, replace(machine, devices=(one,)))
        assert made.peak - plain.peak == made.evaluation - plain.evaluation == nbytes
        assert sum(made.peak_by_kind.values()) == made.peak
        step, evaluation = measured(config, plan, meter(device, made.peak, (), nbytes), device)
        assert step <= made.peak <= OVER * step
        assert evaluation <= made.evaluation <= OVER * evaluation
        with pytest.raises(OverBudget):
            measured(config, plan, meter(device, plain.peak, (), nbytes), device)


def test_of_an_adopted_module_beside_a_library() -> None:
    with _library():
        test_of_an_adopted_module("8MiB")
        with pytest.raises(OutsizeError, match="missing"):
            test_of_an_adopted_module("4.1MiB")


@pytest.mark.parametrize("budget", ["8MiB", "4.1MiB"])
def test_of_an_adopted_module(budget: str) -> None:
    device = _started()
    model, batch = Own().to(device), torch.randn(512, 48)
    job = outsize.prepare(model, "adamw", budget)
    for _ in range(2):
        job.step({"x": batch})
    forecast, peak = job.forecast, job.report.trace.peak()
    assert forecast is not None
    assert peak <= forecast.peak <= OVER * peak
    assert peak > torch.accelerator.memory_allocated() - 1024  # of which nothing is left out
    job.close()


def test_less_than_an_adopted_module_needs_is_refused() -> None:
    model = Own().to(_started())
    with pytest.raises(OutsizeError, match="missing"):
        outsize.prepare(model, "adamw", "1200KiB").step({"x": torch.randn(512, 48)})


def test_the_grain_is_asked_of_the_device() -> None:
    assert accelerator.grain(_started()) == 512
    assert accelerator.grain(torch.device("cpu")) == 1


def test_the_host_hands_out_what_rehearsals_count() -> None:
    device, work = _started(), list[Callable[[], object]]()

    def timer(step: Callable[[], object], where: torch.device) -> float:
        work.append(step)
        return 1.0

    each = handed(device, timer, "d")
    with Counter() as counter:
        work[0]()
    assert each.value == pytest.approx(1 / counter.work.calls)
    assert counter.work.calls > 160  # of 16 layers, those of autograd's thread among them


@pytest.mark.parametrize(("seconds", "tokens"), [(1e-5, 64), (1e-3, 512)])
def test_attention_that_is_over_at_once_is_measured_on_more_tokens(
    seconds: float, tokens: int
) -> None:
    with patch.object(measure, "LONG", (64, 2)):
        found = list(measure.attentions(_started(), True, lambda *_: seconds, "d"))
    assert {one.tokens for one in found} == {tokens}
    assert {(one.dtype, one.direction) for one in found} == {
        (dtype, way) for dtype in ("fp32", "bf16") for way in ("forward", "backward")
    }


def _started() -> torch.device:
    strict.start("random", seed=5)
    return torch.device("strict", 0)
