"""Ends: passes that all workers of a pipeline do for each microbatch at the ends of its path.

Where the first or the last layer is cut over all workers, each computes with its part: some passes
before the first stage's forward and behind its backward (`Kind.end` is "first"), others behind the
last stage's forward ("last"). An EXCHANGE behind a pass sums what all workers have made; it does
not hold its worker up: what needs the sum waits until all workers have begun theirs. They run in
order on one lane, so all workers must have them in one order. SEND and RECV with a part bring the
last stage's output, or the gradient of the first stage's input, to the worker that it names.

A technique says by an `Ends` what its passes need and give, and registers how it is made; lists,
proofs, forecasts and the runtime follow from that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from outsize.plan.spread import Pipelined
from outsize.registry import Registry
from outsize.schedule.action import Action, End, Kind, Lane, State

Barrier = tuple[State, int, int]  # what is exchanged, the stage it is of, microbatch
Tensor = tuple[State, int, int, int]  # what, the stage it is of, microbatch, part


@dataclass(frozen=True, eq=False)
class Ends:
    """name, variant: as a plan says. passes: in a microbatch's order.

    makes: by pass, what the EXCHANGE behind it sums. needs: by kind, the sum that it waits for.
    enters: the sum that the first stage's forward takes; back: the one that the last stage's
    backward takes. given: by pass, the tensor with which it computes: the last stage's output, or
    the gradient of the first stage's input. priced: by pass, the layers' seconds that are its part,
    as fields of EndCosts. holds: the passes from and to which a worker keeps what it has made.
    """

    name: str
    variant: int
    passes: tuple[Kind, ...]
    makes: Mapping[Kind, State]
    needs: Mapping[Kind, State]
    enters: State
    back: State
    given: Mapping[Kind, State]
    priced: Mapping[Kind, tuple[str, ...]]
    holds: tuple[Kind, Kind]

    def __reduce__(self) -> tuple[Callable[[str, int], Ends], tuple[str, int]]:
        return named, (self.name, self.variant)

    def at(self, end: End) -> tuple[Kind, ...]:
        """The passes at an end."""
        return tuple(kind for kind in self.passes if kind.end == end)

    @property
    def ahead(self) -> tuple[Kind, Kind]:
        """The passes that an evaluation has too: the first at each end."""
        return self.at("first")[0], self.at("last")[0]

    @property
    def barriers(self) -> int:
        """Sums between the last stage's forward and its backward."""
        return sum(kind.end == "last" for kind in self.makes)

    @property
    def over(self) -> Kind:
        """The pass that ends a microbatch. Where the first stages are frozen nothing comes back to
        it: it waits for the last sum, which each worker is to have made until then."""
        return self.passes[-1]

    def user(self, state: State) -> Kind:
        """The pass until which what is given must stay."""
        return self.at("last" if state is State.ACTIVATIONS else "first")[-1]

    def behind(self, action: Action) -> Barrier | None:
        """What is exchanged behind a pass."""
        state = self.makes.get(action.kind)
        return None if state is None else (state, action.stage, action.microbatch)

    def before(self, action: Action, path: Sequence[int]) -> Barrier | None:
        """The exchange that an action of a microbatch with this path waits for."""
        state = self.needs.get(action.kind)
        if action.kind.way == "forward" and action.stage == path[0]:
            state = self.enters
        elif action.kind.way == "back" and action.stage == path[-1]:
            state = self.back
        return None if state is None else (state, action.stage, action.microbatch)


# By name, the Ends of a variant.
ENDS: Registry[Callable[[int], Ends]] = Registry("way to cut the ends of a pipeline")


def named(name: str, variant: int) -> Ends:
    """The one of a name and variant, always the same object. OutsizeError for none."""
    return ENDS.get(name)(variant)


def ends_of(line: Pipelined) -> Ends | None:
    """What a plan's pipeline does at the ends of a path; None: the workers there do it alone."""
    return None if line.ends is None else named(*line.ends)


def exchange(state: State, stage: int, m: int, lane: Lane = Lane.EXCHANGE) -> Action:
    """A worker's EXCHANGE. lane: the network's in the coarse lists of a pipeline."""
    return Action(Kind.EXCHANGE, stage, m, lane, state=state)
