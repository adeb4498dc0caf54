"""Schedule: the ordered actions of one step for each worker, and its text form.

The text has one line an action, in order: worker, kind, stage, microbatch, lane, then bytes. What
is moved stands behind the kind, a part behind its stage:

    0 FORWARD 1 0 compute device/activations+1024 workspace=2048
    0 FETCH.optimizer 1#0 * fetch

The first line has the numbers, and update=behind and vocabulary=1 or 2 where that is so; what
passes through the pool follows in lines of its own (lines.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from outsize.errors import OutsizeError, nearest
from outsize.schedule.action import WHOLE, Action, Kind, Lane, State
from outsize.schedule.lines import Collected, lines_of, numbers, read_numbers
from outsize.schedule.residency import Residency
from outsize.schedule.role import Role


@dataclass(frozen=True)
class Schedule:
    """workers: each worker's actions in order. stages, microbatches: their numbers.

    recompute: the stages whose FORWARD keeps only its input. first: the first stage that is
    trained; those before it have no backward pass. residency: what passes through the pool of the
    device tier, where anything does. behind: a stage is updated behind its own backward pass,
    not after NORM. vocabulary: the variant where the vocabulary is cut over all workers
    (vocabulary.py), 0 where it is not. role: what this is of a pipeline's step, where it is one
    worker's of many. ahead: the stages that are updated without gradients, before their FORWARDs.
    """

    stages: int
    microbatches: int
    workers: tuple[tuple[Action, ...], ...]
    recompute: frozenset[int] = frozenset()
    first: int = 0
    residency: Residency | None = None
    behind: bool = False
    vocabulary: int = 0
    role: Role | None = None
    ahead: frozenset[int] = frozenset()

    def before(self, stage: int, microbatch: int) -> int:
        """The stage whose outputs a stage takes; -1 for the first."""
        return stage - 1 if self.role is None else self.role.before(stage, microbatch)

    def after(self, stage: int, microbatch: int) -> int:
        """The stage that takes a stage's outputs; -1 for the last."""
        role = self.role or _PLAIN
        return role.after(stage, microbatch, self.stages)

    def begin(self, microbatch: int) -> int:
        """The first stage of a microbatch."""
        paths = self.role.paths if self.role else ()
        return paths[microbatch][0] if paths else 0

    def end(self, microbatch: int) -> int:
        """The last stage of a microbatch."""
        paths = self.role.paths if self.role else ()
        return paths[microbatch][-1] if paths else self.stages - 1

    def to_text(self) -> str:
        """The stable text form; `from_text` gives back an equal schedule."""
        lines = [
            f"schedule stages={self.stages} microbatches={self.microbatches}"
            f" recompute={numbers(self.recompute)} first={self.first} workers={len(self.workers)}"
            + (" update=behind" if self.behind else "")
            + (f" vocabulary={self.vocabulary}" if self.vocabulary else "")
            + (f" ahead={numbers(self.ahead)}" if self.ahead else "")
        ]
        if self.role is not None:
            lines.append(str(self.role))
        if self.residency is not None:
            lines += lines_of(self.residency)
        for worker, actions in enumerate(self.workers):
            lines += [f"{worker} {action}" for action in actions]
        return "\n".join(lines) + "\n"

    @staticmethod
    def from_text(text: str) -> Schedule:
        """Read the text form; errors name the line."""
        lines = text.splitlines()
        made = _head(lines[0] if lines else "")
        workers: list[list[Action]] = [[] for _ in made.workers]
        collected, role = Collected(made.stages), None
        for number, line in enumerate(lines[1:], start=2):
            if line.startswith("role "):
                role = Role.read(line, number)
                continue
            if not line.strip() or collected.line(line, number):
                continue
            worker, action = _action(line, number)
            if not 0 <= worker < len(workers):
                raise OutsizeError(
                    f"schedule line {number}: worker is {worker}; expected 0 to {len(workers) - 1}"
                )
            workers[worker].append(action)
        return replace(
            made, workers=tuple(map(tuple, workers)), residency=collected.made, role=role
        )


_PLAIN = Role(frozenset(), frozenset())
_HEAD = re.compile(
    r"schedule stages=(\d+) microbatches=(\d+) recompute=(-|\d+(?:,\d+)*) first=(\d+)"
    r" workers=(\d+)( update=behind)?(?: vocabulary=([12]))?"
    r"(?: ahead=(\d+(?:,\d+)*))?"
)


def _head(line: str) -> Schedule:
    """The schedule without its actions."""
    match = _HEAD.fullmatch(line.strip())
    if match is None:
        raise OutsizeError(
            f"schedule line 1: {line!r}; expected 'schedule stages=S microbatches=M"
            " recompute=-|s,s... first=F workers=W', perhaps with ' update=behind',"
            " ' vocabulary=1' or ' ahead=s,s...'"
        )
    stages, microbatches, again, first, workers, behind, vocabulary, ahead = match.groups()
    return Schedule(
        int(stages), int(microbatches), ((),) * int(workers), frozenset(read_numbers(again)),
        int(first), None, bool(behind), int(vocabulary or 0),
        ahead=frozenset(read_numbers(ahead or "-")),
    )  # fmt: skip


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
                if cut < 1:
                    raise ValueError(f"{word!r} has no signed number of bytes")
                allocates.append((word[:cut], int(word[cut:])))
        kind, _, state = kind.partition(".")
        stage, _, part = stage.partition("#")
        if kind not in Kind.__members__:
            known = tuple(Kind.__members__)
            raise OutsizeError(f"schedule line {number}: kind {kind!r}{nearest(kind, known)}")
        action = Action(
            Kind(kind), _number(stage), _number(microbatch), Lane(lane), tuple(allocates),
            workspace, State(state), _number(part or "*"),
        )  # fmt: skip
        return int(worker), action
    except OutsizeError:
        raise
    except ValueError as error:
        raise OutsizeError(
            f"schedule line {number}: {line!r} is not 'worker KIND stage microbatch lane ...':"
            f" {error}"
        ) from None


def _number(word: str) -> int:
    return WHOLE if word == "*" else int(word)
