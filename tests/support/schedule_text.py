"""Lists of actions as they print themselves, each behind its worker's number."""

from __future__ import annotations

from outsize.schedule import Action, Kind, Schedule
from outsize.schedule.action import WHOLE, Lane, State


def read_schedule(lines: tuple[str, ...], stages: int, microbatches: int, workers: int) -> Schedule:
    """The schedule of lines."""
    lists: list[list[Action]] = [[] for _ in range(workers)]
    for line in "\n".join(lines).splitlines():
        worker, *words = line.split()
        lists[int(worker)].append(_action(words))
    return Schedule(stages, microbatches, tuple(map(tuple, lists)))


def _action(words: list[str]) -> Action:
    kind, stage, microbatch, lane, *tail = words
    kind, _, state = kind.partition(".")
    stage, _, part = stage.partition("#")
    workspace, allocates = 0, []
    for word in tail:
        if word.startswith("workspace="):
            workspace = int(word.partition("=")[2])
        else:
            cut = max(word.rfind("+"), word.rfind("-"))
            allocates.append((word[:cut], int(word[cut:])))
    return Action(
        Kind(kind), _index(stage), _index(microbatch), Lane(lane), tuple(allocates), workspace,
        State(state), _index(part or "*"),
    )  # fmt: skip


def _index(word: str) -> int:
    return WHOLE if word == "*" else int(word)
