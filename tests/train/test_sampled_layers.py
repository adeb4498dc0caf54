"""LISA and BAdam: against a plain loop with an optimizer for each turn, on several workers, after
switches and resumes, and the bytes that they hold."""

from __future__ import annotations

from dataclasses import replace

import anywhere
import pytest
import streamed
import torch
from plain import loss_of
from rates import known_hardware
from subjects import SEQUENCE, config_of
from threads import play

from outsize.collectives import Mesh
from outsize.errors import OutsizeError
from outsize.memory import Ledger
from outsize.models.build import build
from outsize.optim import AdamW
from outsize.parallel.divide import divide
from outsize.plan import Precision, zero
from outsize.runtime import Job, NativeFlow
from outsize.runtime.making import NativeModel, make_job
from outsize.runtime.recipe import Here, Recipe
from outsize.search import PlanRequest, predict
from outsize.techniques.badam import BAdam
from outsize.techniques.lisa import Lisa
from outsize.train.metrics import read_metrics
from outsize.train.resolve import resolve
from outsize.train.setup import set_up

LAYERS, GAP, STEPS, CLIP, RATE, SEED = 2, 2, 5, 0.5, 1e-2, 3
SETTINGS = {"lisa": Lisa(1, GAP), "badam": BAdam(GAP)}


def model_of(precision="float64", layers=LAYERS):
    dtype = torch.float64 if precision == "float64" else torch.float32
    return build(config_of("llama, untied", num_hidden_layers=layers), seed=1, dtype=dtype)


def plan_of(name, precision="float64", **changes):
    from outsize.plan.plan import per_segment

    return streamed.plan_of(
        precision, segments=LAYERS + 2, stages=per_segment(LAYERS + 2), rows=4, microbatch_rows=2,
        approximate=(name,), **changes,
    )  # fmt: skip


def recipe_of(name, **changes):
    said = {name: replace(SETTINGS[name], **changes)}
    return Recipe(AdamW(weight_decay=0.1), CLIP, techniques=said, seed=SEED)


def by_hand(name, data):
    """Weights after each step, and the layers that each step trained."""
    model, own = model_of(), SETTINGS[name]
    named = dict(model.named_parameters())
    states, found, layers = {}, [], []
    for step, batch in enumerate(data):
        now = own.layers(SEED, step // GAP, LAYERS)
        inside = tuple(f"blocks.{i}." for i in now)
        trained = {
            n for n in named
            if n.startswith(inside) or (name == "lisa" and not n.startswith("blocks."))
        }  # fmt: skip
        states = {n: one for n, one in states.items() if n in trained}
        for name_, parameter in named.items():
            parameter.grad = None
            parameter.requires_grad_(name_ in trained)
        loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_([named[n] for n in sorted(trained)], CLIP)
        for n in sorted(trained):
            decay = 0.1 if named[n].ndim > 1 else 0.0
            if n not in states:
                states[n] = torch.optim.AdamW(
                    [named[n]], lr=RATE, betas=(0.9, 0.95), weight_decay=decay
                )
            states[n].step()
        found.append({n: p.detach().clone() for n, p in named.items()})
        layers.append(tuple(now))
    return found, layers


WAYS = {
    "one worker": {},
    "zero 2": {"mesh": Mesh(2), "shards": zero(2, 2)},
    "tensor": {"mesh": Mesh(tensor=2)},
}
PAIRS = [("lisa", "one worker"), ("lisa", "tensor"), ("badam", "zero 2")]


@pytest.mark.parametrize(("name", "way"), PAIRS, ids=map(", ".join, PAIRS))
def test_a_job_is_a_plain_loop_with_optimizers_that_come_and_go(name, way):
    plan, data = plan_of(name, **WAYS[way]), anywhere.data_of(STEPS)

    def run(world):
        model = model_of()
        cuts = divide(model, world, plan)
        job = Job(NativeFlow(model, plan), plan, recipe_of(name), Here(world), cuts=cuts)
        found = []
        for batch in data:
            job.step(batch.rows(*plan.rows_at(job.place)), RATE)
            found.append(streamed.snapshot(job)[0])
        blocks = {n.split(".")[1] for n in job.state_names() if n.startswith("blocks")}
        job.close()
        assert all(p.requires_grad for p in model.parameters())
        return found, blocks

    expected, layers = by_hand(name, data)
    assert len(set(layers)) > 1
    for found, blocks in play(plan.mesh, run):
        assert blocks == {str(i) for i in layers[-1]}
        for mine, theirs in zip(found, expected, strict=True):
            for key in theirs:
                torch.testing.assert_close(mine[key], theirs[key], rtol=1e-10, atol=1e-10)


def test_each_setting_draws_as_it_says():
    turns = range(12)
    lisa = [tuple(Lisa(2).layers(0, turn, 6)) for turn in turns]
    assert len(set(lisa)) > 6 and all(len(set(two)) == 2 for two in lisa)
    assert {i for two in lisa for i in two} == set(range(6))
    assert lisa != [tuple(Lisa(2).layers(1, turn, 6)) for turn in turns]
    assert [*BAdam().layers(0, 4, 3), *BAdam().layers(0, 5, 3)] == [1, 2]
    assert [*BAdam(order="descending").layers(0, 4, 3)] == [1]
    random = [BAdam(order="random").layers(0, turn, 4)[0] for turn in range(8)]
    assert sorted(random[:4]) == sorted(random[4:]) == [0, 1, 2, 3] and random[:4] != random[4:]


@pytest.mark.parametrize(("precision", "steps"), [("float32", 6), ("bfloat16", 4)])
def test_bytes_after_many_switches_are_those_after_one(precision, steps):
    """And what is foretold of them."""
    plan = plan_of("lisa", precision)
    recipe, named = recipe_of("lisa", gap=1), Precision.named(precision)
    ids = torch.randint(0, 53, (4, SEQUENCE))
    batch = replace(anywhere.data_of(1)[0], ids_BS=ids, targets_BS=torch.roll(ids, -1, 1),
                    bounds=((0, SEQUENCE),) * 4)  # fmt: skip
    config = config_of("llama, untied", num_hidden_layers=LAYERS)
    request = PlanRequest(
        4, SEQUENCE, named, recipe.optimizer, CLIP, documents=(0, SEQUENCE),
        approximate=("lisa",), techniques=recipe.techniques,
    )  # fmt: skip
    made = predict(config, request, plan, known_hardware())
    ledger = Ledger()
    job = make_job(NativeModel(model_of(precision)), plan, recipe, Here(ledger=ledger))
    live, peaks, drawn = [], [], set()
    for _ in range(steps):
        job.step(batch, 1e-3)
        live.append({k: n for k, n in ledger.live.items() if n})
        peaks.append(job.report.trace.peak())
        drawn.add(next(n.split(".")[1] for n in job.state_names() if n.startswith("blocks")))
    assert live[1] == live[-1] and len(drawn) > 1
    sizes = {n: p.numel() for n, p in job.owners.items()}
    one = sum(size for n, size in sizes.items() if n.startswith("blocks.0."))
    ends = sum(size for n, size in sizes.items() if not n.startswith("blocks."))
    assert live[-1]["optimizer"] == 8 * (one + ends) == made.static["optimizer"]
    assert {k: n for k, n in made.static.items() if n and k != "data"} == {
        k: n for k, n in live[-1].items() if k in made.static and k != "data"
    }
    assert max(peaks) <= made.peak * 1.02 and made.peak <= max(peaks) * 1.02


def test_a_run_goes_on_bitwise_within_a_turn_and_between_two(runs):
    """In bfloat16 what a checkpoint has of layers that are left is not as wide as the others."""
    said = {
        "precision": "bfloat16",
        "plan__approximate": "[badam]",
        "badam__gap": 2,
        "train__steps": 4,
        "learning_rate__shape": "constant",
        "learning_rate__warmup": 0,
    }
    runs.train(**said, output=runs.home / "whole")
    runs.train(**{**said, "train__steps": 2}, output=runs.home / "cut")
    for steps in (3, 4):
        runs.resume(runs.home / "cut", f"train.steps={steps}")
    both = [
        [r["loss"] for r in read_metrics(runs.home / one) if "loss" in r]
        for one in ("whole", "cut")
    ]
    assert both[0] == both[1] and len(both[0]) == 4


def test_what_does_not_go_with_it():
    tiny = ("model=tiny", "train.steps=1", "precision=float32", "train.sequence=16",
            "train.batch_tokens=32")  # fmt: skip
    with pytest.raises(OutsizeError, match=r"lisa is set, and plan\.approximate is \[\]"):
        set_up(resolve(None, (*tiny, "lisa.count=1")))
    with pytest.raises(OutsizeError, match="both change the backward pass"):
        resolve(None, (*tiny, "plan.approximate=[lisa, badam]"))
    with pytest.raises(OutsizeError, match="a pipeline"):
        set_up(resolve(None, (*tiny, "plan.approximate=[lisa]", "mesh=pipeline=2")))
    with pytest.raises(OutsizeError, match=r"lisa\.count is 2, and the model has 2 layers, which"):
        set_up(resolve(None, (*tiny, "plan.approximate=[lisa]")))
    with pytest.raises(OutsizeError, match="states below the device"):
        streamed.resting(plan_of("badam"), optimizer="host")
    model, plan = model_of(), plan_of("badam")
    for parameter in model.blocks[1].parameters():
        parameter.requires_grad_(False)
    with pytest.raises(OutsizeError, match="take turns, and layer 1 has nothing that is trained"):
        Job(NativeFlow(model, plan), plan, recipe_of("badam"))
