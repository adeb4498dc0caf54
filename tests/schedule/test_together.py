"""All workers' lists together: the deadlocks of docs/log.md planted again, what groups of workers
must do alike, and programs damaged at random, which are refused or run exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import streamed
from mutants import (
    NAMES,
    PIECE,
    cases,
    evaluation,
    judged,
    judged_evaluations,
    judged_tokens,
    refusal,
    with_list,
)
from subjects import config_of

from outsize.collectives import Mesh
from outsize.memory.tiers import TierSpec
from outsize.optim import AdamW, Muon
from outsize.plan import Pipelined, Plan, Precision, Stream, zero
from outsize.plan import plan as plans
from outsize.plan.plan import per_segment
from outsize.schedule import Action, Kind, Lane, Program, State, prove
from outsize.schedule.items import Items
from outsize.schedule.layout import Placement
from outsize.schedule.programs import train
from outsize.search import PlanRequest
from outsize.search.request import facts_of_model
from outsize.techniques.vocabulary.ends import OUTPUT_S


def placed(mesh: Mesh, stage: int = 0, family: str = "llama", **changes) -> Placement:
    """Where the states of a decoder of six layers lie: 4 microbatches on each worker."""
    request = PlanRequest(4 * mesh.data, 8, Precision.named("float32"), AdamW(), mesh=mesh)
    facts = facts_of_model(config_of(family, num_hidden_layers=6), request)
    plan = Plan(
        8, per_segment(8), 4 * mesh.data, 1, 8, request.precision, mesh=mesh,
        shards=zero(stage, mesh.data), **changes,
    )  # fmt: skip
    return facts.placement(plan)


def with_lists(program: Program, change) -> Program:
    """Every list changed."""
    lists = tuple(
        replace(made, workers=(tuple(change(list(made.workers[0]))),)) for made in program.lists
    )
    return replace(program, lists=lists)


# -- what stood still once -------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [2, 3])
def test_sums_over_copies_on_the_lane_of_reductions_are_a_deadlock(stage, monkeypatch):
    """A MERGE that waits for its twin held up REDUCEs that free rooms of the pool, for which the
    twin's gradients waited (docs/log.md)."""
    program = train(placed(Mesh(2, 1, 2), stage, pipeline=Pipelined("1f1b")))
    assert not refusal(program)
    monkeypatch.setattr(Kind.MERGE, "lane", Lane.NETWORK)

    def change(actions: list[Action]) -> list[Action]:
        return [replace(a, lane=Lane.NETWORK) if a.kind is Kind.MERGE else a for a in actions]

    reason = refusal(with_lists(program, change))
    assert "MERGE.gradients 0, which does not come: deadlock" in reason


def grouped(actions: list[Action]) -> list[Action]:
    """An evaluation whose losses all stand behind all of its forward passes."""
    late = [
        a
        for a in actions
        if a.kind is OUTPUT_S
        or (a.kind is Kind.EXCHANGE and a.state is State.SUMS)
        or (a.kind is Kind.RECV and a.part >= 0)
    ]
    return [a for a in actions if a not in late] + late


def test_an_evaluation_whose_losses_stand_behind_its_forward_passes_is_a_deadlock(monkeypatch):
    """A third send waited for a receive that stood behind a loss, of which all workers have a part
    (docs/log.md)."""
    streamed.small(monkeypatch, PIECE)
    program = evaluation(cases()["vocabulary 1"], 8)
    assert not refusal(program)
    reason = refusal(with_lists(program, grouped))
    assert reason.endswith("which does not come: deadlock")


def uneven(mesh: Mesh) -> Placement:
    """Shares of odd numbers of elements, in parts of just what the smallest share is."""
    config = config_of("gpt2", n_embd=51, vocab_size=997)
    request = PlanRequest(4 * mesh.data, 8, Precision.named("float32"), AdamW(), mesh=mesh)
    facts = facts_of_model(config, request)
    numel = next(t.numel for t in facts.tables if t.segment == 1)
    plan = Plan(
        5, per_segment(5), 4 * mesh.data, 2, 8, request.precision, order="layer", update="behind",
        mesh=mesh, shards=zero(3, mesh.data), stream=Stream(2, part=numel // mesh.data),
    )  # fmt: skip
    return facts.placement(streamed.resting(plan, optimizer="disk"))


def test_workers_with_unequal_numbers_of_parts_are_refused(monkeypatch):
    """Other rooms in their pools put collectives in another order (docs/log.md)."""
    with monkeypatch.context() as patch:
        patch.setattr(plans, "PART", 1)
        place = uneven(Mesh(4))
        program = train(place)
        assert len(program.lists) == 1 and not refusal(program)

        def own(self: Items, chunk: int):
            return tuple((part,) for part in self._parts(chunk, self.chunks.index))

        patch.setattr(Items, "_others", own)
        program = train(uneven(Mesh(4)))
        assert len(program.lists) > 1 and program.alike == (0, 1, 2, 3)
        assert "expected one order on all workers" in refusal(program)


# -- what else must be alike -----------------------------------------------------------------------


def swapped(actions: list[Action], kind: Kind) -> list[Action]:
    """The first two of a kind in each other's place."""
    i, j = [i for i, a in enumerate(actions) if a.kind is kind][:2]
    actions[i], actions[j] = actions[j], actions[i]
    return actions


def test_one_worker_that_reduces_in_another_order_is_refused():
    program = train(placed(Mesh(2), 1))
    made = program.worker(1)
    actions = list(made.workers[0])
    places = [i for i, a in enumerate(actions) if a.kind is Kind.REDUCE]
    one = actions.pop(places[0])
    actions.insert(places[1], one)
    other = replace(made, workers=(tuple(actions),))
    assert not refusal(replace(program, lists=(other,), which=(0, 0)))  # both the same: one order
    assert "in its place; expected one order" in refusal(with_list(program, 1, other))


def test_two_lanes_of_a_worker_do_not_speak_to_the_same_workers(monkeypatch):
    """Matrices that workers put together for their update are updated in the thread that computes:
    on the host's lane, another part's could come between."""
    tiers = (TierSpec("host", "memory", (), 1 << 30),)
    mesh, precision = Mesh(tensor=2), Precision.named("float32")
    request = PlanRequest(4, 8, precision, Muon(), mesh=mesh, tiers=tiers)
    facts = facts_of_model(config_of("llama", num_hidden_layers=6), request)
    plan = Plan(8, per_segment(8), 4, 1, 8, precision, mesh=mesh, stream=Stream(host=2))
    plan = streamed.resting(plan, gradients="host", optimizer="host")
    prove(train(facts.placement(plan)))
    monkeypatch.setattr(Items, "_in_memory", lambda items, stage: True)
    assert "another lane speaks to the same workers" in refusal(train(facts.placement(plan)))


def test_what_is_computed_twice_or_nowhere_is_refused():
    program = train(placed(Mesh(pipeline=2), pipeline=Pipelined("1f1b")))
    two = program.worker(1)
    assert "is on 2 workers" in refusal(replace(program, which=(0, 0)))
    role = replace(two.role, plays=two.role.plays - {(7, 3)})
    gone = [a for a in two.workers[0] if (a.stage, a.microbatch) != (7, 3)]
    assert refusal(with_list(program, 1, replace(two, role=role, workers=(tuple(gone),))))


def test_copies_are_proved_as_one_with_the_verdict_of_all():
    """Where the data axis is alike each class is played once; all workers give the same verdict."""
    for stage in (1, 3):
        program = train(placed(Mesh(2, 2, 2), stage, pipeline=Pipelined("interleaved:2")))
        assert program.alike == (0, 0, 0, 0, 4, 4, 4, 4) and len(program.lists) == 2
        every = replace(program, alike=tuple(range(8)))
        assert prove(program) == prove(every)
        late = with_lists(program, lambda actions: swapped(actions, Kind.SEND))
        assert bool(refusal(late)) == bool(refusal(replace(late, alike=tuple(range(8)))))


# -- damaged at random -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_damaged_programs_are_refused_or_exact(name, monkeypatch):
    streamed.small(monkeypatch, PIECE)
    found = judged(cases()[name], 12, name)
    assert sum(found.values()) == 12 and found["exact"] and found["alone"]
    assert found["together"] or name not in ("1f1b", "tensor, zero 3")


@pytest.mark.parametrize("name", ["1f1b, zero 3", "vocabulary 1"])
def test_damaged_evaluations_are_mostly_refused(name, monkeypatch):
    streamed.small(monkeypatch, PIECE)
    found = judged_evaluations(cases()[name], 90, f"evaluations {name}")
    assert found["alone"] and found["together"] and found["exact"] < 45


@pytest.mark.parametrize("name", ["zero 3", "interleaved, all below", "vocabulary 2, zero 2"])
def test_damaged_steps_of_generation_are_refused_or_exact(name, monkeypatch):
    streamed.small(monkeypatch, PIECE)
    found = judged_tokens(cases()[name], 40, f"tokens 3 {name}")
    assert sum(found.values()) == 40 and found["exact"] and found["alone"]
