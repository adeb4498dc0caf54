"""What a microbatch of more rows costs, from those of FEW: all of it grows by as much with every
row. One row is a case of its own, whose views need no copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from outsize.foresight.module import Played
from outsize.simulate.costs import ActionCost, Said
from outsize.simulate.counter import Work

K = TypeVar("K")
FEW = (2, 4)  # rows of the two microbatches
MANY = 16  # rows of a microbatch up to which costs may be straight lines


@dataclass
class Lines:
    """Microbatches of any rows and workers of a tensor axis, as Module has them. told: rehearses
    one."""

    told: Callable[[int, int, bool], Played]
    known: dict[tuple[int, int, bool], Played] = field(default_factory=dict)
    straight: dict[bool, bool] = field(default_factory=dict)  # by `again`, whether costs are lines

    def played(self, rows: int, tensor: int, again: bool) -> Played:
        key = rows, tensor, again
        if key not in self.known:
            grown = self._grown(*key) if FEW[1] < rows <= MANY else None
            self.known[key] = grown or self.told(*key)
        return self.known[key]

    def _grown(self, rows: int, tensor: int, again: bool) -> Played | None:
        """From those of FEW, where a line through them meets MANY rows on one worker: what is
        the largest of several lines is bent upwards, so that it is straight between them then."""
        if again not in self.straight:
            known = self.told(MANY, 1, again)
            line = self._line(1, again, MANY)
            self.known[MANY, 1, again] = known
            self.straight[again] = line == known
        if not self.straight[again]:
            return None
        return self._line(tensor, again, rows)

    def _line(self, tensor: int, again: bool, rows: int) -> Played | None:
        one, two = (self.played(few, tensor, again) for few in FEW)
        return grown(one, two, rows)


def grown(one: Played, two: Played, rows: int) -> Played | None:
    """Of `rows` rows, from those of FEW; None where these do not do the same operators."""
    ahead = _costs(one.forward, two.forward, rows)
    again = _costs(one.again, two.again, rows)
    back = _costs(one.backward, two.backward, rows)
    if ahead is None or again is None or back is None:
        return None
    data = int(_line(one.data, two.data, rows))
    return replace(one, forward=ahead, again=again, backward=back, data=data)


def _costs(
    one: Sequence[ActionCost], two: Sequence[ActionCost], rows: int
) -> list[ActionCost] | None:
    made = [_cost(*each, rows) for each in zip(one, two, strict=True)]
    found = [each for each in made if each is not None]
    return found if len(found) == len(made) else None


def _line(one: float, two: float, rows: int) -> float:
    return one + (rows - FEW[0]) * (two - one) / (FEW[1] - FEW[0])


def _cost(one: ActionCost, two: ActionCost, rows: int) -> ActionCost | None:
    work = _work(one.work, two.work, rows)
    alike = [(s.axis, s.operation) for s in one.said] == [(s.axis, s.operation) for s in two.said]
    if work is None or not alike or one.allocates.keys() != two.allocates.keys():
        return None
    allocates = {k: int(_line(n, two.allocates[k], rows)) for k, n in one.allocates.items()}
    said = tuple(
        Said(s.axis, s.operation, int(_line(s.bytes, other.bytes, rows)), s.beside)
        for s, other in zip(one.said, two.said, strict=True)
    )
    workspace = int(_line(one.workspace, two.workspace, rows))
    moves = int(_line(one.moves, two.moves, rows))
    return ActionCost(allocates, workspace, work, moves, said)


def _work(one: Work, two: Work, rows: int) -> Work | None:
    products: dict[tuple[int, int, int, str], int] = {}
    if len(one.products) != len(two.products):  # sizes of unlike products meet
        return None
    pairs = zip(one.products.items(), two.products.items(), strict=True)
    for (size, times), (other, again) in pairs:
        if times != again or size[3] != other[3]:
            return None
        m, k, n = (int(_line(a, b, rows)) for a, b in zip(size[:3], other[:3], strict=True))
        products[m, k, n, size[3]] = products.get((m, k, n, size[3]), 0) + times
    attention = _lines(one.attention, two.attention, rows)
    if attention is None or one.calls != two.calls or one.widest != two.widest:
        return None
    return Work(products, attention, _line(one.moved, two.moved, rows), one.calls, one.widest)


def _lines(one: Mapping[K, float], two: Mapping[K, float], rows: int) -> dict[K, float] | None:
    if one.keys() != two.keys():
        return None
    return {key: _line(value, two[key], rows) for key, value in one.items()}
