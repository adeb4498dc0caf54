"""Updates: the optimizer's step on whole stages or parts of them, wherever their states are.

A part is a range of one chunk. Its weights, gradients and optimizer states are slices of buffers on
the device, spans of its room in the pool, or bytes of a tier of memory that it rests on; the
arithmetic is the same on all of them, element for element.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from outsize.memory import Chunk
from outsize.optim import Optimizer, taker
from outsize.parallel.wholes import Wholes
from outsize.plan import DEVICE
from outsize.runtime.placement import GRADIENTS, MASTER, PARAMETERS, Piece
from outsize.runtime.residence import Residence
from outsize.schedule import Action, State
from outsize.schedule.action import WHOLE
from outsize.schedule.residency import item


class Settings(Protocol):
    """What a group of parameters shares."""

    @property
    def weight_decay(self) -> float: ...

    @property
    def lr(self) -> float: ...


Shape = tuple[int, ...]  # of a matrix that is updated as a whole; (-1,) of a flat range
Range = tuple[int, int, int, int, Shape, str]  # first, last, group, step, shape, first name


@dataclass
class _Work:
    """The update of one chunk: its ranges, and the elements that still wait for it."""

    ranges: list[Range]
    left: int


@dataclass
class Updates:
    """Updates chunks of a residence. wholes: matrices that lie in parts on the tensor axis.
    scale: what gradients are multiplied by, of this step."""

    residence: Residence
    optimizer: Optimizer
    groups: Sequence[Settings]
    wholes: Wholes | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        self._work: dict[int, _Work] = {}  # of chunks that are being updated in parts
        self._lock = threading.Lock()  # parts of one chunk may be updated on several lanes

    def reset(self) -> None:
        """Forget updates that were cut off."""
        self._work.clear()

    def run(self, action: Action, lr: float, touched: set[str], outdated: bool) -> None:
        """An UPDATE on the device. outdated: the parameters' room has to be written too."""
        placement, chunks = self.residence.placement, self.residence.chunks
        if action.part == WHOLE:
            for index in placement.chunks_of[action.stage]:
                if chunks[index].gradients is not None:
                    whole = Piece(index, *placement.extent(index, MASTER))
                    self._piece(whole, self._held(whole), lr, touched)
            return
        piece = placement.pieces[action.stage][action.part]
        name = item(State.OPTIMIZER, action.stage, action.part)
        here = self._held(piece) | self.residence.views(name)
        self._piece(piece, here, lr, touched, outdated)

    def at_rest(self, action: Action, lr: float, touched: set[str]) -> None:
        """An UPDATE on the host: of what rests there, in place."""
        piece = self.residence.placement.pieces[action.stage][action.part]
        here = self._held(piece) | dict(self.residence.resting(piece))
        self._piece(piece, here, lr, touched)

    def _held(self, piece: Piece) -> dict[str, Tensor]:
        """The slices of a piece that the device has: in buffers, or in rooms that are present."""
        chunk, extent = self.residence.chunks[piece.chunk], self.residence.placement.extent
        held = {MASTER: chunk.master, PARAMETERS: chunk.parameters, GRADIENTS: chunk.gradients}
        found = {}
        for name, flat in (held | chunk.optimizer | chunk.shards).items():
            if flat is not None:
                cut = len(flat) < chunk.table.numel
                first = extent(piece.chunk, name)[0] if cut else 0
                found[name] = flat[piece.first - first : piece.last - first]
        return found

    def _piece(
        self,
        piece: Piece,
        held: Mapping[str, Tensor],
        lr: float,
        touched: set[str],
        outdated: bool = False,
    ) -> None:
        start, end = self.residence.placement.extent(piece.chunk, MASTER)
        if piece.first == piece.last and start < end:  # others have a part more
            return
        weights = held.get(MASTER, held[PARAMETERS])
        gradients = held[GRADIENTS]
        optimizer = taker(self.optimizer, self.residence.chunks[piece.chunk].table.matrices)
        states = {name: held[name] for name in optimizer.states}
        if self.scale < 1.0:
            gradients.mul_(self.scale)
        for first, last, group, step, shape, parameter in self._of(piece, touched):
            span = slice(first - piece.first, last - piece.first)
            settings = self.groups[group]
            here = {name: flat[span].view(shape) for name, flat in states.items()}
            mine = (weights[span].view(shape), gradients[span].view(shape), here)
            rates = (step, lr * settings.lr, settings.weight_decay)
            if shape == (-1,) or self.wholes is None:
                optimizer.update(*mine, *rates)
            else:
                self._whole(optimizer, parameter, *mine, rates)
        if MASTER in held:
            held[PARAMETERS].copy_(weights)
        if outdated:  # the pool holds the parameters still, as they were
            flat = self.residence.chunks[piece.chunk].parameters[piece.first : piece.last]
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
        rates: tuple[int, float, float],
    ) -> None:
        """Update a matrix of which a part lies here: every worker updates the whole of it."""
        wholes = self.wholes
        assert wholes is not None
        whole = wholes.whole(name, weights)
        every = {state: wholes.whole(name, mine) for state, mine in states.items()}
        optimizer.update(whole, wholes.whole(name, gradients), every, *rates)
        if whole is not weights:
            weights.copy_(wholes.local(name, whole))
            for state, mine in states.items():
                mine.copy_(wholes.local(name, every[state]))

    def _empty(self, piece: Piece, gradients: Tensor) -> None:
        """Gradients that rest on the device begin the next step with zeros: those of a piece, and
        with its first piece those that other workers update."""
        placement, chunk = self.residence.placement, self.residence.chunks[piece.chunk]
        if placement.tier(piece.chunk, GRADIENTS) != DEVICE:
            return
        gradients.zero_()
        mine = placement.extent(piece.chunk, MASTER)
        held = chunk.shards.get(GRADIENTS, chunk.gradients)
        if held is not None and piece.first == mine[0] and len(held) > mine[1] - mine[0]:
            first, _ = placement.extent(piece.chunk, GRADIENTS)
            held[: mine[0] - first].zero_()
            held[mine[1] - first :].zero_()

    def _done(self, piece: Piece, touched: set[str]) -> None:
        """A chunk whose last part is done waits for the gradients of the next step."""
        with self._lock:
            work = self._work[piece.chunk]
            work.left -= piece.last - piece.first
            if not work.left:
                del self._work[piece.chunk]
                slots = self.residence.chunks[piece.chunk].table.slots
                touched.difference_update(slot.name for slot in slots)

    def _of(self, piece: Piece, touched: Collection[str]) -> Iterator[Range]:
        """The ranges of parameters within a piece that are updated alike.

        A parameter that no gradient reached is left alone, as torch.optim leaves one without.
        """
        chunk = self.residence.chunks[piece.chunk]
        with self._lock:
            if piece.chunk not in self._work:  # whichever part comes first
                first, last = self.residence.placement.extent(piece.chunk, MASTER)
                self._work[piece.chunk] = _Work(_ranges(chunk, touched), last - first)
            ranges = self._work[piece.chunk].ranges
        for first, last, group, step, shape, name in ranges:
            first, last = max(first, piece.first), min(last, piece.last)
            if first < last:
                yield first, last, group, step, shape, name


def _ranges(chunk: Chunk, touched: Collection[str]) -> list[Range]:
    """The runs of a chunk's parameters, matrices one by one; counts the update."""
    runs: list[Range] = []
    for slot in chunk.table.slots:
        if slot.name not in touched:
            continue
        step = chunk.steps[slot.name] = chunk.steps.get(slot.name, 0) + 1
        end, shape = slot.offset + slot.numel, slot.shape if chunk.table.matrices else (-1,)
        if runs and runs[-1][1:5] == (slot.offset, slot.group, step, (-1,)):
            runs[-1] = (runs[-1][0], end, slot.group, step, shape, runs[-1][5])
        else:
            runs.append((slot.offset, end, slot.group, step, shape, slot.name))
    return runs
