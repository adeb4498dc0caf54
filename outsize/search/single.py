"""Choosing the plan of one device: the quickest candidate that fits the budget.

Each candidate is forecast, and the first in order of foretold time that fits is taken; where states
may rest on tiers below the device, outsize/search/streamed.py weighs them instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from outsize.errors import OutsizeError
from outsize.hardware import Hardware
from outsize.memory import format_bytes
from outsize.models.config import DecoderConfig
from outsize.plan import Plan
from outsize.search.candidates import candidates
from outsize.search.streamed import choose_streamed
from outsize.search.wish import Oracle, Wish, facts_of_model, layouts, memories, native_makers
from outsize.simulate import Forecast
from outsize.simulate.forecast import compose
from outsize.simulate.rehearse import rehearse

__all__ = ["Wish", "choose", "facts_of_model", "foretell", "native_makers", "oracle_of", "pick"]


def choose(config: DecoderConfig, wish: Wish, hardware: Hardware) -> Forecast:
    """The quickest plan for a native decoder that fits wish.budget.

    Raises OutsizeError where none fits, with the missing bytes and the nearest that does.
    """
    oracle = oracle_of(config, wish, hardware)
    plans = candidates(wish, len(config.layers) + 2)
    if wish.tiers and wish.budget is not None:
        return choose_streamed(oracle, list(plans))
    return pick(plans, oracle.forecast, wish.budget)


def oracle_of(config: DecoderConfig, wish: Wish, hardware: Hardware) -> Oracle:
    """What foretells plans of a native decoder."""
    return Oracle(config, wish, hardware, facts_of_model(config, wish))


def foretell(config: DecoderConfig, wish: Wish, plan: Plan, hardware: Hardware) -> Forecast:
    """The forecast of a given plan for a native decoder, with the costliest of `layouts`."""
    made = []
    for bounds in layouts(wish):
        costs = rehearse(plan, *native_makers(config, wish, bounds))
        facts = replace(costs.facts, host=memories(wish))
        made.append(compose(plan, replace(costs, facts=facts), hardware))
    return max(made, key=lambda one: one.peak)


def pick(
    candidates: Iterator[Plan], foretell: Callable[[Plan], Forecast], budget: int | None
) -> Forecast:
    """The first forecast that fits; candidates come in order of rising time."""
    smallest: Forecast | None = None
    for plan in candidates:
        made = foretell(plan)
        if budget is None or made.peak <= budget:
            return made
        if smallest is None or made.peak < smallest.peak:
            smallest = made
    assert smallest is not None and budget is not None
    raise OutsizeError(
        f"memory budget of {format_bytes(budget)} ({budget} bytes) is too small:"
        f" {smallest.peak - budget} bytes missing; the smallest plan needs"
        f" {format_bytes(smallest.peak)} ({smallest.peak} bytes,"
        f" {format_bytes(sum(smallest.static.values()))} of them parameters, gradients and"
        f" optimizer): set memory to {-(-smallest.peak // 2**20)}MiB, or use a smaller model"
    )
