"""The passes of a cut vocabulary put into the orders of any pipeline's schedule.

Every worker does a part of the input and output layers for each microbatch, so that the last stage
has no more to do than others. Between the last stage's forward and its backward now lie barriers,
two in variant 1 and one in variant 2. As in the paper each of them puts all backwards off by one
microbatch, which every worker holds longer: that is the price. Here this is done to the orders of
any schedule: a backward waits for as many more forwards of its worker as a microbatch has there.

The passes then go where they can run first, found by playing the orders: S and T of all workers in
one sequence, since exchanges run in order; what nobody waits for (gradients of weights alone) goes
where a worker would wait, or when another is pending. The play is repeated with workers that may
take something else while their turn waits, if they hold no more for it, and with nothing pending:
logits are held until their T. Of the plays that take no more than a hundredth longer than the
shortest the one whose fullest worker holds least is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

from outsize.errors import OutsizeError
from outsize.schedule.action import Kind
from outsize.schedule.ends import Ends
from outsize.schedule.pipelines.conditions import at_least
from outsize.schedule.pipelines.costs import Costs, EndCosts
from outsize.schedule.pipelines.pipeline import PLACINGS, Pair, Pipeline, pipeline
from outsize.schedule.pipelines.weave import steps_of
from outsize.techniques.vocabulary.ends import NAME
from outsize.techniques.vocabulary.play import Play, Step

_COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
_KNOWN = (*_COMPUTE, Kind.SEND, Kind.RECV, Kind.NORM, Kind.UPDATE)
_WINDOWS = (1, 2, 4, 8, 16, 64)  # steps of its order from which a worker takes one that can run
_LONGER = 1.01  # times the shortest play's seconds, for less memory


def placed(made: Pipeline, ends: Ends, costs: Costs, priced: EndCosts) -> Pipeline:
    """A schedule with its vocabulary layers cut over all workers. costs: of one unit, and priced:
    what the places are for."""
    if made.schedule.ends is not None:
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
        orders.append(_delayed(steps, ends.barriers, made.placement.microbatches))
        pairs = (step[0] for step in orders[-1] if len(step) == 2)
        together |= {(action.stage, action.microbatch) for action in pairs}
    placed = _least_held(
        [
            Play(made, orders, ends, costs, priced, window, pending).go()
            for window in _WINDOWS
            for pending in (0, 1)
        ]
    )
    return pipeline(
        f"{made.name} with vocabulary {ends.variant}",
        made.placement,
        [worker.order for worker in placed.workers],
        frozenset(together - placed.apart),
        made.paths,
        made.approximate,
        ends,
    )


def _least_held(plays: Sequence[Play]) -> Play:
    """Of those that are as good as the shortest the one that holds least; the shorter of equals."""
    most = _LONGER * min(play.ended for play in plays)
    near = [play for play in plays if play.ended <= most]
    return min(near, key=lambda play: (round(play.peak, 9), play.ended))  # sums of shares


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


PLACINGS.add(NAME, placed)
