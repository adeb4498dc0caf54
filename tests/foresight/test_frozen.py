"""Decoders of which parts are frozen as the planner for other hardware has them: bytes beside what
the runtime foretells of its own run, operations beside sums by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from outsize.cli.elsewhere_tuned import _limited
from outsize.cli.main import main
from outsize.foresight.layout import Layout
from outsize.foresight.memory import HOSTED, workers
from outsize.foresight.planning.layouts import STACK
from outsize.foresight.planning.written import plan_of
from outsize.foresight.shape import Shape
from outsize.hardware import Cluster, parse_spec
from outsize.models.config import DecoderConfig
from outsize.models.families import parse
from outsize.models.presets import PRESETS
from outsize.optim import AdamW
from outsize.plan import Precision
from outsize.plan.file import read_plan
from outsize.search import PlanRequest, predict
from outsize.train.tuned import tuned

TOKENS, LAYERS, WIDE, INNER, RANK = 64, 4, 64, 176, 4
KEYS = 32
# Of a block: elements of its matrices, and what these take and give.
MATRICES = 2 * WIDE * (WIDE + KEYS) + 3 * WIDE * INNER
FEATURES = 2 * (2 * WIDE) + 2 * (WIDE + KEYS) + 3 * (WIDE + INNER)
LORA, CODES, LAST = f"adapt.lora.rank={RANK}", "weights=int8:16", "train.only=[blocks.2,blocks.3]"


@cache
def config(*sets: str) -> DecoderConfig:
    return _limited(parse({**PRESETS["tiny"], "num_hidden_layers": LAYERS}), "tiny", sets)


@cache
def shape(*sets: str) -> Shape:
    return tuned("tiny", config(*sets), TOKENS, "bf16", parse_spec("8xH100-SXM"))


def layout(devices: int = 1, rows: int = 2, batch: int = 16, **more: object) -> Layout:
    return Layout(devices, rows, batch, TOKENS, STACK, sequence_parallel=False, **more)


def foretold(sets: tuple[str, ...], lay: Layout, cluster: Cluster | None = None) -> list[int]:
    """Peaks of the stages as the runtime foretells its own run, on 8 H100s by default."""
    cluster = cluster or parse_spec("8xH100-SXM")
    precision = Precision.named("bfloat16")
    plan = plan_of(shape(*sets), lay)
    request = PlanRequest(
        lay.batch, TOKENS, precision, AdamW(), mesh=plan.mesh, shards=plan.shards,
        pipeline=plan.pipeline if lay.pipeline > 1 else None,
    )  # fmt: skip
    made = predict(config(*sets), request, plan, cluster.hardware())
    return [one.peak for one in made.ranks] or [made.peak]


@pytest.mark.parametrize(
    ("sets", "devices", "more", "over"),
    [
        ((LORA,), 1, {"recompute": "full"}, 0.0),
        ((LORA,), 2, {"shards": 2}, 0.01),  # pages of what is gathered
        ((LORA,), 2, {"pipeline": 2, "batch": 2}, 0.03),  # one microbatch: nothing else is said
        ((LORA, CODES), 2, {"states": 2}, 0.0),
        ((LAST,), 2, {"tensor": 2}, 0.0),
        ((LAST,), 2, {"pipeline": 2}, 0.06),  # messages of a stage that keeps next to nothing
    ],
)
def test_bytes_are_never_under_those_of_the_runtime(
    sets: tuple[str, ...], devices: int, more: dict[str, object], over: float
) -> None:
    lay = layout(devices, **more)
    found = [one.tensors for one in workers(shape(*sets), lay, HOSTED).values()]
    for one, peak in zip(found, foretold(sets, lay), strict=True):
        assert peak <= one <= peak * (1 + over)


def test_operations_are_those_of_what_is_trained() -> None:
    """A frozen matrix has no product for its own gradient, what lies before all that is trained no
    backward pass; an update of rank R is two products more, and four back."""
    rows = 2
    played = shape(LORA).module.rehearsed(rows, 1, False)
    ahead, back = (sum(2 * m * k * n * times for (m, k, n, _), times in cost.work.products.items())
                   for cost in (played.forward[2], played.backward[2]))  # fmt: skip
    assert ahead == 2 * rows * TOKENS * (MATRICES + RANK * FEATURES)
    assert back == 2 * rows * TOKENS * (MATRICES + 2 * RANK * FEATURES)
    played = shape(LAST).module.rehearsed(rows, 1, False)
    assert not played.backward[1].work.products
    assert not played.forward[1].allocates


def test_a_processor_is_rehearsed_as_it_multiplies() -> None:
    """What holds its states in the memory of its host is no other kind of device."""
    cluster = parse_spec("8xH100-SXM")
    (group,) = cluster.groups
    here = replace(cluster, groups=(replace(group, device=replace(group.device, kind="cpu")),))
    own, lay = tuned("tiny", config(LAST), TOKENS, "bf16", here), layout()
    found = [one.tensors for one in workers(own, lay, HOSTED).values()]
    assert found == foretold((LAST,), lay, here)


# -- what a user asks ------------------------------------------------------------------------------


def asked(*more: str) -> Result:
    return CliRunner().invoke(main, ["plan", *more])


def test_a_plan_with_frozen_parts_is_chosen_and_written(tmp_path: Path) -> None:
    out = tmp_path / "plan.yaml"
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**PRESETS["tiny"], "num_hidden_layers": LAYERS}))
    small = ("--set", "train.sequence=64", "--set", "train.batch_tokens=1024", "--json")
    same = (str(path), "--hardware", "2xH100-SXM", *small, "--require", "tensor=1,rows=2")
    whole = json.loads(asked(*same).output)["plans"][0]
    found = asked(*same, "--set", LORA, "--out", str(out))
    assert found.exit_code == 0, found.output
    best = json.loads(found.output)["plans"][0]
    assert best["bytes"]["gradients"] == 4 * LAYERS * RANK * FEATURES
    assert whole["bytes"]["gradients"] > 10 * best["bytes"]["gradients"]
    plan = read_plan(out)
    assert plan.plan.sequence == TOKENS
    assert plan.parameters


@pytest.mark.parametrize(
    ("model", "more", "words"),
    [
        ("tiny", ("--set", "weights=int4:16"), "weights of int4:16 are frozen, and nothing else"),
        ("tiny", ("--set", "train.only=[blocks.9]"), "train.only"),
        ("tiny", ("--set", "adapt.lora.rank=0"), "adapt.lora.rank"),
        ("tiny", ("--set", "adapt.lora.rang=2"), "unknown key; did you mean"),
        ("tiny", ("--set", LORA, "--require", "sequence-parallel=1"), "beside frozen parts"),
        ("gpt3-175b", ("--set", LORA), "gpt3-175b: frozen parts are rehearsed"),
        ("some.where:factory", ("--set", LORA), "a factory's module says what is trained"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(
    model: str, more: tuple[str, ...], words: str
) -> None:
    found = asked(model, "--hardware", "2xH100-SXM", *more)
    assert found.exit_code == 2, found.output
    assert words in found.output
    assert len(found.output.strip().splitlines()) == 1
