"""The list of one worker whose vocabulary is cut: each action left out, doubled, or moved before
what it needs is refused with its reason, and what is let pass is harmless."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from piped import SEGMENTS, model

from outsize.collectives import Mesh, PretendWorld
from outsize.errors import OutsizeError
from outsize.optim import AdamW
from outsize.parallel.divide import divide
from outsize.plan import Pipelined, Plan, Precision
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.schedule import Action, Kind, Lane, Schedule, State, prove
from outsize.schedule.waits import waits
from outsize.techniques.vocabulary.ends import (
    EMBED,
    EMBED_BACKWARD,
    OUTPUT_S,
    OUTPUT_T,
    vocabulary,
)  # fmt: skip

WORKERS, MICROBATCHES = 2, 4
LISTS = [
    (schedule, variant, worker)
    for schedule in ("1f1b", "zb-v") for variant in (1, 2) for worker in range(WORKERS)
]  # fmt: skip
PASSES = (EMBED, EMBED_BACKWARD, OUTPUT_S, OUTPUT_T, Kind.EXCHANGE)
every_list = pytest.mark.parametrize(("schedule", "variant", "worker"), LISTS)


@cache
def list_of(schedule: str, variant: int, worker: int, family: str = "llama, untied") -> Schedule:
    """A worker's actions of a step."""
    said, mesh = Pipelined(schedule, vocabulary=variant), Mesh(pipeline=WORKERS)
    plan = Plan(
        SEGMENTS, per_segment(SEGMENTS), MICROBATCHES, 1, 8, Precision.named("float64"),
        mesh=mesh, pipeline=said,
    )  # fmt: skip
    world, mine = PretendWorld(mesh, worker), model(family)
    cuts = divide(mine, world, plan)
    job = Job(NativeFlow(mine, plan), plan, Recipe(AdamW()), Here(world), cuts=cuts)
    job.close()
    return job.schedule


def with_actions(made: Schedule, actions: list[Action]) -> Schedule:
    return replace(made, workers=(tuple(actions),))


def reason(made: Schedule, actions: list[Action]) -> str:
    """Why a list is refused; empty where it is not."""
    try:
        prove(with_actions(made, actions))
    except OutsizeError as error:
        said = str(error)
        assert said.startswith("schedule: ") and "\n" not in said
        return said
    return ""


@every_list
def test_an_action_that_is_left_out_or_doubled_is_refused(schedule, variant, worker):
    made = list_of(schedule, variant, worker)
    prove(made)
    actions = list(made.workers[0])
    assert {a.kind for a in actions} >= set(PASSES)
    for index, action in enumerate(actions):
        assert reason(made, actions[:index] + actions[index + 1 :]), f"without {action}"
        doubled = [*actions[: index + 1], *actions[index:]]
        assert reason(made, doubled), f"twice {action}"
        if action.kind in PASSES:
            assert "runs a second time" in reason(made, doubled)


def needs(made: Schedule) -> list[tuple[int, int]]:
    """(place of an action of the vocabulary, place of what it needs), written out once more."""
    actions, variant = list(made.workers[0]), made.ends.variant
    at = {(a.kind, a.state, a.microbatch, a.part): i for i, a in enumerate(actions)}
    found = []

    def need(place: int, kind: Kind, m: int, state: State = State.NONE) -> None:
        for (k, s, n, part), other in at.items():
            if (k, s, n) == (kind, state, m) and (kind is not Kind.RECV or part >= 0):
                found.append((place, other))

    back = State.GRADIENTS if variant == 1 else State.SUMS
    makers = {State.ACTIVATIONS: EMBED, State.SUMS: OUTPUT_S,
              State.GRADIENTS: OUTPUT_T}  # fmt: skip
    for place, action in enumerate(actions):
        m, kind = action.microbatch, action.kind
        if kind is Kind.EXCHANGE:
            need(place, makers[action.state], m)
        elif kind is OUTPUT_S:
            need(place, Kind.RECV, m, State.ACTIVATIONS)
        elif kind is OUTPUT_T:
            need(place, Kind.EXCHANGE, m, State.SUMS)
        elif kind is EMBED_BACKWARD:
            need(place, Kind.RECV, m, State.GRADIENTS)
        elif kind is Kind.FORWARD and action.stage == 0:
            need(place, Kind.EXCHANGE, m, State.ACTIVATIONS)
        elif kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and action.stage == made.stages - 1:
            need(place, Kind.EXCHANGE, m, back)
    return found


@every_list
def test_an_action_before_what_it_needs_is_refused(schedule, variant, worker):
    """And its wait for another lane is known."""
    made = list_of(schedule, variant, worker)
    actions, found, waited = list(made.workers[0]), needs(made), waits(made)
    assert {actions[place].kind for place, _ in found} >= {Kind.EXCHANGE, OUTPUT_T}
    for place, needed in found:
        assert needed < place
        moved = actions[:place] + actions[place + 1 :]
        moved.insert(needed, actions[place])
        said = reason(made, moved)
        assert "comes before" in said or "is not here" in said, f"{actions[place]}: {said}"
        if actions[needed].lane is not Lane.COMPUTE:
            lane = actions[needed].lane
            ends = [i for i in waited[place] if actions[i].lane is lane]
            assert ends and ends[0] >= needed, f"{actions[place]} waits for {actions[needed]}"


@every_list
def test_parts_go_to_every_other_worker_while_they_are_there(schedule, variant, worker):
    made = list_of(schedule, variant, worker)
    actions = list(made.workers[0])
    sends = [i for i, a in enumerate(actions) if a.kind is Kind.SEND and a.part >= 0]
    assert bool(sends) == (schedule == "1f1b" or not worker)  # a V ends where it begins
    for place in sends:
        send = actions[place]
        other = [*actions[:place], replace(send, part=worker), *actions[place + 1 :]]
        assert "which has no part" in reason(made, other)
        rest = actions[:place] + actions[place + 1 :]
        assert "was not produced" in reason(made, [send, *rest])
        gone = OUTPUT_T if send.state is State.ACTIVATIONS else EMBED_BACKWARD
        behind = next(i for i, a in enumerate(rest)
                      if a.kind is gone and a.microbatch == send.microbatch)  # fmt: skip
        rest.insert(behind + 1, send)
        assert "was let go by then" in reason(made, rest)


def test_other_variants_and_none_are_told_apart():
    one, two = (list_of("1f1b", variant, 0) for variant in (1, 2))
    assert "which this variant does not" in reason(
        replace(one, ends=vocabulary(2)), list(one.workers[0])
    )
    assert reason(replace(two, ends=vocabulary(1)), list(two.workers[0]))
    assert "the schedule has none" in reason(replace(one, ends=None), list(one.workers[0]))
