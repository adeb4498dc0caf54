"""Factored weights that are made anew now and then: against a plain loop in which each weight is
the product of two tensors, wherever factors and states rest, with the bytes that are foretold."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import anywhere
import pytest
import streamed
import torch
from plain import loss_of
from rates import known_hardware
from subjects import SEQUENCE, config_of
from threads import play
from torch.func import functional_call

from outsize.collectives import Mesh
from outsize.errors import OutsizeError
from outsize.memory import Ledger
from outsize.models.build import build, uncoded
from outsize.optim import AdamW
from outsize.parallel.divide import divide
from outsize.plan import Pipelined, Precision, zero
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.making import NativeModel, make_job
from outsize.runtime.recipe import Here, Recipe
from outsize.runtime.special.refactoring import balanced
from outsize.search import PlanRequest, predict
from outsize.techniques.wirings.factored_weights import FactoredWeights, Refactored
from outsize.train.metrics import read_metrics
from outsize.train.resolve import resolve
from outsize.train.setup import set_up

RANK, ALPHA, GAP, STEPS, CLIP, RATE, DECAY, LAYERS = 3, 6.0, 2, 5, 0.5, 1e-2, 0.1, 1
NAME = "refactored"
OWN = {NAME: Refactored(GAP, recovery=2)}
PLAIN = {"num_hidden_layers": LAYERS}
FACTORED = {**PLAIN, "factored_weights": {"rank": RANK, "alpha": ALPHA}}
A, B = ".beside.a.weight", ".beside.b.weight"


def model_of(precision="float64"):
    dtype = torch.float64 if precision == "float64" else torch.float32
    return build(config_of(anywhere.FAMILY, **FACTORED), seed=1, dtype=dtype)


def recipe_of(**changes):
    own = {name: replace(one, **changes) for name, one in OWN.items()}
    return Recipe(AdamW(weight_decay=DECAY), CLIP, techniques=own)


def plan_of(precision="float64", **changes):
    rows = min(2, 4 // changes.get("mesh", Mesh()).rows)
    return streamed.plan_of(
        precision, segments=LAYERS + 2, stages=per_segment(LAYERS + 2), rows=4,
        microbatch_rows=rows, approximate=(NAME,), stream=anywhere.Stream(512), **changes,
    )  # fmt: skip


def optimizers(leaves):
    return [
        torch.optim.AdamW([x], lr=1.0, betas=(0.9, 0.95), weight_decay=DECAY * (x.ndim > 1))
        for x in leaves.values()
    ]


def product(leaves, name):
    return ALPHA / RANK * leaves[f"{name}{B}"] @ leaves[f"{name}{A}"]


@cache
def by_hand(reset=True):
    """All factors after each step."""
    model = model_of()
    leaves = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    names = [n.removesuffix(A) for n in leaves if n.endswith(A)]
    plain = uncoded(model)
    own, found = optimizers(leaves), []
    for step, batch in enumerate(anywhere.data_of(STEPS)):
        if step and step % GAP == 0:
            for name in names:
                u, s, v = torch.linalg.svd(product(leaves, name).detach() * RANK / ALPHA)
                u, s, v = u[:, :RANK], s[:RANK].sqrt(), v[:RANK]
                sign = torch.stack([c[c.abs().argmax()].sign() for c in u.T])
                leaves[f"{name}{B}"].data = u * s * sign
                leaves[f"{name}{A}"].data = (s * sign)[:, None] * v
            own = optimizers(leaves) if reset else own
        rate = RATE * (1e-3 if reset and step >= GAP and step % GAP == 0 else 1)
        given = {n: x for n, x in leaves.items() if ".beside." not in n}
        given |= {f"{name}.weight": product(leaves, name) for name in names}
        loss = functional_call(Loss(plain), {f"model.{n}": x for n, x in given.items()}, batch)
        grads = torch.autograd.grad(loss, list(leaves.values()))
        for x, g in zip(leaves.values(), grads, strict=True):
            x.grad = g
        torch.nn.utils.clip_grad_norm_(list(leaves.values()), CLIP)
        for one in own:
            one.param_groups[0]["lr"] = rate
            one.step()
        found.append({n: x.detach().clone() for n, x in leaves.items()})
    return found


class Loss(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        return loss_of(self.model, batch)


WAYS = {
    "all on tiers": lambda: anywhere.tiers(plan_of(), every=True),
    "zero 3, 4 workers, a tier": lambda: anywhere.tiers(
        plan_of(mesh=Mesh(4), shards=zero(3, 4))
    ),
    "tensor": lambda: plan_of(mesh=Mesh(tensor=2)),
    "pipeline, zero 1": lambda: plan_of(
        mesh=Mesh(2, pipeline=2), shards=zero(1, 2), pipeline=Pipelined("1f1b")
    ),
}  # fmt: skip


def run_of(plan, recipe, data, resumed=None):
    """Of a worker: the weights after each step, with states and notes; from where one was."""

    def run(world):
        model, found = model_of(plan.precision.compute), []
        cuts = divide(model, world, plan)
        with streamed.memory() as stores:
            job = Job(NativeFlow(model, plan), plan, recipe, Here(world, stores=stores), cuts)
            if resumed is not None:
                weights, states, counts, notes = resumed
                job.method.recall(notes)
                job.load(lambda n, out: out.copy_(weights[n]), lambda n, out: out.copy_(states[n]))
                job.restore_counts(counts)
            for batch in data:
                job.step(batch.rows(*plan.rows_at(job.place)), RATE)
                found.append((*streamed.snapshot(job), job.update_counts(), job.method.notes()))
            job.close()
        return found

    return run


@pytest.mark.parametrize("way", WAYS)
def test_a_job_is_a_plain_loop_over_products_of_two_tensors(way, monkeypatch):
    anywhere.small(monkeypatch)
    plan = WAYS[way]()
    for found in play(plan.mesh, run_of(plan, recipe_of(), anywhere.data_of(STEPS))):
        for (mine, *_), theirs in zip(found, by_hand(), strict=True):
            assert mine.keys() == theirs.keys()
            for name in mine:
                torch.testing.assert_close(mine[name], theirs[name], rtol=1e-10, atol=1e-10)
        assert set(found[-1][2].values()) == {1}  # the last step is the first after a reset


def test_states_may_stay():
    (found,) = play(Mesh(), run_of(plan_of(), recipe_of(reset=False), anywhere.data_of(STEPS)))
    for name, theirs in by_hand(reset=False)[-1].items():
        torch.testing.assert_close(found[-1][0][name], theirs, rtol=1e-10, atol=1e-10)
    assert set(found[-1][2].values()) == {STEPS}


def test_a_run_goes_on_bitwise_from_any_step():
    plan, data = plan_of("float32"), anywhere.data_of(STEPS)
    (whole,) = play(Mesh(), run_of(plan, recipe_of(), data))
    for cut in (GAP, GAP + 1):  # before factors are made anew, and while the rate rises
        (rest,) = play(Mesh(), run_of(plan, recipe_of(), data[cut:], whole[cut - 1]))
        for mine, theirs in zip(rest, whole[cut:], strict=True):
            for one, other in zip(mine[:2], theirs[:2], strict=True):
                assert all(torch.equal(one[name], x) for name, x in other.items())
            assert mine[2:] == theirs[2:]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_factors_are_alike_large_and_their_product_stays(dtype):
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*s, generator=draw).to(dtype) for s in ((3, 7), (5, 3)))
    new_a, new_b = balanced(10 * a, b)
    limit = 1e-12 if dtype is torch.float64 else 0.2
    torch.testing.assert_close(new_b @ new_a, 10 * b @ a, rtol=limit, atol=limit)
    grams = new_a @ new_a.T, new_b.T @ new_b
    torch.testing.assert_close(*grams, rtol=limit, atol=limit)
    assert float(grams[0].diag().diff().max()) < 0 and new_a.dtype is dtype
    zero = torch.zeros_like(b)
    assert balanced(a, zero) == (a, zero)


def test_bytes_are_those_foretold():
    config, plan = config_of(anywhere.FAMILY, **FACTORED), plan_of("float32")
    ids = torch.randint(0, 53, (4, SEQUENCE))
    batch = replace(anywhere.data_of(1)[0], ids_BS=ids, targets_BS=torch.roll(ids, -1, 1),
                    bounds=((0, SEQUENCE),) * 4)  # fmt: skip
    recipe = recipe_of()
    request = PlanRequest(
        4, SEQUENCE, Precision.named("float32"), recipe.optimizer, CLIP, documents=(0, SEQUENCE),
        approximate=(NAME,), techniques=recipe.techniques,
    )  # fmt: skip
    made, ledger = predict(config, request, plan, known_hardware()), Ledger()
    job = make_job(NativeModel(model_of("float32")), plan, recipe, Here(ledger=ledger))
    for _ in range(GAP + 1):
        job.step(batch, 1e-3)
    live = {k: n for k, n in ledger.live.items() if n}
    with torch.device("meta"):
        plain = dict(build(config_of(anywhere.FAMILY, **PLAIN)).named_parameters())
    wanted = sum(
        RANK * sum(p.shape) if p.ndim == 2 and n.startswith("blocks") else p.numel()
        for n, p in plain.items()
    )
    assert live["parameters"] == live["gradients"] == 4 * wanted == made.static["parameters"]
    assert live["optimizer"] == 8 * wanted == made.static["optimizer"]
    peak = job.report.trace.peak()
    assert peak <= made.peak * 1.02 and made.peak <= peak * 1.02


def test_a_run_keeps_its_factors_and_is_exported_as_a_plain_model(runs):
    from outsize.checkpoint.adapters import load, model_directory
    from outsize.serve.export import export

    said = {"factored_weights__rank": 4, "plan__approximate": f"[{NAME}]", "refactored__gap": 2}
    runs.train(**said, train__steps=2, output=runs.home / "cut")
    runs.resume(runs.home / "cut", "train.steps=3")
    assert len([r for r in read_metrics(runs.home / "cut") if "loss" in r]) == 3
    place = model_directory(runs.home / "cut")
    model = load(place)
    assert {n.split(".")[-4] for n, _ in model.named_parameters() if n.endswith(A)} >= {"q", "down"}
    export(runs.home / "cut", "hf", runs.home / "plain")
    plain, ids = load(runs.home / "plain"), torch.arange(9)[None]
    assert plain.config.weights is None
    torch.testing.assert_close(plain(ids), model(ids), rtol=1e-4, atol=1e-4)


def test_what_does_not_go_with_it():
    tiny = ("model=tiny", "train.steps=1", "precision=float32", "train.sequence=16",
            "train.batch_tokens=32")  # fmt: skip
    with pytest.raises(OutsizeError, match="no two factors of a weight are trained"):
        set_up(resolve(None, (*tiny, "plan.approximate=[refactored]")))
    with pytest.raises(OutsizeError, match=r"100 is above the width 64 of attention\.q"):
        set_up(resolve(None, (*tiny, "factored_weights.rank=100")))
    with pytest.raises(OutsizeError, match=r"factored_weights is 7; expected rank and alpha"):
        config_of(anywhere.FAMILY, factored_weights=7)
    with pytest.raises(OutsizeError, match="weights: int4 is decoded for plain products"):
        from outsize.models.coding import asked

        build(asked(config_of(anywhere.FAMILY, **FACTORED), "int4"))
    own = FactoredWeights(RANK, ALPHA)
    config = own.limited(config_of(anywhere.FAMILY))
    assert own.limited(config) is config and config.weights.rank == RANK
    with pytest.raises(OutsizeError, match="the model has other factors"):
        FactoredWeights(RANK + 1).limited(config)
