"""Updates: the optimizer's step on whole stages or parts of them, wherever their states are.

A part is a range of one chunk. Its weights, gradients and optimizer states are slices of buffers on
the device, spans of its room in the pool, or bytes of a tier of memory that it rests on; the
arithmetic is the same on all of them, element for element.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from outsize.memory import Chunk, ChunkTable
from outsize.optim import Optimizer, taker
from outsize.optim.declared import StateSpec
from outsize.optim.optimizer import Rates
from outsize.parallel.whole import WholeTensors
from outsize.plan import DEVICE
from outsize.runtime.storage.apart import apart
from outsize.runtime.storage.weight_pool import WeightPool
from outsize.schedule import Action, State
from outsize.schedule.action import WHOLE
from outsize.schedule.item import Item
from outsize.schedule.items import Piece
from outsize.schedule.kept import GRADIENTS, MASTER, PARAMETERS


class Settings(Protocol):
    """What a group of parameters shares."""

    @property
    def weight_decay(self) -> float: ...

    @property
    def lr(self) -> float: ...


Shape = tuple[int, ...]  # of a parameter that is updated as a whole; (-1,) of a flat range
Range = tuple[int, int, int, int, Shape, str]  # first, last, group, step, shape, first name
Rule = Callable[[Tensor, Tensor, Mapping[str, Tensor], Rates], None]  # as Optimizer.update
Slices = tuple[Tensor, Tensor, Mapping[str, Tensor]]  # weights, gradients, optimizer states
Cuts = dict[tuple[int, int, Shape], Slices]


@dataclass
class _Work:
    """The update of one chunk: its ranges, and the elements that still wait for it."""

    ranges: list[Range]
    left: int


@dataclass
class Updates:
    """Updates chunks of a weight_pool. whole_tensors: matrices that lie in parts on the tensor
    axis. scale: what gradients are multiplied by, of this step. skips: it changes nothing, and no
    update is counted. rule: takes the place of the optimizer's update, for a step."""

    weight_pool: WeightPool
    optimizer: Optimizer
    groups: Sequence[Settings]
    whole_tensors: WholeTensors | None = None
    scale: float = 1.0
    skips: bool = False
    rule: Rule | None = None

    def __post_init__(self) -> None:
        chunks = self.weight_pool.placement.chunks
        self._apart = apart(self.optimizer)
        # By chunk, the elements [first, last) that this worker updates.
        self._own = tuple(chunks.extent(index, MASTER) for index in range(len(chunks.tables)))
        self._work: dict[int, _Work] = {}  # of chunks that are being updated in parts
        # Of chunks held here, in buffers that stay: the piece, its slices, and those of its ranges.
        self._wholes: dict[int, tuple[Piece, Mapping[str, Tensor], Cuts]] = {}
        self._lock = threading.Lock()  # parts of one chunk may be updated on several lanes

    def reset(self) -> None:
        """Forget updates that were cut off."""
        self._work.clear()

    def run(self, action: Action, lr: float, touched: set[str], outdated: bool) -> None:
        """An UPDATE on the device. outdated: the parameters' room has to be written too."""
        placement, chunks = self.weight_pool.placement, self.weight_pool.chunks
        if action.part == WHOLE:
            for index in placement.chunks.of_stage[action.stage]:
                if chunks[index].gradients is not None:
                    if index not in self._wholes:
                        whole = Piece(index, *self._own[index])
                        self._wholes[index] = whole, self._held(whole), {}
                    piece, held, cut = self._wholes[index]
                    self._piece(piece, held, lr, touched, cut=cut)
            return
        piece = placement.items.pieces[action.stage][action.part]
        name = Item(State.OPTIMIZER, action.stage, action.part)
        here = self._held(piece) | self.weight_pool.views(name)
        self._piece(piece, here, lr, touched, outdated)

    def at_rest(self, action: Action, lr: float, touched: set[str]) -> None:
        """An UPDATE on the host: of what rests there, in place."""
        piece = self.weight_pool.placement.items.pieces[action.stage][action.part]
        here = self._held(piece) | dict(self.weight_pool.homes.resting(piece))
        there = None if MASTER in here else here[PARAMETERS]
        if there is not None and there.device != here[GRADIENTS].device:
            here[PARAMETERS] = there.to(here[GRADIENTS].device)  # on a device of its own memory
        self._piece(piece, here, lr, touched)
        if there is not None and there is not here[PARAMETERS]:
            there.copy_(here[PARAMETERS])

    def _held(self, piece: Piece) -> dict[str, Tensor]:
        """The slices of a piece that the device has: in buffers, or in rooms that are present."""
        chunk, placement = self.weight_pool.chunks[piece.chunk], self.weight_pool.placement
        held = {MASTER: chunk.master, PARAMETERS: chunk.parameters, GRADIENTS: chunk.gradients}
        found = {}
        for name, flat in (held | chunk.optimizer | chunk.shards).items():
            if flat is not None:
                if name in (PARAMETERS, GRADIENTS) and len(flat) == chunk.table.numel:
                    first, begin, end = 0, piece.first, piece.last
                else:
                    first, _ = placement.chunks.share(piece.chunk, name)
                    begin, end = placement.chunks.within(piece.chunk, name, piece.first, piece.last)
                found[name] = flat[begin - first : end - first]
        return found

    def _piece(
        self,
        piece: Piece,
        held: Mapping[str, Tensor],
        lr: float,
        touched: set[str],
        outdated: bool = False,
        cut: Cuts | None = None,
    ) -> None:
        """cut: where slices of its ranges are kept, which stay the same."""
        start, end = self._own[piece.chunk]
        if piece.first == piece.last and start < end:  # others have a part more
            return
        cut = {} if cut is None else cut
        gradients = held[GRADIENTS]
        table = self.weight_pool.chunks[piece.chunk].table
        optimizer = taker(self.optimizer, table.main)
        if self.scale != 1.0:
            gradients.mul_(self.scale)
        for first, last, group, step, shape, parameter in self._of(piece, touched):
            settings, key = self.groups[group], (first, last, shape)
            if key not in cut:
                cut[key] = _slices(table, optimizer.states, held, piece, key)
            mine = cut[key]
            rates = Rates(step, lr * settings.lr, settings.weight_decay, parameter)
            if shape == (-1,) or self.whole_tensors is None:
                (self.rule or optimizer.update)(*mine, rates)
            else:
                self._whole(optimizer, parameter, *mine, rates)
        own = self._apart[table.main]
        if own is not None:
            own.taken_at(held[MASTER], held, held[PARAMETERS])
        elif MASTER in held:
            held[PARAMETERS].copy_(held[MASTER])
        if outdated:  # the pool holds the parameters still, as they were
            flat = self.weight_pool.chunks[piece.chunk].parameters[piece.first : piece.last]
            flat.copy_(held[PARAMETERS])
        self._empty(piece, gradients)
        self._done(piece, touched)

    def _whole(
        self,
        optimizer: Optimizer,
        name: str,
        weights: Tensor,
        gradients: Tensor,
        states: Mapping[str, Tensor],
        rates: Rates,
    ) -> None:
        """Update a matrix of which a part lies here: every worker updates the whole of it."""
        whole_tensors = self.whole_tensors
        assert whole_tensors is not None
        whole = whole_tensors.whole(name, weights)
        shaped = {spec.name for spec in optimizer.states if spec.shaped}
        every = {
            state: whole_tensors.whole(name, mine)
            if state in shaped
            else mine  # whole on every worker
            for state, mine in states.items()
        }
        rule = self.rule or optimizer.update
        rule(whole, whole_tensors.whole(name, gradients), every, rates)
        if whole is not weights:
            weights.copy_(whole_tensors.local(name, whole))
            for state in shaped:
                states[state].copy_(whole_tensors.local(name, every[state]))

    def _empty(self, piece: Piece, gradients: Tensor) -> None:
        """Gradients that rest on the device begin the next step with zeros: those of a piece, and
        with its first piece those that other workers update."""
        placement, chunk = self.weight_pool.placement, self.weight_pool.chunks[piece.chunk]
        if placement.chunks.tier(piece.chunk, GRADIENTS) != DEVICE:
            return
        gradients.zero_()
        mine = self._own[piece.chunk]
        held = chunk.shards.get(GRADIENTS, chunk.gradients)
        if held is not None and piece.first == mine[0] and len(held) > mine[1] - mine[0]:
            first, _ = placement.chunks.extent(piece.chunk, GRADIENTS)
            held[: mine[0] - first].zero_()
            held[mine[1] - first :].zero_()

    def _done(self, piece: Piece, touched: set[str]) -> None:
        """A chunk whose last part is done waits for the gradients of the next step."""
        with self._lock:
            work = self._work[piece.chunk]
            work.left -= piece.last - piece.first
            if not work.left:
                del self._work[piece.chunk]
                slots = self.weight_pool.chunks[piece.chunk].table.slots
                touched.difference_update(slot.name for slot in slots)

    def _of(self, piece: Piece, touched: Collection[str]) -> Iterator[Range]:
        """The ranges of parameters within a piece that are updated alike.

        A parameter that no gradient reached is left alone, as torch.optim leaves one without.
        """
        chunk = self.weight_pool.chunks[piece.chunk]
        with self._lock:
            if piece.chunk not in self._work:  # whichever part comes first
                first, last = self._own[piece.chunk]
                ranges = [] if self.skips else _ranges(chunk, touched)
                self._work[piece.chunk] = _Work(ranges, last - first)
            ranges = self._work[piece.chunk].ranges
        for first, last, group, step, shape, name in ranges:
            first, last = max(first, piece.first), min(last, piece.last)
            if first < last:
                yield first, last, group, step, shape, name


def updated_weights(weight_pool: WeightPool, index: int) -> Tensor:
    """Of a chunk's weights those that this worker updates, as wide as it does; they rest on the
    device, or are in the pool."""
    chunk, chunks = weight_pool.chunks[index], weight_pool.placement.chunks
    if chunk.master is not None:
        return chunk.master
    base = chunks.extent(index, PARAMETERS)[0] if PARAMETERS in chunk.shards else 0
    first, last = chunks.extent(index, MASTER)
    return chunk.shards.get(PARAMETERS, chunk.parameters)[first - base : last - base]


def _slices(
    table: ChunkTable,
    states: Sequence[StateSpec],
    held: Mapping[str, Tensor],
    piece: Piece,
    of: tuple[int, int, Shape],
) -> Slices:
    """What of a piece belongs to a range of it, in its shape."""
    first, last, shape = of
    span = slice(first - piece.first, last - piece.first)
    here = {
        spec.name: _own(table, spec, held[spec.name], piece, (first, last)).view(
            shape if spec.shaped else (-1,)
        )
        for spec in states
    }
    weights = held.get(MASTER, held[PARAMETERS])
    return weights[span].view(shape), held[GRADIENTS][span].view(shape), here


def _own(
    table: ChunkTable, spec: StateSpec, flat: Tensor, piece: Piece, span: tuple[int, int]
) -> Tensor:
    """The elements of a piece's state that belong to a range of it. flat: those of the piece."""
    begin, first, last = (table.before(place, spec) for place in (piece.first, *span))
    return flat[first - begin : last - begin]


def _ranges(chunk: Chunk, touched: Collection[str]) -> list[Range]:
    """The runs of a chunk's parameters, one by one where elements of them are updated together;
    counts the update."""
    runs: list[Range] = []
    for slot in chunk.table.slots:
        if slot.name not in touched:
            continue
        step = chunk.steps[slot.name] = chunk.steps.get(slot.name, 0) + 1
        end = slot.offset + slot.numel
        shape = slot.shape if chunk.table.whole(slot) else (-1,)
        if (
            chunk.table.grain == 1
            and runs
            and runs[-1][1:5] == (slot.offset, slot.group, step, (-1,))
        ):
            runs[-1] = (runs[-1][0], end, slot.group, step, shape, runs[-1][5])
        else:
            runs.append((slot.offset, end, slot.group, step, shape, slot.name))
    return runs
