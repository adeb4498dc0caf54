"""`plan.pipeline: auto`: orders found for a plan's costs and memory, as a plan has them and as they
run, and what the planner says of its choice."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from piped import check
from subjects import SEQUENCE, config_of

from outsize.collectives import Mesh
from outsize.errors import OutsizeError
from outsize.hardware import Hardware, catalogue
from outsize.optim import AdamW
from outsize.plan import Pipelined, Precision, Sharding
from outsize.plan.text import from_yaml, to_yaml
from outsize.schedule.pipelined import coarse_of
from outsize.search import PlanRequest, choose
from outsize.search.pipeline_request import continued
from outsize.simulate import Forecast

LAYERS = 6
CONFIG = config_of("llama", num_hidden_layers=LAYERS)
SLOWER = 1000  # so that products take most of the time, as in models of the usual sizes


def slow(made: Hardware) -> Hardware:
    """A machine whose products take longer."""
    (device, *others), by = made.devices, 1 / SLOWER
    peak = {name: replace(rate, value=rate.value * by) for name, rate in device.peak.items()}
    return replace(made, devices=(replace(device, peak=peak), *others))


HARDWARE = slow(catalogue("H200", 4))
AUTO = PlanRequest(
    15, SEQUENCE, Precision.named("float64"), AdamW(), mesh=Mesh(pipeline=2), microbatch_rows=2,
    documents=(0, SEQUENCE), pipeline="auto", recompute=(), loss_chunk=0, mlp_tile=0,
)  # fmt: skip


def made(pipeline: str, budget: int | None) -> Forecast:
    return choose(CONFIG, replace(AUTO, pipeline=pipeline, budget=budget), HARDWARE)


@pytest.fixture(scope="module")
def found() -> Forecast:
    """In the memory of zb-h1."""
    return made("auto", made("zb-h1", None).peak)


def test_no_published_schedule_is_quicker_in_the_same_memory(found):
    budget = found.plan.budget
    assert found.plan.pipeline.schedule == "auto" and found.peak <= budget
    found.prove()
    for name in ("1f1b", "zb-h1"):
        other = made(name, budget)
        assert found.seconds < 0.99 * other.seconds, name

    ((_, why),) = found.why
    assert "published schedules and" in why and "less time than 1f1b" in why


def test_orders_that_do_not_fit_are_not_taken(found):
    """For a byte less than the best ones hold, others are."""
    less = made("auto", found.peak - 1)
    assert less.peak < found.peak and less.seconds >= found.seconds


def test_orders_are_found_alike_and_are_part_of_the_plan(found):
    again = made("auto", found.plan.budget).plan
    assert again == found.plan == from_yaml(to_yaml(found.plan))
    coarse = coarse_of(found.plan)
    assert len(found.plan.pipeline.orders) == 2
    # Every microbatch once forward through every stage, and both of its gradients.
    kinds = [(a.kind, a.stage, a.microbatch) for w in coarse.schedule.workers for a in w]
    for stage, microbatch in itertools.product(range(coarse.placement.stages), range(8)):
        for kind in ("FORWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT"):
            assert kinds.count((kind, stage, microbatch)) == 1
    request = replace(AUTO, budget=found.plan.budget)
    assert continued(found.plan, request, Sharding()) == found.plan
    other = continued(found.plan, replace(request, pipeline="zb-h1"), Sharding())
    assert other.pipeline == Pipelined("zb-h1")
    fewer = continued(found.plan, replace(request, mesh=Mesh(pipeline=4)), Sharding())
    assert not fewer.pipeline.orders and fewer.pipeline.schedule == "1f1b"


def test_a_plan_with_orders_of_its_own_has_the_numbers_of_one_worker(found):
    assert found.plan.segments == LAYERS + 2
    check(replace(found.plan, budget=None))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (Pipelined("auto"), "pipeline.orders is empty: the planner finds them"),
        (Pipelined("auto", orders=("0F0,0B0", "1F0,1B0")), "are of 2 workers and 1 microbatch,"),
        (
            Pipelined("auto", orders=("0F0,0X0",)),
            "plan: pipeline.orders line 1: '0X0' is no action",
        ),
        (Pipelined("auto", orders=("0F0,0B0", "1B0,1F0")), "plan: pipeline.orders: "),
    ],
)
def test_orders_that_cannot_be_are_refused(line, said, found):
    with pytest.raises(OutsizeError) as error:
        coarse_of(replace(found.plan, pipeline=line))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_orders_are_of_auto_alone():
    with pytest.raises(OutsizeError, match="orders of the schedule is zb-h1"):
        Pipelined("zb-h1", orders=("0F0,0B0",))
