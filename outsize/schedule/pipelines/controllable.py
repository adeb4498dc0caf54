"""V-Half and V-Min: a V of two stages a worker, with half and a third of the memory of 1F1B.

Qi et al., "Pipeline Parallelism with Controllable Memory", 2024. A building block says in which
slot, of six a microbatch, each pass of one microbatch comes; repeated, it gives a schedule whose
memory is how long a block lives. Then the ends are squeezed: what has room moves into earlier slots
as long as its inputs are there and no worker holds more than in the middle. V-Half holds
devices / 2 + 1 microbatches, V-Min floor((devices + 4) / 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count

from outsize.schedule.pipelines.conditions import at_least, basic
from outsize.schedule.pipelines.pipeline import Pipeline, pipeline
from outsize.schedule.pipelines.vee import orders_of
from outsize.schedule.place import one_way, waved

_Slots = list[list[int]]  # of one worker: by pass, the slot of each microbatch
_Block = Callable[[int, int], tuple[int, int, int, int]]
_PASSES = 4  # forward down, forward up, gradient down, gradient up
_EVERY = 6  # slots from one microbatch to the next: four passes and two weight gradients
_HOLDS = (1, 1, 0, 0, -1)  # half microbatches that a pass takes, and a weight gradient gives back


def v_half(devices: int, microbatches: int) -> Pipeline:
    """Half of the memory of 1F1B."""
    return _made("V-Half", devices, microbatches, _half)


def v_min(devices: int, microbatches: int) -> Pipeline:
    """A third of the memory of 1F1B; waits much where F, I and W are not equal."""
    return _made("V-Min", devices, microbatches, _third)


def _half(devices: int, w: int) -> tuple[int, int, int, int]:
    apart = 0 if devices % 2 else 3
    back = 3 * devices + apart
    return 2 * w, 3 * devices - w - 2, back + 2 * w - 1, back + 3 * devices - w - 2


def _third(devices: int, w: int) -> tuple[int, int, int, int]:
    back = 2 * devices + (0 if devices % 3 else 2)
    return w, 2 * devices - w - 1, back + w, back + 2 * devices - w - 1


def _made(name: str, devices: int, microbatches: int, block: _Block) -> Pipeline:
    basic(name, devices, microbatches)
    at_least(name, "devices", devices, 2)
    slots = [
        [[start + _EVERY * m for m in range(microbatches)] for start in block(devices, w)]
        for w in range(devices)
    ]
    slots = _eager(_squeezed([[*s, _weights(s)] for s in slots]))
    slots = _eager([[*s, _weights(s)] for s in _squeezed([s[:_PASSES] for s in slots])])
    place = one_way(devices, waved(devices, 2), microbatches)
    return pipeline(name, place, orders_of([_order(s[:_PASSES]) for s in slots]))


def _order(slots: _Slots) -> list[tuple[int, int, int]]:
    """(kind, first or second pass, microbatch) by slot; weights of the first pass before others."""
    placed = [(slot, p // 2, p % 2, m) for p in range(_PASSES) for m, slot in enumerate(slots[p])]
    done, pending = [0, 0], [0, 0]
    taken = {slot: (kind, way, m) for slot, kind, way, m in placed}
    order = []
    for slot in count():
        if slot in taken:
            kind, way, _ = taken[slot]
            pending[way] += kind == 1
            order.append(taken[slot])
        elif any(pending):
            way = 0 if pending[0] else 1
            order.append((2, way, done[way]))
            pending[way], done[way] = pending[way] - 1, done[way] + 1
        elif slot > max(taken):
            return order
    raise AssertionError


def _weights(slots: _Slots) -> list[int]:
    """Each weight gradient in the first free slot behind its input gradient."""
    taken = {slot for row in slots[:_PASSES] for slot in row}
    free, last = [], -1
    for slot in sorted(slot for row in slots[2:_PASSES] for slot in row):
        last = next(at for at in count(max(slot, last) + 1) if at not in taken)
        free.append(last)
    return free


def _peak(slots: _Slots) -> int:
    """Half microbatches held at once."""
    rows = slots if len(slots) > _PASSES else [*slots, _weights(slots)]
    steps = sorted((slot, _HOLDS[p]) for p, row in enumerate(rows) for slot in row)
    held = peak = 0
    for _, change in steps:
        held += change
        peak = max(peak, held)
    return peak


def _by_slot(slots: list[_Slots]) -> list[tuple[int, int, int, int]]:
    """(slot, worker, pass, microbatch) of everything, in order."""
    return sorted(
        (slot, w, p, m)
        for w, rows in enumerate(slots)
        for p, row in enumerate(rows)
        for m, slot in enumerate(row)
    )


def _before(w: int, p: int, workers: int) -> list[tuple[int, int]]:
    """(worker, pass) of what the same microbatch must have done."""
    first = [(w, p - 1)] if p else []
    source = w + 1 if p % 2 else w - 1
    return [*first, (source, p)] if 0 <= source < workers else first


def _squeezed(slots: list[_Slots]) -> list[_Slots]:
    """Move what comes before the first microbatch is back, and after the last has entered, into
    earlier free slots. Without weights among the slots, only the latter."""
    weights = len(slots[0]) > _PASSES
    limit = max(_peak(rows) for rows in slots)
    last = len(slots[0][0]) - 1
    taken: list[set[int]] = [set() for _ in slots]
    middle, ending = False, False
    for slot, w, p, m in _by_slot(slots):
        if p == _PASSES - 1 and w == 0:
            middle = True
        stays = not ending and (middle or not weights)
        if middle and p == 0 and m == last:
            ending = True
        if not stays:
            earliest = _earliest(slots, w, p, m)
            _move(slots[w], p, m, (s for s in range(earliest, slot) if s not in taken[w]), limit)
        taken[w].add(slots[w][p][m])
    return slots


def _earliest(slots: list[_Slots], w: int, p: int, m: int) -> int:
    """The first slot at which the inputs of one pass are there."""
    if p == _PASSES:
        ready = sorted(slot for row in slots[w][2:_PASSES] for slot in row)[m]
    else:
        ready = max((slots[v][q][m] for v, q in _before(w, p, len(slots))), default=-1)
    return 1 + max(ready, slots[w][p][m - 1] if m else -1)


def _move(rows: _Slots, p: int, m: int, free: Iterable[int], limit: int) -> None:
    """Put one pass into the first free slot in which the worker holds no more than the limit."""
    stays = rows[p][m]
    for slot in free:
        rows[p][m] = slot
        if _peak(rows) <= limit:
            return
    rows[p][m] = stays


def _eager(slots: list[_Slots]) -> list[_Slots]:
    """The same orders, everything as early as its inputs and its worker allow."""
    ends: dict[tuple[int, int, int], int] = {}
    free = [0] * len(slots)
    for _, w, p, m in _by_slot(slots):
        inputs = [] if p == _PASSES else _before(w, p, len(slots))
        start = max([free[w], *(ends[v, q, m] for v, q in inputs)])
        slots[w][p][m] = start
        ends[w, p, m] = free[w] = start + 1
    return slots
