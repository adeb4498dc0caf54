"""Programs of a mesh: one worker's list for each place, and which workers are copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outsize.schedule.action import Kind
from outsize.schedule.compile.tokens import sampled
from outsize.schedule.layout import Placement
from outsize.schedule.program import Program
from outsize.schedule.proof.prove import prove
from outsize.schedule.schedule import Schedule
from outsize.schedule.talk import Spoken


def program_of(
    placement: Placement,
    list_of: Callable[[Placement], Schedule],
    evaluating: bool = False,
    others: Sequence[Placement] = (),
) -> Program:
    """The lists of all workers of a plan's mesh, from what one of them knows. others: what is at
    hand of other places of the pipeline.

    Workers of the data axis have one list where everything that a list is made from is equal
    (`Items.outline`); those of axes inside a layer always: their chunks differ in numbers
    alone, and each proves the program with its own. So copies are workers at one place of the
    pipeline, and only where the whole data axis is alike.
    """
    mesh, which, voices = placement.plan.mesh, list[int](), list[Spoken]()
    here = (placement, *others)  # made first: the rest of them is at hand
    made = {(one.chunks.turn, one.items.outline): i for i, one in enumerate(here)}
    lists = [list_of(one) for one in here]
    known = {(one.chunks.index, one.chunks.turn): one for one in here}
    for rank in range(mesh.size):
        index, turn = (mesh.index(axis, rank) for axis in ("data", "pipeline"))
        if (index, turn) not in known:
            known[index, turn] = placement.elsewhere(index, turn)
        mine = known[index, turn]
        outline = (turn, mine.items.outline)
        if outline not in made:
            made[outline] = len(lists)
            lists.append(list_of(mine))
        which.append(made[outline])
        voices.append(Spoken(mine.items, rank, evaluating))
    turns = [mesh.index("pipeline", rank) for rank in range(mesh.size)]
    alike = tuple(range(mesh.size))
    if len(lists) == mesh.pipeline:
        alike = tuple(turns.index(turn) for turn in turns)
    replicas = tuple(sorted({mesh.ranks("pipeline", rank) for rank in range(mesh.size)}))
    return Program(tuple(lists), tuple(which), tuple(voices), alike, replicas)


def train(placement: Placement, others: Sequence[Placement] = ()) -> Program:
    """What every worker of a plan's mesh does in a step."""
    return program_of(placement, lambda here: here.schedule, others=others)


def evaluate(placement: Placement, microbatches: int, others: Sequence[Placement] = ()) -> Program:
    """What every worker does to have the losses of so many microbatches."""
    return program_of(placement, lambda here: here.evaluation(microbatches), True, others)


def generate(placement: Placement, kind: Kind, groups: int = 1, steps: int = 1) -> Program:
    """What every worker does in steps of generation: PREFILL of prompts or DECODE of a token of
    each sequence through the stages, and SAMPLE of the next ones. groups: microbatches into which
    the sequences of a step fall."""

    def list_of(here: Placement) -> Schedule:
        if groups * steps == 1:
            return sampled(here.evaluation(1, kind))
        return here.evaluation(groups * steps, kind, groups)

    return program_of(placement, list_of, evaluating=True)


def generating(placement: Placement, kind: Kind, groups: int = 1, steps: int = 1) -> Schedule:
    """This worker's list of such steps, proved with those of all others."""
    program = generate(placement, kind, groups, steps)
    prove(program)
    return program.own


def most_groups(placement: Placement) -> int:
    """Into how many microbatches the sequences of a step may fall: as many as keep all stages of a
    pipeline at work; one where weights would pass through the pool for each, or ends are cut."""
    line = placement.chunks.pipelining
    if line is None or line.coarse.schedule.ends is not None or placement.rooms:
        return 1
    return len(line.coarse.placement.routes[0])


def drawer(placement: Placement) -> int:
    """The worker that draws: the first of those that have the last stage."""
    line = placement.chunks.pipelining
    if line is None:
        return 0
    return placement.plan.mesh.ranks("pipeline", 0)[line.coarse.placement.routes[0][-1]]
