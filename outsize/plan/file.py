"""A plan as a file that `outsize plan --out` writes and `outsize train --plan` takes: beside the
plan, which model it is for.

    version: 2
    model: small                     as it was named, for people
    parameters: 8c2f...              a digest of the names and shapes of its parameters
    machines: [0, 2, 1]              which of them have the ranks in turn, where that matters
    plan: {segments: 8, ...}

Files without a version are plans alone, as runs keep them in plan.yaml: version 1. They are taken
for any model that has as many segments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from outsize.errors import OutsizeError
from outsize.plan.plan import Plan
from outsize.texts import read_text, write_text
from outsize.typed import dump_yaml, load_yaml, plain, read

VERSION = 2
Shapes = Iterable[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class PlanFile:
    """A plan and the model that it was made for; model and parameters are "" in old files.
    machines: by the number of their start, in the order of the ranks on them; (): in turn."""

    plan: Plan
    version: int = VERSION
    model: str = ""
    parameters: str = ""
    machines: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if sorted(self.machines) != list(range(len(self.machines))):
            raise OutsizeError(
                f"plan: machines are {list(self.machines)}; expected each of 0 to"
                f" {max(0, len(self.machines) - 1)} once"
            )

    def check_model(self, source: str, model: str, segments: int, digest: str) -> None:
        """OutsizeError where it was made for another model than this one."""
        if self.plan.segments != segments:
            raise OutsizeError(
                f"{source} is a plan of {self.plan.segments} segments, and {model} has {segments};"
                " expected one that was made for it: outsize plan --out"
            )
        if self.parameters not in ("", digest):
            raise OutsizeError(
                f"{source} was made for {self.model}, and {model} has other parameters; expected a"
                " plan that was made for it: outsize plan --out"
            )


def digest_of(shapes: Shapes) -> str:
    """A digest of the names and shapes of a model's parameters."""
    lines = sorted(f"{name} {'x'.join(map(str, shape))}" for name, shape in shapes)
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


def write_plan(path: Path, file: PlanFile) -> None:
    """OutsizeError where the system refuses."""
    said: dict[str, object] = {"version": file.version, "model": file.model}
    said["parameters"] = file.parameters
    if file.machines:
        said["machines"] = list(file.machines)
    text = dump_yaml({**said, "plan": plain(file.plan)})
    write_text(text, path)


def read_plan(path: Path) -> PlanFile:
    """OutsizeError, one line, for what is no plan, and for a version that is not known here."""
    found = load_yaml(read_text(path, "expected what outsize plan --out writes"), str(path))
    if not isinstance(found, dict) or not {"version", "segments"} & set(found):
        raise OutsizeError(f"{path} is no plan; expected what outsize plan --out writes")
    version = found.get("version", 1)
    if version == 1:
        return PlanFile(read(Plan, found, str(path)), 1)
    if version != VERSION:
        raise OutsizeError(
            f"{path}: version {version!r} of plan files; expected 1 or {VERSION}: plan anew with"
            " outsize plan --out"
        )
    made: PlanFile = read(PlanFile, found, str(path))
    return made
