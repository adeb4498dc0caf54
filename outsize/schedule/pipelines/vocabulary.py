"""Vocabulary parallelism: the input and output layers cut over all workers of any pipeline.

Yeung et al., "Balancing Pipeline Parallelism with Vocabulary Parallelism", 2024. Every worker does
a part of them for each microbatch (outsize/schedule/vocabulary.py), so that the last stage has no
more to do than others. Between the last stage's forward and its backward now lie barriers, two in
variant 1 and one in variant 2. As in the paper each of them puts all backwards off by one
microbatch, which every worker holds longer: that is the price. Here this is done to the orders of
any schedule: a backward waits for as many more forwards of its worker as a microbatch has there.

The passes then go where they can run first, found by playing the orders: S and T of all workers in
one sequence, since exchanges run in order; what nobody waits for (gradients of weights alone) goes
where a worker would wait, or when another is pending. The play is repeated with workers that may
take something else while their turn waits, if they hold no more for it; the shortest is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

from outsize.errors import OutsizeError
from outsize.schedule.action import Kind
from outsize.schedule.pipelines.conditions import at_least
from outsize.schedule.pipelines.costs import Costs, VocabularyCosts
from outsize.schedule.pipelines.pipeline import Pair, Pipeline, pipeline
from outsize.schedule.pipelines.vocabulary_play import Play, Step
from outsize.schedule.pipelines.weave import steps_of

_COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
_KNOWN = (*_COMPUTE, Kind.SEND, Kind.RECV, Kind.NORM, Kind.UPDATE)
_WINDOWS = (1, 2, 4, 8, 16, 64)  # steps of its order from which a worker takes one that can run


def with_vocabulary(
    made: Pipeline, variant: int, costs: Costs, vocabulary: VocabularyCosts
) -> Pipeline:
    """A schedule with its vocabulary layers cut over all workers.

    variant: 1, two barriers; 2, one. costs: of one unit, and vocabulary: what its places are for.
    """
    count = barriers(variant)
    if made.schedule.vocabulary:
        raise OutsizeError(f"{made.name}: has a cut vocabulary already; give the plain schedule")
    at_least(f"{made.name} with a cut vocabulary", "devices", made.placement.workers, 2)
    kinds = {action.kind for actions in made.schedule.workers for action in actions}
    if kinds - set(_KNOWN):
        more = ", ".join(sorted(kinds - set(_KNOWN)))
        raise OutsizeError(f"{made.name}: has {more}; cut the vocabulary before passes that add it")
    orders: list[list[Step]] = []
    together: set[Pair] = set()
    for actions in made.schedule.workers:
        steps = steps_of([a for a in actions if a.kind in _COMPUTE], made.together)
        orders.append(_delayed(steps, count, made.placement.microbatches))
        pairs = (step[0] for step in orders[-1] if len(step) == 2)
        together |= {(action.stage, action.microbatch) for action in pairs}
    placed = min(
        (Play(made, orders, variant, costs, vocabulary, window).go() for window in _WINDOWS),
        key=lambda play: play.ended,
    )
    return pipeline(
        f"{made.name} with vocabulary {variant}",
        made.placement,
        [worker.order for worker in placed.workers],
        frozenset(together - placed.apart),
        made.paths,
        made.approximate,
        variant,
    )


def barriers(variant: int) -> int:
    """Barriers of a variant: the microbatches that every worker holds more."""
    if variant not in (1, 2):
        raise OutsizeError(
            f"vocabulary: variant {variant}; expected 1 (two barriers) or 2 (one barrier)"
        )
    return 3 - variant


def _delayed(steps: Sequence[Step], later: int, microbatches: int) -> list[Step]:
    """Every forward as many forwards earlier as a worker has in so many microbatches."""
    forwards = [step[0] for step in steps if step[0].kind is Kind.FORWARD]
    sooner = min(len(forwards), -(-later * len(forwards) // microbatches))
    rest = iter(forwards[sooner:])
    moved: list[Step] = [(action,) for action in forwards[:sooner]]
    for step in steps:
        if step[0].kind is not Kind.FORWARD:
            moved.append(step)
            continue
        ahead = next(rest, None)
        if ahead is not None or len(step) > 1:
            moved.append((*(() if ahead is None else (ahead,)), *step[1:]))
    return moved
