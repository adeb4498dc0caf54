"""Machines whose links differ: rates that were measured, and the order of the ranks on them."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from outsize.cli.main import main
from outsize.errors import OutsizeError
from outsize.foresight.layout import Layout
from outsize.foresight.memory import memory
from outsize.foresight.named import shape_of
from outsize.foresight.planning.asked import Asked, Conditions, conditions
from outsize.foresight.planning.choose import choose, forecast, order_of
from outsize.foresight.planning.layouts import STACK, cells, variants
from outsize.foresight.planning.placement import least
from outsize.foresight.step import combine, terms
from outsize.hardware import Cluster, parse_spec
from outsize.plan.file import PlanFile, read_plan
from outsize.train.seats import moved

LLAMA = shape_of("llama3-8b")
FAST, SLOW = 20e9, 2e9


def machines(count: int, each: int = 2, seed: int = 0) -> Cluster:
    """So many of two devices, with links drawn between the slowest and the fastest."""
    draw = random.Random(seed)
    rates = [[draw.uniform(SLOW, FAST) for _ in range(count)] for _ in range(count)]
    made = parse_spec(f"{count} x {each} H100-SXM @ 20GB/s")
    return replace(made, rates=tuple(map(tuple, rates)))


def seconds(layout: Layout, cluster: Cluster, order: tuple[int, ...]) -> float:
    held = memory(LLAMA, layout)
    return forecast(LLAMA, [layout], cluster.placed(order), [held], 10**12)[0].seconds


@pytest.mark.parametrize("asked", ["pipeline=4,zero=1", "tensor=2,zero=1", "data=8,zero=3"])
def test_a_matrix_of_equal_rates_changes_nothing(asked: str) -> None:
    plain = parse_spec("4 x 2 H100-SXM @ 20GB/s")
    alike = replace(plain, rates=((20e9,) * 4,) * 4)
    wanted = Asked(2048, 64, conditions=Conditions(conditions((asked,), "--require")))
    one, other = (choose(LLAMA, wanted, cluster, 3).plans for cluster in (plain, alike))
    assert [plan.layout for plan in one] == [plan.layout for plan in other]
    assert [plan.seconds for plan in one] == pytest.approx([plan.seconds for plan in other])
    assert {plan.machines for plan in other} == {(0, 1, 2, 3)}


def test_a_ring_is_as_fast_as_its_slowest_link_and_a_border_in_both_directions() -> None:
    """Four stages on machines 0 to 3: borders 0-1, 1-2, 2-3; each its own time, there and back."""
    cluster = machines(4, each=1)
    layout = Layout(4, 1, 16, 2048, STACK, pipeline=4)
    counted = terms(LLAMA, layout, cluster)
    sent, rates = 2048 * 4096 * 2, cluster.rates
    wait = cluster.groups[0].levels[-1].latency.value
    each = [sent / rates[i][i + 1] + sent / rates[i + 1][i] + 2 * wait for i in range(3)]
    assert counted.middle["stages"] == pytest.approx(max(each))
    assert counted.spare == pytest.approx(sum(max(each) - one for one in each))
    full = combine(replace(counted, spare=0.0)).total - combine(counted).total
    assert full == pytest.approx(counted.spare)
    ring = replace(layout, pipeline=1, shards=4)
    slowest = min(rates[i][(i + 1) % 4] for i in range(4))
    alike = replace(cluster, rates=((slowest,) * 4,) * 4)
    assert terms(LLAMA, ring, cluster) == terms(LLAMA, ring, alike)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "layout",
    [
        Layout(10, 1, 40, 2048, STACK, pipeline=5, tensor=2),
        Layout(10, 1, 40, 2048, STACK, pipeline=5, states=2),
        Layout(10, 1, 40, 2048, STACK, shards=10),
        Layout(10, 1, 40, 2048, STACK, tensor=2, states=5),
    ],
)
def test_the_order_is_the_best_of_all(seed: int, layout: Layout) -> None:
    cluster = machines(5, seed=seed)
    every = {order: seconds(layout, cluster, order) for order in permutations(range(5))}
    found = order_of(LLAMA, layout, cluster)
    assert every[found] <= min(every.values()) * 1.002
    assert every[found] <= every[0, 1, 2, 3, 4]


def test_a_choice_is_the_best_layout_on_its_best_machines() -> None:
    """Of every variant of every mesh in each of the six orders."""
    cluster = machines(3, each=1, seed=1)
    asked = Asked(1024, 24, conditions=Conditions(conditions(("rows<=2,chunks=1",), "--require")))
    small = shape_of("llama-1.1b")
    every = [
        forecast(small, [layout], cluster.placed(order), [memory(small, layout)], 10**12)[0].seconds
        for cell in cells(small, asked, cluster)
        for layout in variants(small, asked, cell)
        if memory(small, layout).process <= cluster.groups[0].device.memory_bytes
        for order in permutations(range(3))
    ]
    best = choose(small, asked, cluster, 1).plans[0]
    assert best.seconds == pytest.approx(min(every), rel=1e-9)
    assert best.given >= best.seconds


def test_many_machines_are_annealed_the_same_way_for_a_seed() -> None:
    """A ring through twelve machines whose only fast links make one ring, numbered at random."""
    ring = list(range(12))
    random.Random(3).shuffle(ring)
    fast = {frozenset((a, b)) for a, b in zip(ring, ring[1:] + ring[:1], strict=True)}

    def cost(order: Any) -> float:
        links = zip(order, [*order[1:], order[0]], strict=True)
        return sum(0.0 if frozenset(link) in fast else 1.0 for link in links)

    found = least(cost, 12)
    assert cost(found) == 0.0
    assert found == least(cost, 12)


def test_a_plan_carries_the_order_and_the_answer_says_the_gain(tmp_path: Path) -> None:
    """Two pairs of machines that are near each other, numbered crosswise."""
    path, plan = tmp_path / "cluster.yaml", tmp_path / "plan.yaml"
    near = [[20 if (i - j) % 2 == 0 else 2 for j in range(4)] for i in range(4)]
    path.write_text(yaml.safe_dump({"spec": "4 x 2 H100-SXM", "rates": near, "unit": "GB/s"}))
    words = ["plan", "llama3-8b", "--hardware", str(path), "--require", "pipeline=2,data=4,zero=1"]
    more = ["--set", "train.sequence=4096", "--set", "train.batch_tokens=256K"]
    made = json.loads(
        CliRunner().invoke(main, [*words, *more, "--json", "--out", str(plan)]).output
    )
    best = made["plans"][0]
    order = best["machines"]
    assert {frozenset(order[:2]), frozenset(order[2:])} == {frozenset((0, 2)), frozenset((1, 3))}
    assert best["seconds_as_numbered"] > 1.01 * best["step_seconds"]
    assert list(read_plan(plan).machines) == order
    text = " ".join(CliRunner().invoke(main, [*words, *more]).output.split())
    assert f"in the order {', '.join(map(str, order))}" in text


def test_a_matrix_of_the_devices_of_one_machine_has_each_of_them_as_a_node(tmp_path: Path) -> None:
    path = tmp_path / "one.yaml"
    rates = [[0, 40, 20], [40, 0, 20], [20, 20, 0]]
    path.write_text(yaml.safe_dump({"spec": "3xRTX-4090", "rates": rates, "unit": "GB/s"}))
    made = parse_spec(str(path))
    assert (made.nodes, made.groups[0].node, made.count) == (3, 1, 3)
    assert made.rates[0][1] == 40e9


def test_ranks_are_those_of_the_plan_whoever_numbers_the_machines() -> None:
    def rank(started: int, order: tuple[int, ...], **more: str) -> int:
        here = {"RANK": str(started), "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", **more}
        return int(moved(here, order)["RANK"])

    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert [rank(i, (0, 2, 1)) for i in range(6)] == [0, 1, 4, 5, 2, 3]
    assert [rank(i, (2, 0, 1), **agent) for i in range(6)] == [2, 3, 4, 5, 0, 1]
    with pytest.raises(OutsizeError, match="rank 0 on machine 2, and machine 0 serves"):
        rank(0, (2, 0, 1))
    with pytest.raises(OutsizeError, match="for 2 machines, and 6 workers of 2 a machine"):
        rank(0, (1, 0), **agent)
    with pytest.raises(OutsizeError, match="expected each of 0 to 2 once"):
        PlanFile(None, machines=(0, 1, 1))  # type: ignore[arg-type]
