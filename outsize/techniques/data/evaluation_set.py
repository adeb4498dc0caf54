"""Files of one's own to validate on: `data.evaluation: held.jsonl`.

They are read as the training data are, all of them for validation, and of the training data nothing
is held out then.
"""

from __future__ import annotations

from dataclasses import dataclass

from outsize.errors import OutsizeError
from outsize.registry import setting, technique

KEY = "data.evaluation"


@dataclass(frozen=True)
class Evaluation:
    path: str | tuple[str, ...] = setting(
        (), "files and directories to validate on, instead of a part of data.path"
    )

    def __post_init__(self) -> None:
        if not self.path:
            raise OutsizeError(f"{KEY} names no file; expected one or more to validate on")

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path


technique(KEY, Evaluation, "validation on files of one's own", short="path")
