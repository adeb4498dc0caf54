"""Schedule: the ordered actions of one step for each worker, and its text form.

The text has one line an action, in order: worker, kind, stage, microbatch, lane, then bytes:

    0 FORWARD 1 0 compute device/activations+1024 workspace=2048
"""

from __future__ import annotations

from dataclasses import dataclass

from outsize.errors import OutsizeError, nearest
from outsize.schedule.action import WHOLE_STEP, Action, Kind, Lane


@dataclass(frozen=True)
class Schedule:
    """workers: each worker's actions in order. stages, microbatches: their numbers.

    recompute: the stages whose FORWARD keeps only its input.
    """

    stages: int
    microbatches: int
    workers: tuple[tuple[Action, ...], ...]
    recompute: frozenset[int] = frozenset()

    def to_text(self) -> str:
        """The stable text form; `from_text` gives back an equal schedule."""
        again = ",".join(map(str, sorted(self.recompute))) or "-"
        lines = [f"schedule stages={self.stages} microbatches={self.microbatches} recompute={again}"]
        for worker, actions in enumerate(self.workers):
            lines += [f"{worker} {action}" for action in actions]
        return "\n".join(lines) + "\n"

    @staticmethod
    def from_text(text: str) -> Schedule:
        """Read the text form; errors name the line."""
        lines = text.splitlines()
        head = _head(lines[0] if lines else "")
        workers: dict[int, list[Action]] = {}
        for number, line in enumerate(lines[1:], start=2):
            if line.strip():
                worker, action = _action(line, number)
                workers.setdefault(worker, []).append(action)
        if sorted(workers) != list(range(len(workers))):
            raise OutsizeError(f"schedule: workers are {sorted(workers)}; expected 0, 1, ... without a gap")
        listed = tuple(tuple(workers[w]) for w in sorted(workers))
        again = frozenset(int(s) for s in head["recompute"].split(",") if s != "-")
        return Schedule(int(head["stages"]), int(head["microbatches"]), listed, again)


def _head(line: str) -> dict[str, str]:
    words = line.split()
    fields = dict(word.split("=", 1) for word in words[1:] if "=" in word)
    if not words or words[0] != "schedule" or set(fields) != {"stages", "microbatches", "recompute"}:
        raise OutsizeError(
            f"schedule line 1: {line!r}; expected 'schedule stages=S microbatches=M recompute=...'"
        )
    return fields


def _action(line: str, number: int) -> tuple[int, Action]:
    words = line.split()
    try:
        worker, kind, stage, microbatch, lane = words[:5]
        allocates, workspace = [], 0
        for word in words[5:]:
            if word.startswith("workspace="):
                workspace = int(word.partition("=")[2])
            else:
                cut = max(word.rfind("+"), word.rfind("-"))
                allocates.append((word[:cut], int(word[cut:])))
        if kind not in Kind.__members__:
            raise OutsizeError(f"schedule line {number}: kind {kind!r}{nearest(kind, tuple(Kind))}")
        action = Action(
            Kind(kind), _number(stage), _number(microbatch), Lane(lane), tuple(allocates), workspace
        )
        return int(worker), action
    except OutsizeError:
        raise
    except ValueError as error:
        raise OutsizeError(
            f"schedule line {number}: {line!r} is not 'worker KIND stage microbatch lane ...': {error}"
        ) from None


def _number(word: str) -> int:
    return WHOLE_STEP if word == "*" else int(word)
