"""The validator: what it accepts runs exactly, what it refuses it refuses with a reason.

The judge is the runtime: a schedule that was damaged at random is either refused, or gives the
numbers of the plain loop when it is played.
"""

from __future__ import annotations

import random
from dataclasses import replace

import plain
import pytest
import torch

from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.models.families import parse
from outsize.optim import SGD
from outsize.plan import Plan, Precision, Stage
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Recipe
from outsize.schedule import Action, Kind, Schedule, compile_plan, compile_tokens, prove
from outsize.schedule.action import KINDS
from outsize.schedule.role import Role

ROWS, SEQUENCE, VOCAB = 2, 6, 17
CONFIG = {
    "model_type": "llama", "hidden_size": 8, "intermediate_size": 12, "vocab_size": VOCAB,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 16, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": True,
}  # fmt: skip
BASE = Plan(4, per_segment(4), ROWS, 1, SEQUENCE, Precision.named("float64"), loss_chunk=4)
WHOLE = per_segment(4, ("block",))
# name: plan, what is frozen
PLANS = {
    "accumulate": (BASE, ()),
    "one microbatch": (replace(BASE, microbatch_rows=2), ()),
    "recompute": (replace(BASE, stages=WHOLE), ()),
    "split, recompute": (replace(BASE, stages=WHOLE, split_backward=True), ()),
    "split, two stages": (
        replace(BASE, stages=(Stage(0, 2), Stage(2, 4)), split_backward=True), (),
    ),
    "frozen": (
        replace(BASE, stages=WHOLE, microbatch_rows=2, split_backward=True),
        ("prologue", "blocks.0"),
    ),
}  # fmt: skip
MUTATIONS = 150  # of each of the six


def mutated(schedule: Schedule, rng: random.Random) -> Schedule:
    """The schedule with one or two of its actions dropped, doubled, swapped, moved or changed."""
    actions = list(schedule.workers[0])
    for _ in range(rng.choice([1, 1, 1, 2])):
        i, j = rng.randrange(len(actions)), rng.randrange(len(actions))
        match rng.choice(["drop", "double", "swap", "move", "move", "stage", "microbatch", "kind"]):
            case "drop":
                del actions[i]
            case "double":
                actions.insert(j, actions[i])
            case "swap":
                actions[i], actions[j] = actions[j], actions[i]
            case "move":
                actions.insert(j, actions.pop(i))
            case "stage":
                actions[i] = replace(actions[i], stage=rng.randint(-1, schedule.stages))
            case "microbatch":
                actions[i] = replace(actions[i], microbatch=rng.randint(-1, schedule.microbatches))
            case "kind":
                actions[i] = replace(actions[i], kind=rng.choice([*map(Kind, KINDS.names())]))
    return replace(schedule, workers=(tuple(actions),))


class Judge:
    """A job that can be set back to its start, and what one plain step gives from there."""

    def __init__(self, plan: Plan, frozen: tuple[str, ...]) -> None:
        model = build(parse(CONFIG), seed=1, dtype=torch.float64)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen or "none"))
        self.batch = plain.batches(1, ROWS, SEQUENCE, VOCAB)[0]
        loss = plain.loss_of(model, self.batch)
        loss.backward()
        self.loss = float(loss.detach())
        self.expected = {  # plain gradient descent, so that the gradient's size shows
            n: (p if p.grad is None else p - 0.5 * p.grad).detach().clone()
            for n, p in model.named_parameters()
        }
        model.zero_grad()
        self.job = Job(NativeFlow(model, plan), plan, Recipe(SGD(0.5)))
        self.start = {n: w.clone() for n, w in self.job.weights()}

    def exact(self, schedule: Schedule) -> bool:
        """Whether a step by this schedule gives the plain result."""
        for name, weight in self.job.weights():
            weight.copy_(self.start[name])
        self.job.loaded = self.job.playable(schedule)
        loss = float(self.job.step(self.batch))
        assert not any(chunk.gradients.any() for chunk in self.job.chunks if chunk.table.trainable)
        far = [
            float((w - self.expected[n]).abs().max() / self.expected[n].abs().max())
            for n, w in self.job.weights()
        ]
        return max(far) <= 1e-10 and abs(loss - self.loss) <= 1e-10 * self.loss


@pytest.mark.parametrize("name", PLANS)
def test_damaged_schedules_are_refused_or_exact(name):
    judge = Judge(*PLANS[name])
    compiled = judge.job.schedule
    assert prove(compiled).peaks[0] == 0 and judge.exact(compiled)
    rng, verdicts = random.Random(name), {True: 0, False: 0}
    for _ in range(MUTATIONS):
        schedule = mutated(compiled, rng)
        try:
            prove(schedule)
        except OutsizeError as error:
            verdicts[False] += 1
            assert str(error).startswith("schedule: ") and "\n" not in str(error)
            continue
        verdicts[True] += 1
        assert judge.exact(schedule), schedule
    assert verdicts[True] >= 5 and verdicts[False] >= 75, "both must occur for the test to tell"


def steps(text: str, **changes) -> Schedule:
    """A schedule of two stages, one microbatch, from words like "F0 L1 B1 B0 N U0 U1"."""
    kinds = {
        "F": Kind.FORWARD, "L": Kind.LOSS, "B": Kind.BACKWARD, "I": Kind.BACKWARD_INPUT,
        "W": Kind.BACKWARD_WEIGHT, "R": Kind.RECOMPUTE, "N": Kind.NORM, "U": Kind.UPDATE,
        "P": Kind.PREFILL, "D": Kind.DECODE,
    }  # fmt: skip
    actions = []
    for word in text.split():
        stage = int(word[1]) if len(word) > 1 else -1
        whole = word[0] in "NU"
        actions.append(Action(kinds[word[0]], stage, -1 if whole else 0))
    return replace(Schedule(2, 1, (tuple(actions),)), **changes)


ALL = Role(frozenset({(0, 0), (1, 0)}), frozenset({0, 1}))


@pytest.mark.parametrize(
    "schedule",
    [
        steps("F0 L1 B1 B0 N U0 U1"),
        steps("F0 L1 B1 B0 N U1 U0"),
        steps("F0 L1 I1 I0 W0 W1 N U1 U0"),
        steps("F0 L1 B1 R0 B0 N U0 U1", recompute=frozenset({0})),
        steps("F0 L1 R0 B1 B0 N U0 U1", recompute=frozenset({0})),
        steps("F0 L1 B1 N U1", first=1),
        steps("L0 B0 N0 U0 L1 B1 N1 U1", cuts=frozenset({1})),
        compile_tokens(3, Kind.PREFILL),
        compile_tokens(1, Kind.DECODE),
    ],
)
def test_what_is_accepted(schedule):
    assert prove(schedule).peaks[0] == 0


REASONS = [
    (steps(""), "at its end: it holds no action"),
    (steps("L1"), "action 0 .*: its input, the output of stage 0, was not produced"),
    (steps("F0 F0"), "action 1 .*runs a second time"),
    (steps("F0 B0"), "its gradient from stage 1 was not produced"),
    (steps("B1"), "comes before its FORWARD"),
    (steps("F0 L1 B1 I1"), "its gradient was produced already"),
    (steps("F0 L1 W1"), "comes before its BACKWARD_INPUT"),
    (steps("F0 R0"), "has no kept input"),
    (steps("F0 L1 B1 B0", recompute=frozenset({0})), "were not computed again"),
    (steps("F0 L1 B1 N"), "the gradient of stage 0, microbatch 0 was not produced"),
    (steps("F0 L1 B1 N U1"), "the gradient of stage 0, microbatch 0 was not produced"),
    (steps("F0 L1 I1 I0 W0 N"), "the weight gradient of stage 1, microbatch 0"),
    (steps("F0 L1 B1 B0 U0"), "comes before NORM"),
    (steps("F0 L1 B1 B0 N U0"), "at its end: UPDATE of stage 1 is missing"),
    (steps("F0 L1 B1 B0"), "at its end: NORM is missing"),
    (steps("F0 L1"), "at its end: the gradient of stage 0, microbatch 0 was not produced"),
    (steps("F0 L1 B1 B0 N F0"), "runs a second time"),
    (steps("F0 L1 B1 B0 N F0", microbatches=2), "the gradient of stage 0, microbatch 1"),
    (steps("F0 L1 B1 B0", first=1), "stage 0 is frozen; the first that is trained is 1"),
    (steps("F0 L1 B1 N U0", first=1), "stage 0 is frozen"),
    (steps("L0"), "is of stage 0; expected FORWARD of it"),
    (steps("F0 F1 B1 B0 N U0 U1", role=ALL), "is of stage 1; expected LOSS of it"),
    (steps("L0 B0 N U0", cuts=frozenset({1})), "is of no group's first stage"),
    (steps("L0 B0 N0 U0 L1 N1", cuts=frozenset({1})), "the gradient of stage 1, microbatch 0"),
    (steps("L0 B0 L1 B1 N0 N1", cuts=frozenset({1})), "before UPDATE of stage 0, of a group"),
    (steps("L0 B0 N0 U0 L1 B1 U1", cuts=frozenset({1})), "comes before NORM"),
    (steps("U1 F0", first=2, ahead=frozenset({0, 1})), "before UPDATE of stage 0, which is"),
    (steps("F2"), "stage is 2; expected 0 to 1"),
    (
        steps("F0 P0 P1 L1 B1 B0 N U0 U1"),
        "BACKWARD and .* PREFILL and UPDATE are in one schedule",
    ),
    (steps("P0"), "stage 1 of microbatch 0 is missing"),
    (steps("P0 P1", microbatches=2), "stage 0 of microbatch 1 is missing"),
    (Schedule(1, 1, ((Action(Kind.NORM, 0),),)), "is of the whole step; expected no stage"),
    (Schedule(1, 1, ((), ())), "stage 0, microbatch 0 is missing"),
    (Schedule(1, 1, ()), "0 workers"),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "reason"), REASONS)
def test_reasons(schedule, reason):
    with pytest.raises(OutsizeError, match=reason):
        prove(schedule)


def held(schedule: Schedule, *costs: tuple[int, int]) -> Schedule:
    """The schedule with (bytes left, workspace) of each action."""
    actions = tuple(
        replace(a, allocates=(("device/activations", left), ("host/activations", 999)),
                workspace=workspace)
        for a, (left, workspace) in zip(schedule.workers[0], costs, strict=True)
    )  # fmt: skip
    return replace(schedule, workers=(actions,))


def test_the_budget_is_checked_by_replay():
    schedule = held(
        steps("F0 L1 B1 B0 N U0 U1"),
        (100, 130), (40, 60), (-40, 25), (-100, 10), (0, 0), (0, 7), (0, 0),
    )  # fmt: skip
    # F0: 130; L1: 100 + 60; B1: 140 + 25; B0: 100 + 10; nothing is left for the updates but 7.
    assert prove(schedule).peaks[0] == 165
    assert prove(schedule, static=1000).peaks[0] == 1165
    assert prove(schedule, budget=1165, static=1000).peaks[0] == 1165
    with pytest.raises(
        OutsizeError,
        match=r"action 2 \(BACKWARD 1 0 .*1165 bytes of a budget of 1164: 1 missing",
    ):
        prove(schedule, budget=1164, static=1000)
    with pytest.raises(OutsizeError, match=r"action 0 .*: 30 missing"):
        prove(schedule, budget=1100, static=1000)


def test_compiled_plans_are_accepted_whatever_their_shape():
    for name, (plan, _) in PLANS.items():
        for first in range(len(plan.stages)):
            for rows in (1, 2, 3):
                schedule = compile_plan(replace(plan, rows=rows), first)
                assert prove(schedule).peaks[0] == 0, name
                assert schedule.first == first
