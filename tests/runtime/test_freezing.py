"""Frozen layers against the plain loop: torch.optim.AdamW, layers chosen and measured by hand."""

from __future__ import annotations

import copy
from dataclasses import replace

import plain
import pytest
import torch
from subjects import ROWS, VOCAB, base_plan, config_of
from torch import nn

from outsize.errors import OutsizeError
from outsize.memory import Ledger
from outsize.models.build import build
from outsize.models.random import uniform
from outsize.optim import AdamW
from outsize.plan import Rest
from outsize.plan.plan import per_segment
from outsize.runtime import AdoptedFlow, Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.runtime.special.freezing import UNKNOWN, Freezing, changes
from outsize.techniques.frozen_by_dynamics import KEY, FrozenByDynamics

STEPS, RATE = 10, 0.6


def recipe_of(rate=RATE, clip=None, seed=0, **optimizer):
    said = {KEY: FrozenByDynamics(rate)}
    return Recipe(AdamW(**optimizer), clip, techniques=said, seed=seed)


def plan_of(**changes):
    return base_plan(**{"approximate": ("frozen-by-dynamics",), **changes})


def by_hand(model, batches, loss_of, start, clip):
    """The plain loop. start: distances to begin with. Gives losses, the trained copy, who was
    trained in each step, and the distances at the end."""
    model = copy.deepcopy(model)
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    far, losses, turns = dict(start), [], []
    for batch in batches:
        calm = sorted(far, key=far.get)[: int(RATE * len(far))]
        old = {n: p.detach().clone() for n, p in named.items()}
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        for name in calm:
            named[name].grad = None
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(float(loss.detach()))
        for name in set(far) - set(calm):
            w = old[name]
            there = w != 0
            far[name] = float(((named[name].detach() - w)[there] / w[there]).abs().mean())
        turns.append(set(far) - set(calm))
    return losses, model, turns, far


def check(job, model, batches, loss_of):
    freezing = job.method
    start = dict(freezing.distances)
    losses, expected, turns, far = by_hand(model, batches, loss_of, start, job.recipe.clip)
    assert len(set(map(frozenset, turns))) > 2, "the test must change who is frozen"
    got = []
    for batch, turn in zip(batches, turns, strict=True):
        assert freezing.frozen() == set(start) - turn
        got.append(float(job.step(batch, 1e-2)))
    assert got == pytest.approx(losses, rel=1e-10)
    weights = dict(job.weights())
    for name, parameter in expected.named_parameters():
        assert torch.allclose(weights[name], parameter, rtol=1e-9, atol=1e-11), name
    assert freezing.distances == pytest.approx(far, rel=1e-6)
    counts = {name: sum(name in turn for turn in turns) for name in start}
    assert {n: job.update_counts().get(n, 0) for n in counts} == counts


@pytest.mark.parametrize(
    ("family", "recompute"),
    [("llama", ()), ("llama, untied", ("block",)), ("gpt2", ()), ("mixtral", ("block",))],
)
def test_a_native_decoder_follows_the_plain_loop(family, recompute):
    batches = plain.batches(STEPS, ROWS, 20, VOCAB)
    model = build(config_of(family), seed=1, dtype=torch.float64)
    plan = plan_of(stages=per_segment(5, recompute))
    recipe = recipe_of(clip=0.5, seed=3, weight_decay=0.1)
    job = Job(NativeFlow(copy.deepcopy(model), plan), plan, recipe)
    check(job, model, batches, plain.loss_of)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) for _ in range(4)
        )

    def forward(self, x, y):
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.mse_loss(x, y)


def test_an_adopted_module_follows_the_plain_loop():
    model = Small().double()
    batches = [(torch.randn(6, 8).double(), torch.randn(6, 8).double()) for _ in range(STEPS)]
    plan = replace(plan_of(), rows=1, segments=6, stages=per_segment(6))
    mine = copy.deepcopy(model)
    blocks = [(f"blocks.{i}", block) for i, block in enumerate(mine.blocks)]
    flow = AdoptedFlow(mine, blocks, plan, lambda out, _: out)
    job = Job(flow, plan, recipe_of(clip=0.5, weight_decay=0.1))
    check(job, model, batches, lambda m, batch: m(*batch))
    assert all(p.requires_grad for p in mine.parameters())


def test_what_is_frozen_keeps_no_input_and_makes_no_gradient():
    """A block whose layers are all frozen keeps what norms, attention and gate need, no more."""
    batch = plain.batches(1, ROWS, 20, VOCAB)[0]
    plan = plan_of(microbatch_rows=ROWS)
    kept, made = {}, {}
    for rate in (0.0, 0.99):
        ledger = Ledger()
        model = build(config_of("llama, untied"), seed=1, dtype=torch.float64)
        job = Job(NativeFlow(model, plan), plan, recipe_of(rate), Here(ledger=ledger))
        seen = made[rate] = []
        for module in model.modules():
            if "sink" in module.__dict__:
                module.sink = recording(job.method.gradients, seen)
        job.step(batch, 1e-3)
        events = job.report.trace.events
        (last,) = (e for e in events if e.kind == "FORWARD" and e.stage == 3)
        kept[rate] = sum(last.live.values()) - sum(events[-1].live.values())
    tokens, hidden, inner = ROWS * 20, 24, 40
    # Of each block the two normed inputs and the gate's output; attention's own is kept by it.
    assert kept[0.0] - kept[0.99] >= 3 * 8 * tokens * (2 * hidden + inner) * 0.9
    assert len(made[0.0]) == 3 * 7 + 1 and len(made[0.99]) <= 1


def recording(sink, seen):
    def record(weight, compute):
        seen.append(weight)
        sink(weight, compute)

    return record


def test_every_layer_has_its_turn_before_any_has_a_second():
    batches = plain.batches(6, ROWS, 20, VOCAB)
    plan = plan_of()
    job = Job(
        NativeFlow(build(config_of("llama"), seed=1, dtype=torch.float64), plan),
        plan,
        recipe_of(0.75),
    )
    freezing, seen = job.method, []
    while any(far >= UNKNOWN for far in freezing.distances.values()):
        seen += [n for n in freezing.distances if n not in freezing.frozen()]
        job.step(batches[len(seen) % 6])
    assert set(seen) == set(freezing.distances) and len(seen) < 1.5 * len(freezing.distances)
    other = Job(job.flow, plan, recipe_of(0.75)).method
    assert other.frozen() != freezing.frozen()
    other.recall({"config": {}, **freezing.notes()})
    assert other.frozen() == freezing.frozen()
    with pytest.raises(OutsizeError, match="distances of layers are not numbers"):
        other.recall({"freezing": {"prologue.tokens.weight": "far"}})


def test_the_seed_says_who_has_its_first_turn():
    """Distances nobody has measured yet are drawn from the recipe's seed."""
    first = []
    for seed in (0, 1, 7):
        model, plan = build(config_of("llama"), seed=1, dtype=torch.float64), plan_of()
        job = Job(NativeFlow(model, plan), plan, recipe_of(seed=seed))
        own = job.method.distances
        drawn = uniform(seed, "freezing", 0, len(own))
        assert list(own.values()) == [UNKNOWN * (1 + float(u)) for u in drawn]
        first.append(job.method.frozen())
        job.close()
    assert len(set(first)) == 3


def test_changes_of_weights_that_are_zero():
    before = {"none": [torch.zeros(3)], "some": [torch.tensor([0.0, 2.0]), torch.tensor([-4.0])]}
    after = {"none": [torch.ones(3)], "some": [torch.tensor([9.0, 3.0]), torch.tensor([-4.0])]}
    found = {name: both.tolist() for name, both in changes(before, after).items()}
    assert found == {"none": [0.0, 0.0], "some": [0.5, 2.0]}


def test_what_is_refused():
    exact = base_plan()
    with pytest.raises(OutsizeError, match=r"share is 1; expected less than 1"):
        Freezing.recipe(recipe_of(1.0))
    with pytest.raises(OutsizeError, match="frozen-by-dynamics and the plan has parameters or opt"):
        plan_of(stages=tuple(replace(s, rest=Rest(optimizer="disk")) for s in exact.stages))
