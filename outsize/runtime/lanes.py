"""Lanes: plays one worker's list of actions, copies and disk beside the computation.

The calling thread computes. It walks the list; an action of another lane is handed to that lane's
thread when it is reached, a computing action waits for what it needs and runs. What allocates or
frees memory happens in the calling thread at fixed places of the list (`begin`, `settle`), so the
bytes that are held do not depend on how fast a disk is.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from outsize.schedule import Action, Lane, Schedule
from outsize.schedule.waits import settled, waits
from outsize.trace.trace import Event

_TALKS = (Lane.NETWORK, Lane.SEND, Lane.RECEIVE, Lane.MERGE, Lane.EXCHANGE)  # with other workers
_GRACE = 1.0  # seconds that such a lane has to end after a fault


class Player(Protocol):
    """What carries actions out."""

    def act(self, index: int, action: Action, begin: float) -> Event:
        """Run a computing action, in the calling thread."""

    def prepare(self, index: int, action: Action) -> None:
        """In the calling thread, before another lane runs the action."""

    def move(self, index: int, action: Action, begin: float) -> Event:
        """Run an action of another lane, in that lane's thread."""

    def settle(self, index: int, action: Action) -> None:
        """In the calling thread, once the action has run and its bytes can go."""


@dataclass
class _Board:
    """Which actions have ended, and the first fault."""

    done: list[threading.Event]
    marks: dict[int, torch.cuda.Event] = field(default_factory=dict)
    fault: BaseException | None = None

    def wait(self, places: Iterable[int]) -> None:
        for place in places:
            self.done[place].wait()
            self.check()

    def check(self) -> None:
        """Raise the fault of whichever lane had one."""
        if self.fault is not None:
            raise self.fault

    def fail(self, fault: BaseException) -> None:
        self.fault = self.fault or fault
        for event in self.done:
            event.set()


class Lanes:
    """Plays one schedule, any number of times. device: where its computation runs."""

    def __init__(self, schedule: Schedule, device: torch.device) -> None:
        self.actions: Sequence[Action] = schedule.workers[0]
        self._cuda = device if device.type == "cuda" else None
        self._waits, self._settled = waits(schedule), settled(schedule)
        others = (action.lane for action in self.actions if action.lane is not Lane.COMPUTE)
        self._names = tuple(dict.fromkeys(others))

    def play(self, player: Player, begin: float) -> list[Event]:
        """Run every action; gives their events in order of their start.

        What an action raises is raised here, when every lane has stopped.
        """
        if not self._names:
            return [player.act(i, action, begin) for i, action in enumerate(self.actions)]
        board = _Board([threading.Event() for _ in self.actions])
        queues: dict[Lane, queue.SimpleQueue[int | None]] = {
            name: queue.SimpleQueue() for name in self._names
        }
        events: list[Event] = []  # list.append is atomic
        threads = [
            threading.Thread(
                target=self._lane,
                args=(queues[name], player, board, events, begin),
                daemon=True,
                name=f"lane {name}",
            )
            for name in self._names
        ]
        for thread in threads:
            thread.start()
        try:
            self._compute(player, board, queues, events, begin)
        except BaseException as fault:
            board.fail(fault)
            raise
        finally:
            for each in queues.values():
                each.put(None)
            for name, thread in zip(self._names, threads, strict=True):
                # After a fault nothing may ever come from the workers that a lane waits for: the
                # fault must be said all the same, and ends this worker or its wait.
                thread.join(_GRACE if board.fault is not None and name in _TALKS else None)
        if board.fault is not None:
            raise board.fault
        self._settle(len(self.actions), player)
        return sorted(events, key=lambda event: event.start)

    def _compute(
        self,
        player: Player,
        board: _Board,
        queues: dict[Lane, queue.SimpleQueue[int | None]],
        events: list[Event],
        begin: float,
    ) -> None:
        for index, action in enumerate(self.actions):
            if action.lane is not Lane.COMPUTE:
                player.prepare(index, action)
                queues[action.lane].put(index)
                continue
            board.check()
            board.wait(self._settled.get(index, ()))
            self._settle(index, player)
            board.wait(self._waits[index])
            events.append(player.act(index, action, begin))
            if self._cuda is not None:
                mark = board.marks[index] = torch.cuda.Event()
                mark.record(torch.cuda.current_stream(self._cuda))
            board.done[index].set()

    def _settle(self, index: int, player: Player) -> None:
        for place in self._settled.get(index, ()):
            player.settle(place, self.actions[place])

    def _lane(
        self,
        indices: queue.SimpleQueue[int | None],
        player: Player,
        board: _Board,
        events: list[Event],
        begin: float,
    ) -> None:
        stream = None if self._cuda is None else torch.cuda.Stream(self._cuda)
        try:
            with torch.no_grad(), torch.cuda.stream(stream):  # no stream: nothing is done
                while (index := indices.get()) is not None:
                    board.wait(self._waits[index])
                    if board.fault is not None:
                        return
                    self._behind(stream, index, board)
                    events.append(player.move(index, self.actions[index], begin))
                    board.done[index].set()
        except BaseException as fault:  # it is raised where the step was asked for
            board.fail(fault)

    def _behind(self, stream: torch.cuda.Stream | None, index: int, board: _Board) -> None:
        """The device may still be at work on what the host has passed."""
        if stream is None:
            return
        for place in self._waits[index]:
            if place in board.marks:
                stream.wait_event(board.marks[place])
