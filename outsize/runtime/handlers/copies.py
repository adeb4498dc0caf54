"""COPY: a microbatch's rows to a device whose memory is not the host's, beside the computation."""

from __future__ import annotations

from functools import partial

import torch

from outsize.memory.upload import Pairs, room_for, upload
from outsize.runtime.engine import Deed
from outsize.runtime.microbatches import Microbatches
from outsize.runtime.points import Points
from outsize.runtime.watch import Watch
from outsize.schedule import Action, Kind


class Copies:
    """device: where they go."""

    kinds = (Kind.COPY,)

    def __init__(self, microbatches: Microbatches, device: torch.device, watch: Watch) -> None:
        self._microbatches, self._device, self._watch = microbatches, device, watch
        self._going: dict[int, Pairs] = {}

    def bind(self, action: Action, index: int, points: Points) -> Deed:
        m = action.microbatch
        return Deed(lambda: upload(self._going.pop(m)), partial(self._make_room, m))

    def begin(self, points: Points) -> None:
        """The batch is there."""

    def reset(self) -> None:
        self._going.clear()

    def _make_room(self, m: int) -> None:
        with self._watch.kind(None):
            part = self._microbatches.part(m)
        with self._watch.kind("data"):
            room, self._going[m] = room_for(part, self._device)
        self._microbatches.bring(m, room)
