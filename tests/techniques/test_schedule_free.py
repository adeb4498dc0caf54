"""Schedule-free AdamW: the authors' formulas in a plain loop, the average in whatever sees a model
but a training step, wherever weights and states rest, and a job that no evaluation changes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import anywhere
import pytest
import streamed
import torch
from anywhere import Given
from plain import loss_of
from rates import known_hardware
from subjects import config_of
from threads import play

from outsize.collectives import Mesh
from outsize.errors import OutsizeError
from outsize.optim.optimizer import Rates, precision_for
from outsize.parallel.divide import divide
from outsize.plan import Precision, zero
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.techniques.optim.schedule_free import ScheduleFree, Settings, share_of
from outsize.train.derive import before_plan
from outsize.train.prepare import prepare
from outsize.train.resolve import optimizer_of, resolve
from outsize.train.setup import request_of
from outsize.train.state import copied, give

BETA, KEEPS, DECAY, RATE, WARMUP, STEPS, ROWS = 0.8, 0.95, 0.1, 3e-2, 2, 4, 4
OWN = ScheduleFree(RATE, DECAY, Settings((BETA, KEEPS)), WARMUP)


class Authors:
    """One weight, y, as the authors' package has it, which swaps x in for y and back."""

    def __init__(self, y, decay):
        self.y, self.z, self.v = y, y.clone(), torch.zeros_like(y)
        self.decay, self.most, self.sum, self.k = decay, 0.0, 0.0, 0

    def step(self, g, lr):
        self.k += 1
        self.most = max(self.most, lr)
        self.sum += self.most**2
        c = self.most**2 / self.sum
        self.v = KEEPS * self.v + (1 - KEEPS) * g**2
        g = g / ((self.v / (1 - KEEPS**self.k)).sqrt() + 1e-8) + self.decay * self.y
        self.y = (1 - c) * self.y + c * self.z + lr * (BETA * (1 - c) - 1) * g
        self.z = self.z - lr * g

    @property
    def x(self):
        return self.y + (1 - 1 / BETA) * (self.z - self.y)


def rate(step):
    return RATE * min(1.0, (step + 1) / WARMUP) * (1 if step < 3 else 0.5)


def test_an_update_is_the_authors():
    draw = torch.Generator().manual_seed(0)
    first, *gradients = torch.randn(9, 5, 3, dtype=torch.float64, generator=draw)
    theirs, x = Authors(first.clone(), DECAY), first.clone()
    state = {name: torch.zeros_like(x) for name in ("ahead", "exp_avg_sq")}
    for step, g in enumerate(gradients):
        theirs.step(g, rate(step))
        OWN.update(x, g, state, Rates(step + 1, rate(step), DECAY))
        OWN.taken_at(x, state, y := torch.empty_like(x))
        torch.testing.assert_close((x, y), (theirs.x, theirs.y), rtol=1e-10, atol=1e-10)
    shares = [share_of(n, 0) for n in (1, 2, 3)]
    assert shares == [1, 1 / 2, 1 / 3]


# -- in a job --------------------------------------------------------------------------------------


@cache
def by_hand():
    """After each step: the loss at x of the first batch, and x."""
    return loop(anywhere.data_of(STEPS))


def loop(data):
    model = streamed.model_of(anywhere.FAMILY, "float64")
    named = dict(model.named_parameters())
    own = {n: Authors(p.detach().clone(), DECAY * (p.ndim > 1)) for n, p in named.items()}
    found = []
    for step, batch in enumerate(data):
        model.zero_grad()
        loss_of(model, batch).backward()
        for name, one in own.items():
            one.step(named[name].grad, rate(step))
            named[name].data = one.x
        with torch.no_grad():
            loss = float(loss_of(model, data[0]))
        found.append((loss, {n: one.x for n, one in own.items()}))
        for name, one in own.items():
            named[name].data = one.y
    return found


def plan_of(**changes):
    plan = anywhere.plan_of(Given(OWN), rows=ROWS, **changes)
    return replace(plan, precision=precision_for(OWN, plan.precision))


WAYS = {
    "zero 1": lambda: plan_of(mesh=Mesh(2), shards=zero(1, 2)),
    "zero 3, a tier": lambda: anywhere.tiers(plan_of(mesh=Mesh(2), shards=zero(3, 2))),
    "all on tiers": lambda: anywhere.tiers(plan_of(), every=True),
    "tensor": lambda: plan_of(mesh=Mesh(tensor=2)),
    "pipeline": lambda: plan_of(mesh=Mesh(pipeline=2), pipeline=anywhere.Pipelined("1f1b")),
}


def run_of(plan, cut=0, evaluates=True):
    """Of each worker: losses and weights behind each step. cut: where another job goes on."""
    data = anywhere.data_of(STEPS)

    def made(world, stores):
        model = streamed.model_of(anywhere.FAMILY, "float64")
        cuts = divide(model, world, plan)
        return Job(NativeFlow(model, plan), plan, Recipe(OWN), Here(world, stores=stores), cuts)

    def run(world):
        found = []
        with streamed.memory() as stores:
            job = made(world, stores)
            for step, batch in enumerate(data):
                if cut and step == cut:
                    states = copied(job)
                    job.close()
                    give(job := made(world, stores), states)
                job.step(batch.rows(*plan.rows_at(job.place)), rate(step))
                loss = None
                if evaluates:
                    first = data[0].rows(*plan.rows_at(job.place))
                    total, weight = job.evaluate(first, len(first.ids_BS))
                    loss = total / weight
                found.append((loss, streamed.snapshot(job)[0]))
            job.close()
        return found

    return run


@pytest.fixture(autouse=True)
def small(monkeypatch):
    anywhere.small(monkeypatch)


@pytest.mark.parametrize("way", WAYS)
def test_a_job_trains_at_y_and_is_evaluated_and_saved_at_x(way):
    plan = WAYS[way]()
    for found in play(plan.mesh, run_of(plan, cut=2 if "tier" in way else 0)):
        for mine, theirs in zip(found, by_hand(), strict=True):
            assert mine[0] == pytest.approx(theirs[0], rel=1e-10)
            torch.testing.assert_close(mine[1], theirs[1], rtol=1e-10, atol=1e-10)


def test_no_evaluation_and_no_resume_changes_a_bit():
    """A run with both beside one with neither."""
    plan = replace(WAYS["zero 1"](), precision=Precision.named("bfloat16"))
    plain = play(plan.mesh, run_of(plan, evaluates=False))
    for mine, theirs in zip(play(plan.mesh, run_of(plan, cut=2)), plain, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert all(torch.equal(one[1][name], w) for name, w in other[1].items())


def test_what_generates_and_what_is_given_back_is_the_average():
    plan, data = plan_of(), anywhere.data_of(2)
    model = streamed.model_of(anywhere.FAMILY, "float64")
    job = Job(NativeFlow(model, plan), plan, Recipe(OWN))
    for step, batch in enumerate(data):
        job.step(batch, rate(step))
        said = job.generate([[1, 2, 3]], 1, logprobs=True)[0]
        averages = {name: w.clone() for name, w in job.weights()}
    job.step(data[0], rate(2))
    job.close()
    (*_, (_, now)) = loop([*data, data[0]])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.data, now[name], rtol=1e-10, atol=1e-10)
        parameter.data = averages[name]
    context = model.context(torch.arange(3), (0, 3))
    logits = model.epilogue.logits(model.hidden(torch.tensor([1, 2, 3]), context))
    (token,) = said.tokens
    assert said.logprobs[0] == pytest.approx(
        float(logits[-1].detach().log_softmax(-1)[token]), rel=1e-10
    )


def test_prepare_gives_a_model_back_at_the_average():
    torch.manual_seed(0)
    model, batch = torch.nn.Linear(4, 3), (torch.randn(8, 4), torch.randn(8, 3))
    job = prepare(model, "schedule-free", loss=lambda y, b: (y - b[1]).square().mean())
    losses = [float(job.step(batch, lr=3e-2)) for _ in range(20)]
    told, weight = job.evaluate(batch)
    again = float(job.step(batch, lr=0.0))
    assert again < losses[-1] and again != told / weight
    job.load_state_dict(state := job.state_dict())
    kept = state["weights"]
    job.close()
    assert job.preparing.settings.precision.master == "float32"
    assert all(torch.equal(p, kept[name]) for name, p in model.named_parameters())
    assert losses[-1] < 0.9 * losses[0]


def test_a_run_has_no_decay_unless_it_says_so():
    tiny = ("model=tiny", "train.steps=40", "precision=float32", "train.sequence=16",
            "train.batch_tokens=32", "optimizer.name=schedule-free")  # fmt: skip
    config, device = config_of(anywhere.FAMILY), known_hardware().devices[0]
    made = before_plan(resolve(None, tiny), config, device)
    assert made.get("learning_rate.shape") == "constant"
    assert "needs no decay" in made.origins["learning_rate.shape"]
    said = resolve(None, (*tiny, "learning_rate.shape=cosine", "learning_rate.warmup=7"))
    assert before_plan(said, config, device).get("learning_rate.shape") == "cosine"
    assert optimizer_of(said.config).warmup == 7
    assert request_of(made).precision.master == "float32"


def test_a_plan_without_a_copy_of_the_weights_is_refused():
    plan = anywhere.plan_of(Given(OWN))
    model = streamed.model_of(anywhere.FAMILY, "float64")
    with pytest.raises(OutsizeError, match=r"precision\.master is None; expected float64, since"):
        Job(NativeFlow(model, plan), plan, Recipe(OWN))
