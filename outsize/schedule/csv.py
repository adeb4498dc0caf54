"""PyTorch's pipelining CSV: a row a worker, a cell an action, as "3F0" for stage, kind, microbatch.

Kinds are F, I, W and B (both gradients); "(2F5;1B3)OVERLAP_F_B" is two that run as one; an empty
cell is a wait and says nothing. It can say no stage on two workers, no path that leaves stages out,
no layers cut over all workers, and no optimizer step, which every worker has at its end here. Cells
of sends, receives and sharded stages are read over: what must move follows from the orders.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from itertools import pairwise

from outsize.errors import OutsizeError
from outsize.schedule.action import Action, Kind
from outsize.schedule.pipelines.pipeline import Pair, Pipeline, pipeline
from outsize.schedule.place import one_way
from outsize.schedule.proof import prove

_LETTERS = {
    Kind.FORWARD: "F",
    Kind.BACKWARD: "B",
    Kind.BACKWARD_INPUT: "I",
    Kind.BACKWARD_WEIGHT: "W",
}
_KINDS = {letter: kind for kind, letter in _LETTERS.items()}
_CELL = re.compile(r"(\d{1,6})(F|B|I|W)(\d{1,6})")
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_MOVES = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")


def to_csv(made: Pipeline) -> str:
    """The compute orders. Raises OutsizeError for what the format cannot say."""
    ends = made.schedule.ends
    for wrong, what in (
        (ends, f"a {'' if ends is None else ends.name} that is cut over the workers"),
        (made.paths, "paths that leave stages out"),
        (len(made.placement.routes) > 1, "stages on two workers"),
    ):
        if not wrong:
            continue
        raise OutsizeError(f"schedule {made.name}: has {what}, which PyTorch's CSV cannot say")
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    for actions in made.schedule.workers:
        writer.writerow(_cells([a for a in actions if a.kind in _LETTERS], made.together))
    return out.getvalue()


def _cells(order: list[Action], together: frozenset[Pair]) -> Iterator[str]:
    joined = False
    for action, after in pairwise([*order, None]):
        assert action is not None
        pair = (action.stage, action.microbatch)
        if joined:
            joined = False
        elif after is not None and action.kind is Kind.FORWARD and pair in together:
            joined = True
            yield f"({_cell(action)};{_cell(after)})OVERLAP_F_B"
        else:
            yield _cell(action)


def _cell(action: Action) -> str:
    return f"{action.stage}{_LETTERS[action.kind]}{action.microbatch}"


def from_csv(text: str, name: str = "csv") -> Pipeline:
    """The schedule of a CSV text, proved. name: what errors call the text.

    Raises OutsizeError with the line of a cell that cannot be read, and with the worker (its line
    less one) of an action that cannot run.
    """
    orders: list[list[Action]] = []
    together: set[Pair] = set()
    for line, row in enumerate(csv.reader(io.StringIO(text, newline="")), start=1):
        orders.append([])
        for cell in row:
            actions = _read(cell.strip(), f"{name} line {line}")
            orders[-1] += actions
            if len(actions) == 2:
                together.add((actions[0].stage, actions[0].microbatch))
    while orders and not orders[-1]:
        orders.pop()
    route = _route(orders, name)
    microbatches = 1 + max(a.microbatch for order in orders for a in order)
    place = one_way(len(orders), route, microbatches)
    made = pipeline(name, place, orders, frozenset(together))
    try:
        prove(made.schedule)
    except OutsizeError as error:
        raise OutsizeError(f"{name}: {error}") from None
    return made


def _read(cell: str, where: str) -> list[Action]:
    """The actions of a cell: none, one, or two that run as one."""
    if not cell or _MOVES.fullmatch(cell):
        return []
    pair = _PAIR.fullmatch(cell)
    if pair is None:
        return [_action(cell, where)]
    both = [_action(part.strip(), where) for part in pair.groups()]
    if [a.kind for a in both] != [Kind.FORWARD, Kind.BACKWARD]:
        raise OutsizeError(f"{where}: {cell!r}; expected a forward and a backward to run as one")
    return both


def _action(cell: str, where: str) -> Action:
    match = _CELL.fullmatch(cell)
    if match is None:
        raise OutsizeError(
            f"{where}: {cell[:40]!r} is no action; expected stage, F, B, I or W and microbatch,"
            " as '3F0'"
        )
    stage, letter, microbatch = match.groups()
    return Action(_KINDS[letter], int(stage), int(microbatch))


def _route(orders: list[list[Action]], name: str) -> tuple[int, ...]:
    """The worker of each stage."""
    where: dict[int, int] = {}
    for worker, order in enumerate(orders):
        for action in order:
            if where.setdefault(action.stage, worker) != worker:
                raise OutsizeError(
                    f"{name} line {worker + 1}: stage {action.stage} is on line"
                    f" {where[action.stage] + 1} too; expected each stage on one line"
                )
    if not where:
        raise OutsizeError(f"{name}: it holds no action; expected a row a worker")
    for stage in range(max(where) + 1 if len(where) <= max(where) else 0):
        if stage not in where:
            raise OutsizeError(f"{name}: stage {stage} has no action; expected all to {max(where)}")
    return tuple(where[stage] for stage in range(len(where)))
