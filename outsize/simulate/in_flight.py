"""Bytes of a worker of a pipeline beside those of its computing: of microbatches that are under way
there, and of tensors on their way to other workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from outsize.collectives.channel import LIMIT
from outsize.memory.ledger import in_grains
from outsize.schedule import Action, Kind, Lane, Schedule, State
from outsize.schedule.chunks import Chunks
from outsize.schedule.pipelined import Pipelining, peer
from outsize.simulate.costs import COPIED, Costs
from outsize.simulate.exchanged import Exchanged, exchanged, held_longer, parted

_ACTIVATIONS = "device/activations"
Extra = dict[int, list[tuple[str, int]]]  # by place in the list


def absent(chunks: Chunks, grain: int = 1) -> int:
    """Bytes of the parameters that other workers have: one number each, which has their shape."""
    return sum(
        len(table.slots)
        * in_grains(next(dtype for _, dtype in chunks.kept.states(table)).itemsize, grain)
        for table in chunks.every
        if chunks.turn not in chunks.holders(table)
    )


def with_in_flight(schedule: Schedule, costs: Costs, line: Pipelining | None) -> Schedule:
    """An annotated schedule of one worker with these bytes; as it is where there is no pipeline."""
    if line is None:
        return schedule
    # What goes to all others is counted once, with the pass that needs it last.
    actions = tuple(replace(a, allocates=()) if parted(a) else a for a in schedule.workers[0])
    copied, rows = _copies(actions, costs), exchanged(schedule, costs)
    extra: Extra = {place: [(_ACTIVATIONS, size)] for place, size in copied.items()}
    begun = _walks(actions, costs, extra, rows)
    gone = _gone(actions, line)
    for place, when in gone.items():
        extra.setdefault(when, []).extend(actions[place].allocates)
    for place, size in held_longer(schedule, costs, gone).items():
        extra.setdefault(place, []).append((_ACTIVATIONS, size))
    made = (
        replace(
            a, allocates=(*(() if i in gone else a.allocates), *extra.get(i, ())),
            workspace=max(0, a.workspace + copied[i] + begun[i] - rows.before[i]),
        )
        for i, a in enumerate(actions)
    )  # fmt: skip
    return replace(schedule, workers=(tuple(made),))


def evaluating(schedule: Schedule, costs: Costs, line: Pipelining | None) -> Schedule:
    """The same for one worker's evaluation of a microbatch: what is sent may stay to the end."""
    if line is None:
        return schedule
    made = [replace(a, allocates=()) if a.kind is Kind.SEND else a for a in schedule.workers[0]]
    first = next((i for i, a in enumerate(made) if _begins(a, costs)), None)
    if first is not None:
        begun = tuple((f"device/{kind}", n) for kind, n in costs.begun.items())
        taken = sum(costs.begun.values()) if made[first].lane is Lane.COMPUTE else 0
        here = made[first]
        made[first] = replace(
            here, allocates=(*here.allocates, *begun), workspace=here.workspace + taken
        )
    return replace(schedule, workers=(tuple(made),))


def _begins(action: Action, costs: Costs) -> bool:
    """Whether an action takes up its microbatch, if it is the first to. What is received makes room
    by the shapes of the rows, which a device with memory of its own has before the rows."""
    receives = action.kind is Kind.RECV and COPIED not in costs.actions
    return receives or bool(action.kind.way or action.kind.end)


def _walks(
    actions: tuple[Action, ...], costs: Costs, extra: Extra, rows: Exchanged
) -> Counter[int]:
    """A microbatch is there from its first action on the worker to its last, and nothing of it
    behind that: what the code between the blocks of an adopted module has made is kept as long,
    wherever it was made, while on one worker alone it goes with the first stage's backward. Gives
    by place what is taken up before its action computes."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    left: dict[int, Counter[str]] = {}
    for index, action in enumerate(actions):
        walks = action.kind.way or action.kind.end or action.kind is Kind.SEND
        if walks or _begins(action, costs):
            first.setdefault(action.microbatch, index)
        if walks:
            last[action.microbatch] = index
        kept = left.setdefault(action.microbatch, Counter())
        for where, count in (*action.allocates, *extra.get(index, ())):
            kept[where] += count
    for (place, microbatch), size in rows.more.items():
        if place <= last[microbatch]:
            _add(extra, place, {_ACTIVATIONS: size}, 1)
            left[microbatch][_ACTIVATIONS] += size
    taken = Counter[int]()
    for microbatch, index in last.items():
        begun = {f"device/{kind}": n for kind, n in costs.begun_by(microbatch).items()}
        _add(extra, first[microbatch], begun, 1)
        if actions[first[microbatch]].lane is Lane.COMPUTE:
            taken[first[microbatch]] += sum(begun.values())
        _add(extra, index, begun, -1)
        _add(extra, index, left[microbatch], -1)
    return taken


def _add(extra: Extra, index: int, counts: Mapping[str, int], sign: int) -> None:
    extra.setdefault(index, []).extend((where, sign * n) for where, n in counts.items() if n)


def _copies(actions: tuple[Action, ...], costs: Costs) -> Counter[int]:
    """Bytes by place in the list: what an earlier block gave is copied before the code between the
    blocks goes on here, which could change it in place; and what goes while that code has not ended
    once more for the send."""
    forwards = [(i, a) for i, a in enumerate(actions) if a.kind.way == "forward"]
    ended = {action.microbatch: index for index, action in forwards}
    found = Counter[int]()
    for index, action in enumerate(actions):
        if action.kind is not Kind.SEND or action.state is not State.ACTIVATIONS:
            continue
        m = action.microbatch
        for after, size in costs.earlier.get(action.stage, ()):
            behind = (i for i, a in forwards if a.microbatch == m and a.stage >= after)
            found[next(behind) if index > ended[m] else index] += size
    return found


def _gone(actions: tuple[Action, ...], line: Pipelining) -> dict[int, int]:
    """By place of a SEND, where it has gone: certain only when LIMIT more to the same worker are
    under way, or at NORM. What is sent stays until then."""
    sent: dict[int, list[int]] = {}
    for index, action in enumerate(actions):
        if action.kind is Kind.SEND:
            sent.setdefault(peer(line, action), []).append(index)
    norm = next(i for i, action in enumerate(actions) if action.kind is Kind.NORM)
    found: dict[int, int] = {}
    for places in sent.values():
        found |= zip(places, (*places[LIMIT:], *(norm,) * LIMIT), strict=False)
    return found
