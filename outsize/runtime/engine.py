"""Engine: plays one worker's list of actions, whatever they do.

A table says which handler carries out which kind of action. When a list is loaded, the handler of
each action is asked once for the functions that carry this one out; a step calls them.

The calling thread computes. It walks the list; an action of another lane is handed to that lane's
thread when it is reached, a computing action waits for what it needs and runs. What allocates or
frees memory happens in the calling thread at fixed places of the list (`prepare`, `settle`), so the
bytes that are held do not depend on how fast a disk is.

Steps, evaluations and generations of a job are lists of one engine: ledger, trace and watch are
here, once for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch

from outsize.runtime.lanes import Board, Lanes
from outsize.runtime.points import Points
from outsize.runtime.watch import Watch
from outsize.schedule import Action, Kind, Lane, Schedule, State
from outsize.schedule.waits import settled, waits
from outsize.trace.trace import Event

Call = Callable[[], None]
Key = Kind | tuple[Kind, State]
Around = Callable[[Call, Action, Points], Call]  # what is run in place of an action's own call
Hook = Callable[[int, Points], Call | None]  # by an action's place; None: nothing
_NO_BYTES: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class Deed:
    """How one action of a list is carried out. run: on the thread of its lane. Of an action beside
    the computation, prepare: in the calling thread, at its place in the list; settle: there too,
    once it has ended and its bytes can go."""

    run: Call
    prepare: Call | None = None
    settle: Call | None = None


class Handler(Protocol):
    """Carries out the actions of some kinds."""

    @property
    def kinds(self) -> Sequence[Key]: ...

    def bind(self, action: Action, index: int, points: Points) -> Deed:
        """How an action at a place of a list is carried out."""

    def begin(self, points: Points) -> None:
        """A list begins."""

    def reset(self) -> None:
        """A list has failed: forget what it had begun."""


class Ran(NamedTuple):
    """One action as it ran: seconds since the list's begin, bytes as an Event has them."""

    action: Action
    start: float
    end: float
    live: Mapping[str, int]
    peak: int

    def event(self) -> Event:
        a = self.action
        return Event(
            0, a.lane.value, a.label, a.stage, a.microbatch, self.start, self.end, self.live,
            self.peak, a.part,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """An action of a loaded list. calls: on its lane's thread, one after the other; ahead: in the
    calling thread before that. said: what the watch is told. waits, due: the places that must have
    ended before it, and those that are settled then."""

    index: int
    action: Action
    said: str
    calls: tuple[Call, ...]
    ahead: tuple[Call, ...]
    settle: Call | None
    waits: tuple[int, ...]
    due: tuple[int, ...]

    @property
    def computes(self) -> bool:
        return self.action.lane is Lane.COMPUTE


@dataclass(frozen=True)
class Loaded:
    """A list that an engine can play. lanes: those beside the computation, each with the place of
    its last action. left: the places that are settled behind the last action of all."""

    schedule: Schedule
    points: Points
    steps: tuple[Step, ...]
    lanes: Mapping[Lane, int]
    left: tuple[int, ...]


class Engine:
    """Plays lists. handlers: each kind of action has one. before, after: what else happens around a
    computing action, and behind what the calling thread does of another. around: by kind, what a
    technique makes of what carries an action out. within: what computing actions run in."""

    def __init__(
        self,
        handlers: Sequence[Handler],
        device: torch.device,
        watch: Watch,
        before: Sequence[Hook] = (),
        after: Sequence[Hook] = (),
    ) -> None:
        self._handlers, self._watch = tuple(handlers), watch
        self._table = {key: handler for handler in handlers for key in handler.kinds}
        self._before, self._after = before, after
        self.around: dict[Kind, Around] = {}
        self.within: Callable[[], AbstractContextManager[None]] = nullcontext
        self._device = device
        self._lanes = Lanes(device)

    def close(self) -> None:
        """End the threads of its lanes."""
        self._lanes.close()

    # -- loading ----------------------------------------------------------------------------------

    def load(self, schedule: Schedule, points: Points) -> Loaded:
        """Make a list ready to be played, any number of times."""
        actions, due = schedule.workers[0], settled(schedule)
        steps = tuple(
            self._step(index, action, points, needed, due.get(index, ()))
            for index, (action, needed) in enumerate(zip(actions, waits(schedule), strict=True))
        )
        lanes: dict[Lane, int] = {
            a.lane: i for i, a in enumerate(actions) if a.lane is not Lane.COMPUTE
        }
        return Loaded(schedule, points, steps, lanes, due.get(len(actions), ()))

    def _step(
        self,
        index: int,
        action: Action,
        points: Points,
        needed: tuple[int, ...],
        due: tuple[int, ...],
    ) -> Step:
        handler = self._table.get((action.kind, action.state)) or self._table[action.kind]
        deed = handler.bind(action, index, points)
        before, after = (_calls(hooks, index, points) for hooks in (self._before, self._after))
        computes = action.lane is Lane.COMPUTE
        around = self.around.get(action.kind)
        run = deed.run if around is None else around(deed.run, action, points)
        calls = (*before, run, *after) if computes else (run,)
        ahead = () if deed.prepare is None else (deed.prepare,)
        said = f"{action.label} {action.stage} {action.microbatch}"
        return Step(
            index, action, said, calls, () if computes else (*ahead, *after), deed.settle, needed,
            due,
        )  # fmt: skip

    # -- playing ----------------------------------------------------------------------------------

    def play(self, loaded: Loaded, begin: float) -> list[Ran]:
        """Run every action; gives them in order of their start, in seconds from `begin`.

        What an action raises is raised here, when every lane has stopped and every handler has
        forgotten what it had begun.
        """
        try:
            with self._watch.on():
                self.begin(loaded)
                if not loaded.lanes:
                    return [self._compute(step, begin) for step in loaded.steps]
                return self._beside(loaded, begin)
        except BaseException:
            for handler in self._handlers:
                handler.reset()
            raise

    def begin(self, loaded: Loaded) -> None:
        """Have the handlers ready for a list: `play` does, who plays actions alone does before."""
        for handler in self._handlers:
            handler.begin(loaded.points)

    def alone(self, step: Step) -> Event:
        """One action, whatever its lane, on the calling thread."""
        if step.computes:
            return self._compute(step, 0.0).event()
        for call in step.ahead:
            call()
        ran = self._move(step, 0.0)
        if step.settle is not None:
            step.settle()
        return ran.event()

    def _beside(self, loaded: Loaded, begin: float) -> list[Ran]:
        """Play a list that has other lanes than the computing one."""
        board, ran = Board(len(loaded.steps), self._device), list[Ran]()  # list.append is atomic
        try:
            for step in loaded.steps:
                if step.computes:
                    board.wait(step.due)
                    _settle(loaded, step.due)
                    board.wait(step.waits)
                    ran.append(self._compute(step, begin))
                    board.end(step.index)
                    continue
                for call in step.ahead:
                    call()
                work = partial(self._serve, step, board, ran, begin)
                self._lanes.give(step.action.lane, work)
            self._lanes.finish(loaded.lanes, faulty=False)
            board.wait(loaded.lanes.values())  # who comes next reads what lanes have left
        except BaseException as fault:
            board.fail(fault)
            self._lanes.finish(loaded.lanes, faulty=True)
            raise
        _settle(loaded, loaded.left)
        return sorted(ran, key=_start)

    def _serve(self, step: Step, board: Board, ran: list[Ran], begin: float) -> None:
        """An action on the thread of its lane."""
        try:
            board.wait(step.waits)
            ran.append(self._move(step, begin))
            board.end(step.index)
        except BaseException as fault:  # it is raised where the step was asked for
            board.fail(fault)

    def _move(self, step: Step, begin: float) -> Ran:
        if self._watch.at is not None:
            self._watch.at(step.said)
        start = time.perf_counter()
        for call in step.calls:
            call()
        return Ran(step.action, start - begin, time.perf_counter() - begin, _NO_BYTES, 0)

    def _compute(self, step: Step, begin: float) -> Ran:
        ledger = self._watch.ledger
        if ledger is not None:
            ledger.reset_peak()
        with self.within():
            ran = self._move(step, begin)
        if ledger is None:
            return ran
        ledger.settle()
        live = {f"device/{kind}": count for kind, count in ledger.live.items() if count}
        return ran._replace(live=live, peak=ledger.peak)


def _calls(hooks: Sequence[Hook], index: int, points: Points) -> tuple[Call, ...]:
    found = (hook(index, points) for hook in hooks)
    return tuple(call for call in found if call is not None)


def _settle(loaded: Loaded, places: tuple[int, ...]) -> None:
    for place in places:
        settle = loaded.steps[place].settle
        if settle is not None:
            settle()


def _start(ran: Ran) -> float:
    return ran.start
