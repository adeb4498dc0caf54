"""States and activations on host memory and disk: bytes, seconds, and the choice among them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from outsize.cli.main import main
from outsize.foresight.layout import Layout, Resting
from outsize.foresight.memory import kept_by, memory
from outsize.foresight.named import shape_of
from outsize.foresight.planning.asked import Asked
from outsize.foresight.planning.choose import choose
from outsize.foresight.planning.layouts import STACK
from outsize.foresight.planning.written import plan_of
from outsize.foresight.resting import MASTER, hold, of_pass, ways
from outsize.foresight.step import held, terms, together
from outsize.hardware import parse_spec
from outsize.models.families import parse
from outsize.models.presets import PRESETS
from outsize.plan.file import read_plan, write_plan
from outsize.train.planned import file_of

LLAMA = shape_of("llama3-8b")
CARD = "RTX-4090 + 64GiB host 20GB/s + disk 5GB/s 4TiB"
ONE = Layout(1, 2, 64, 4096, STACK)


@pytest.mark.parametrize(
    "at",
    [
        Resting("", "host"), Resting("host", "host"), Resting("host", "disk"),
        Resting("disk", "disk", "host"), Resting("", "", "host"),
    ],
)  # fmt: skip
def test_what_leaves_the_device_lies_below(at: Resting) -> None:
    """A parameter has 2 bytes of weight, 4 of gradient, 12 of optimizer, wherever they are."""
    mine, kept = sum(held(LLAMA, ONE)), kept_by(LLAMA, ONE, LLAMA.layers)
    made, whole = memory(LLAMA, replace(ONE, resting=at)), memory(LLAMA, ONE)
    wanted = dict[str, float]()
    for tier, size in ((at.weights, 6 * mine), (at.optimizer, 12 * mine), (at.activations, kept)):
        wanted[tier] = wanted.get(tier, 0.0) + size
    wanted.pop("", None)
    assert made.below == pytest.approx(wanted)
    states = sum(made.states.values()) + sum(made.below.values())
    assert states == pytest.approx(18 * mine + (kept if at.activations else 0))
    assert made.process < whole.process


def test_seconds_are_those_of_the_bytes_over_the_links() -> None:
    """A host's link has both directions at once; a disk is shared and reads and writes in turn."""
    mine, kept = sum(held(LLAMA, ONE)), kept_by(LLAMA, ONE, LLAMA.layers)
    cluster = parse_spec(CARD)

    def of(at: Resting) -> tuple[float, float]:
        made = terms(LLAMA, replace(ONE, resting=at), cluster)
        return made.middle["moved"], made.end["update"]

    alone = terms(LLAMA, ONE, cluster).end["update"]
    assert of(Resting("", "host")) == pytest.approx((0, together(alone, 12 * mine / 20e9)))
    moved, update = of(Resting("host", "disk"))
    assert moved == pytest.approx((2 * 2 + 4) * mine / 20e9)
    at_end = 4 * mine / 20e9 + 2 * MASTER * mine / 5e9
    assert update == pytest.approx(together(alone, at_end))
    single = replace(ONE, batch=2, resting=Resting("host", "disk"))  # gradients begin in it
    assert of_pass(single, mine, 0.0, True) == ({"host": 2 * mine}, {"host": 4 * mine})
    both = of(Resting("", "", "host"))
    assert both == pytest.approx((kept / 20e9, alone))
    pair = parse_spec("2xRTX-4090 + 64GiB host + disk 5GB/s")
    two = replace(ONE, devices=2, shards=2, resting=Resting("disk", "disk"))
    assert hold(pair, two, {"host": 32 << 30}) and not hold(pair, two, {"host": 33 << 30})
    moved = terms(LLAMA, two, pair).middle["moved"]
    assert moved == pytest.approx(2 * (2 * 2 + 4 + 4) * mine / 2 / 5e9)


def test_what_fits_the_device_stays_there_and_what_does_not_goes_below() -> None:
    small, asked = shape_of("llama-1.1b"), Asked(1024, 16)
    roomy = parse_spec("H100-SXM + 512GiB host + disk 5GB/s")
    alone = choose(small, asked, parse_spec("H100-SXM"), 1).plans[0]
    assert choose(small, asked, roomy, 1).plans[0].layout == alone.layout
    assert not choose(LLAMA, Asked(4096, 64), parse_spec("RTX-4090"), 1).plans
    plans = choose(LLAMA, Asked(4096, 64), parse_spec(CARD), 50).plans
    assert plans and all(plan.memory.process <= plan.room for plan in plans)
    assert all(plan.memory.below.get("host", 0) <= 64 << 30 for plan in plans)
    assert any(plan.layout.whole for plan in plans), "some recomputed, so that the host has room"
    wide = parse_spec(CARD.replace("64GiB", "512GiB"))
    assert choose(LLAMA, Asked(4096, 64), wide, 1).plans[0].seconds < plans[0].seconds


def test_every_way_is_a_plan_that_this_runtime_has() -> None:
    """Of one device, and of two with nothing or with everything cut."""
    shape = shape_of("mini")
    for spec in ("RTX-4090", "2xRTX-4090"):
        cluster = parse_spec(f"{spec} + 64GiB host + disk 5GB/s")
        count = cluster.count
        for shards, states in {(1, 1), (1, count), (count, count)}:
            lay = Layout(count, 1, 8, 128, STACK, shards=shards, states=states)
            every = list(ways(lay, cluster))
            assert len(set(every)) == len(every) and every[0] == lay
            for one in every:
                plan = plan_of(shape, one)
                assert {stage.rest.optimizer for stage in plan.stages} == {
                    one.resting.optimizer or "device"
                }


def test_the_answer_says_where_states_rest_and_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    words = ["plan", "llama3-8b", "--hardware", CARD, "--set", "train.batch_tokens=256K"]
    text = CliRunner().invoke(main, words).output
    assert "gradients on host, optimizer on disk" in " ".join(text.split())
    made = json.loads(CliRunner().invoke(main, [*words, "--json", "--out", str(path)]).output)
    best = made["plans"][0]
    assert best["resting"]["optimizer"] == "disk" and best["bytes_below"]["disk"] > 80 << 30
    rest = read_plan(path).plan.stages[3].rest
    assert (rest.parameters, rest.gradients, rest.optimizer) == ("host", "host", "disk")


@pytest.mark.parametrize(
    "at", [Resting("", "host"), Resting("", "host", "", "host"), Resting("host", "host")]
)
def test_what_rests_in_part_is_what_the_first_blocks_have(at: Resting) -> None:
    """Optimizer states first, then gradients, then weights; the plan has it stage by stage, and no
    byte is in two places or none."""
    whole, some = memory(LLAMA, ONE), replace(ONE, resting=replace(at, layers=8))
    mine, ends = sum(held(LLAMA, ONE)), 2 * LLAMA.of_vocabulary
    part = (mine - ends) * 8 / LLAMA.layers
    wanted = 12 * (mine if at.weights or at.gradients else part)
    wanted += 4 * (mine if at.weights else part if at.gradients else 0)
    wanted += 2 * part if at.weights else 0
    made = memory(LLAMA, some)
    assert made.below == pytest.approx({"host": wanted})
    assert sum(made.states.values()) == pytest.approx(sum(whole.states.values()) - wanted)
    plan = plan_of(shape_of("llama3-8b"), some)
    last = {"weights": "parameters", "gradients": "gradients"}
    kind = last["weights" if at.weights else "gradients"] if at.summed else "optimizer"
    rests = [getattr(stage.rest, kind) for stage in plan.stages]
    assert rests == ["device", *["host"] * 8, *["device"] * (LLAMA.layers - 7)]


def test_only_what_must_rests_below() -> None:
    """Of as few blocks as the device lacks room for, so that a host too small for all states has a
    plan; one block fewer does not fit."""
    small, asked = shape_of("llama-1.1b"), Asked(1024, 8, memory=14 << 30)
    assert not choose(small, asked, parse_spec("RTX-4090 + 4GiB host"), 1).plans
    plan = choose(small, asked, parse_spec("RTX-4090 + 12GiB host 25GB/s"), 1).plans[0]
    lay, at = plan.layout, plan.layout.resting
    assert 0 < at.layers < small.layers and plan.memory.process <= plan.room
    fewer = replace(lay, resting=replace(at, layers=at.layers - 1))
    assert memory(small, fewer).process > plan.room
    assert 18 * sum(held(small, lay)) - sum(plan.memory.states.values()) < 12 << 30


def test_a_host_updates_beside_the_device_where_its_memory_is_known() -> None:
    """One part in so many goes over the link meanwhile; the plan says how many."""
    shape, spec = shape_of("llama-1.1b"), "RTX-4090 + 64GiB host 25GB/s"
    at = Resting("host", "host")
    lay = Layout(1, 2, 8, 1024, STACK, resting=replace(at, host=2))
    alone = replace(lay, resting=at)
    cluster = parse_spec(f"{spec} memory 60GB/s")
    mine = sum(held(shape, lay))
    device = terms(shape, replace(lay, resting=Resting()), cluster).end["update"]
    over, host = (12 + 4) * mine / 2 / 25e9, 48 * mine / 2 / 60e9
    both = terms(shape, lay, cluster).end["update"]
    assert both == pytest.approx(together(device / 2, max(over, host)))
    assert both < terms(shape, alone, cluster).end["update"]
    assert plan_of(shape, lay).stream.host == 2 and plan_of(shape, alone).stream.host == 0
    # Nanoseconds of an element: 16 B / 25 GB/s = 0.64 over the link, 48 B / 60 GB/s = 0.8 at rest,
    # 0.88 where its weight comes to the device behind it; 5 x 0.64 = 4 x 0.8, and 33 x 0.64 is
    # 24 x 0.88.
    shares = {(one.resting.host, one.resting.over) for one in ways(alone, cluster)}
    assert shares == {(0, 1), (9, 5), (57, 33)}
    assert {one.resting.host for one in ways(alone, parse_spec(spec))} == {0}


@pytest.mark.parametrize(
    ("at", "most"),
    [(Resting("host", "host", "host"), 1.3),
     (Resting("", "host", "", "host", host=3, over=2), 2.4)],  # a stage is one part, on the host
    ids=["activations below", "updates on the host"],
)  # fmt: skip
def test_a_plan_with_tiers_is_rehearsed_on_what_is_described(
    at: Resting, most: float, tmp_path: Path
) -> None:
    """Played and composed agree."""
    path, spec = tmp_path / "plan.yaml", "RTX-4090 + 1GiB host 25GB/s memory 60GB/s"
    shape = shape_of("tiny")
    lay = Layout(1, 2, 8, 64, STACK, resting=at)
    write_plan(path, file_of(plan_of(shape, lay), "tiny", parse(PRESETS["tiny"])))
    said = CliRunner().invoke(
        main, ["rehearse", str(path), "--model", "tiny", "--hardware", spec, "--json"]
    )
    assert said.exit_code == 0, said.output
    (worker,) = json.loads(said.output)["workers"]
    assert worker["played"] == pytest.approx(worker["foretold"], rel=0.01)
    assert 1 <= memory(shape, lay).tensors / worker["foretold"] < most


def test_the_device_keeps_room_for_what_comes_and_for_one_copy_of_logits() -> None:
    """By hand: two vocabularies with gradients, which are more than two parts of an update and
    share their bytes; logits in 16 bits, the last norm, and the head's own gradient."""
    whole, below = memory(LLAMA, ONE), memory(LLAMA, replace(ONE, resting=Resting("host", "disk")))
    vocab = LLAMA.vocab * LLAMA.hidden
    assert below.gathered == 2 * vocab * (2 + 4)
    assert whole.head == 2 * 4096 * (2 * LLAMA.vocab + 4 * LLAMA.hidden) + 2 * vocab
    parts = memory(LLAMA, replace(ONE, resting=Resting("", "disk"))).gathered
    assert parts == 2 * (1 << 22) * 12
    capped = memory(replace(LLAMA, capped=True), ONE).head
    assert capped == 2 * 4096 * (10 * LLAMA.vocab + 4 * LLAMA.hidden)
