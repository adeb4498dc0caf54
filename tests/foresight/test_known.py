"""Layouts that do the same: one functional form, one evaluation, the same choices."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from outsize.foresight.layout import Layout
from outsize.foresight.memory import memory
from outsize.foresight.named import shape_of
from outsize.foresight.planning.asked import Asked, Conditions, conditions
from outsize.foresight.planning.choose import choose
from outsize.foresight.planning.known import Known, functional
from outsize.foresight.planning.layouts import STACK
from outsize.foresight.step import terms
from outsize.hardware import parse_spec

LLAMA = shape_of("llama3-8b")
NODES = parse_spec("4 x 8 H100-SXM @ 25GB/s")


def drawn(seed: int) -> Layout:
    draw = random.Random(seed)
    tensor, pipeline = draw.choice([1, 2, 8]), draw.choice([1, 4])
    data = 32 // (tensor * pipeline)
    shards = draw.choice([1, data]) if pipeline == 1 else 1
    whole = draw.choice([0, 3, 32 // pipeline])
    return Layout(
        32, draw.choice([1, 2]), 256, 2048, STACK, tensor, pipeline,
        recompute=draw.choice(["none", "full"]), whole=whole, shards=shards,
        states=draw.choice([1, data]),
        cut_gradients=draw.random() < 0.5, sequence_parallel=draw.random() < 0.5,
    )  # fmt: skip


def test_layouts_of_one_form_do_the_same_and_others_do_not() -> None:
    forms: dict[Layout, list[Layout]] = {}
    for seed in range(150):
        layout = drawn(seed)
        forms.setdefault(functional(LLAMA, layout), []).append(layout)
    assert any(len(set(same)) > 1 for same in forms.values())
    seen = set()
    for form, same in forms.items():
        made, held = terms(LLAMA, form, NODES), memory(LLAMA, form)
        for layout in set(same):
            other = terms(LLAMA, layout, NODES)
            for one, two in ((made.middle, other.middle), (made.last, other.last)):
                assert {k: v for k, v in one.items() if v} == pytest.approx(
                    {k: v for k, v in two.items() if v}
                )
            assert (other.end, other.window) == (made.end, made.window)
            assert memory(LLAMA, layout).tensors == pytest.approx(held.tensors)
        seen.add((held.tensors, made.slots, *(round(v, 12) for v in made.middle.values())))
    assert len(seen) == len(forms), "two forms that do the same"


def test_searches_share_what_they_evaluated_and_choose_the_same() -> None:
    asked = Asked(2048, 128)
    known = Known(LLAMA)
    first = choose(LLAMA, asked, NODES, 2, known)
    once = known.made
    wished = replace(asked, conditions=Conditions(conditions(("pipeline>1",), "--require")))
    both = choose(LLAMA, wished, NODES, 2, known)
    alone = Known(LLAMA)
    assert choose(LLAMA, wished, NODES, 2, alone).plans == both.plans
    assert choose(LLAMA, asked, NODES, 2, Known(LLAMA)).plans == first.plans
    assert known.made - once < alone.made
    again = known.made
    assert choose(LLAMA, asked, NODES, 2, known).plans == first.plans
    assert known.made == again
