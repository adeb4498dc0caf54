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
from outsize.optim import Optimizer
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


Range = tuple[int, int, int, int]  # first, last, group, step


@dataclass
class _Work:
    """The update of one chunk: its ranges, and the elements that still wait for it."""

    ranges: list[Range]
    left: int


@dataclass
class Updates:
    """Updates chunks of a residence. scale: what gradients are multiplied by, of this step."""

    residence: Residence
    optimizer: Optimizer
    groups: Sequence[Settings]
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
                    whole = Piece(index, 0, chunks[index].table.numel)
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
        chunk, span = self.residence.chunks[piece.chunk], slice(piece.first, piece.last)
        found = {name: flat[span] for name, flat in chunk.optimizer.items()}
        for name, flat in (
            (PARAMETERS, chunk.parameters), (GRADIENTS, chunk.gradients), (MASTER, chunk.master)
        ):  # fmt: skip
            if flat is not None:
                found[name] = flat[span]
        return found

    def _piece(
        self,
        piece: Piece,
        here: Mapping[str, Tensor],
        lr: float,
        touched: set[str],
        outdated: bool = False,
    ) -> None:
        weights = here.get(MASTER, here[PARAMETERS])
        gradients = here[GRADIENTS]
        states = {name: here[name] for name in self.optimizer.states}
        if self.scale < 1.0:
            gradients.mul_(self.scale)
        for first, last, group, step in self._of(piece, touched):
            span = slice(first - piece.first, last - piece.first)
            settings = self.groups[group]
            self.optimizer.update(
                weights[span],
                gradients[span],
                {name: flat[span] for name, flat in states.items()},
                step,
                lr * settings.lr,
                settings.weight_decay,
            )
        if MASTER in here:
            here[PARAMETERS].copy_(weights)
        if outdated:  # the pool holds the parameters still, as they were
            flat = self.residence.chunks[piece.chunk].parameters[piece.first : piece.last]
            flat.copy_(here[PARAMETERS])
        if self.residence.placement.tier(piece.chunk, GRADIENTS) == DEVICE:
            gradients.zero_()
        self._done(piece, touched)

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
                self._work[piece.chunk] = _Work(_ranges(chunk, touched), chunk.table.numel)
            ranges = self._work[piece.chunk].ranges
        for first, last, group, step in ranges:
            first, last = max(first, piece.first), min(last, piece.last)
            if first < last:
                yield first, last, group, step


def _ranges(chunk: Chunk, touched: Collection[str]) -> list[Range]:
    """(first, last, group, step) of the runs of a chunk's parameters; counts the update."""
    runs: list[Range] = []
    for slot in chunk.table.slots:
        if slot.name not in touched:
            continue
        step = chunk.steps[slot.name] = chunk.steps.get(slot.name, 0) + 1
        end = slot.offset + slot.numel
        if runs and runs[-1][1:] == (slot.offset, slot.group, step):
            runs[-1] = (runs[-1][0], end, slot.group, step)
        else:
            runs.append((slot.offset, end, slot.group, step))
    return runs
