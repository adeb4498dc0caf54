"""The choice of tiers for the workers of a data axis: each one's shares below, as little as the
budget allows, what is predicted is what it counts, and the numbers are those of one worker."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiered
from subjects import config_of
from threads import play
from tiered import DISK, KIB, LARGER, MACHINE, MIB, ROWS, SEQUENCE, losses, missing

from outsize.collectives import Mesh
from outsize.errors import OutsizeError
from outsize.optim.parse import parse
from outsize.plan import Plan, Sharding, zero
from outsize.plan.spread import KINDS
from outsize.search import PlanRequest, choose
from outsize.simulate import Forecast

WISH = replace(tiered.WISH, mesh=Mesh(data=2))
CONFIG = config_of("llama, untied", **LARGER | {"num_hidden_layers": 3})


def chosen(request: PlanRequest, budget: int) -> Forecast:
    return tiered.chosen(CONFIG, request, budget)


LEAST: dict[str, int] = {}  # by what is asked for, so that each is looked for once


def least(request: PlanRequest) -> int:
    """The budget that a refusal names."""
    if repr(request) not in LEAST:
        with pytest.raises(OutsizeError, match=r"bytes missing.*; the smallest plan") as caught:
            chosen(request, KIB)
        LEAST[repr(request)] = KIB + missing(caught.value)
    return LEAST[repr(request)]


WAYS = {
    "as the planner cuts": {},
    "whole parameters and gradients": {"shards": zero(1, 2)},
    "behind the backward pass": {"shards": zero(3, 2), "clip": None},
    "whole matrices": {"shards": zero(2, 2), "optimizer": parse("muon", 1e-2, 0.1, (0.9, 0.95))},
    "a pipeline too": {"mesh": Mesh(data=2, pipeline=2), "pipeline": "1f1b"},
}


@pytest.mark.parametrize("way", WAYS)
def test_within_a_budget_workers_give_the_numbers_of_one(way):
    """Nearer to the least than to what needs no tier, so that all that can goes below."""
    request = replace(WISH, **WAYS[way])
    plenty = choose(CONFIG, replace(request, shards=request.shards or zero(3, 2)), MACHINE)
    small = least(request)
    budget = (plenty.peak + 15 * small) // 16
    made = chosen(request, budget)
    plan = made.plan
    assert small <= made.peak <= budget < plenty.peak and made.below["disk"] > 0
    below = [kind for kind in KINDS if plan.rests_below(kind)]
    assert below == [kind for kind in KINDS if getattr(plan.shards, kind) == 2]

    stages = tuple(replace(s, rest=type(s.rest)()) for s in plan.stages)
    alone = Plan(plan.segments, stages, ROWS, 1, SEQUENCE, plan.precision, 64)
    wanted, _ = losses(CONFIG, alone, request, 2)
    most = made.below["disk"] + 64 * 4 * KIB  # each state begins a page
    told = play(plan.mesh, lambda world: losses(CONFIG, plan, request, 2, world, most))
    for found, _ in told:
        assert found == pytest.approx(wanted, rel=1e-10)
    predicted = [made.peaks[plan.mesh.index("pipeline", rank)] for rank in range(plan.mesh.size)]
    assert all(peak <= told for (_, peak), told in zip(told, predicted, strict=True))
    assert max(peak for _, peak in told) >= 0.95 * made.peak


@pytest.mark.parametrize("stage", [None, 1, 2])  # None: 3, as the next test says
def test_the_least_budget_works_and_a_byte_less_does_not(stage):
    request = WISH if stage is None else replace(WISH, shards=zero(stage, 2))
    small = least(request)
    made = chosen(request, small)
    assert made.peak == small and made.below["disk"] > 0
    with pytest.raises(OutsizeError) as caught:
        chosen(request, small - 1)
    assert missing(caught.value) == 1 and "\n" not in str(caught.value)


def test_less_memory_cuts_more_and_has_more_below():
    top = choose(CONFIG, replace(WISH, tiers=()), MACHINE)
    budgets = [2 * top.peak, top.peak * 95 // 100, top.peak * 8 // 10, least(WISH)]
    made = [chosen(WISH, budget) for budget in budgets]
    assert made[0].plan.shards == zero(1, 2) and not made[0].below
    order = [plan.shards.parameters + plan.shards.gradients for plan in (m.plan for m in made)]
    assert order == sorted(order) and made[-1].plan.shards == zero(3, 2)
    below = [sum(one.below.values()) for one in made]
    assert below == sorted(below) and below[-1] > below[0]
    assert [m.peak <= b for m, b in zip(made, budgets, strict=True)] == [True] * 4


def test_tiers_hold_a_workers_own_shares():
    """What is too small for a worker's shares is refused; half of the model's states is enough."""
    request = replace(WISH, shards=zero(2, 2))
    budget = least(request)
    small = replace(DISK, bytes=4 * KIB)
    with pytest.raises(OutsizeError, match=r"disk 4\.00 KiB.*bytes missing") as caught:
        chosen(replace(request, tiers=(small,)), budget)
    enough = replace(small, bytes=small.bytes + missing(caught.value))
    made = chosen(replace(request, tiers=(enough,)), budget)
    whole = chosen(replace(request, shards=Sharding()), 64 * MIB)
    assert made.below["disk"] * 2 == whole.static["optimizer"] + whole.static["gradients"]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_little_less_memory_has_little_below(stage):
    request = replace(WISH, shards=zero(stage, 2), clip=None)
    plenty = choose(CONFIG, replace(request, tiers=()), MACHINE)
    made = chosen(request, plenty.peak * 97 // 100)
    assert 0 < made.below["disk"] <= plenty.static["optimizer"] / 3
