"""Steps that are counted, for methods whose steps depend on how many were made before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from outsize.errors import OutsizeError
from outsize.runtime.engine import Loaded, Ran
from outsize.runtime.handlers.training import Training

if TYPE_CHECKING:
    from outsize.runtime.job import Job
    from outsize.runtime.method import Notes

STEPS = "steps"  # of a checkpoint's notes: those made


class Counted(Training):
    """noted: what its notes are called in a checkpoint. said: them, as the subject of an error."""

    noted: ClassVar[str]
    said: ClassVar[str]

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._job, self._steps = job, 0

    def beside(self) -> Mapping[str, int]:
        """What its notes hold besides, from 0 on."""
        return {}

    def play(self, step: Loaded, begin: float) -> list[Ran]:
        ran = super().play(step, begin)
        self._steps += 1
        return ran

    def notes(self) -> Notes:
        return {**super().notes(), self.noted: {STEPS: self._steps, **self.beside()}}

    def recall(self, notes: Mapping[str, Any]) -> None:
        super().recall(notes)
        found = notes.get(self.noted, {})
        numbers = found.values() if isinstance(found, dict) else (found,)
        if not all(isinstance(n, int) and n >= 0 for n in numbers):
            raise OutsizeError(f"checkpoint: {self.said} {found!r}; expected numbers")
        self._steps = found.get(STEPS, 0)
