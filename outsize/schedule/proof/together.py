"""All workers played together: whether every action's turn comes, whatever the lanes' speeds.

A worker is some threads: the calling one, which computes and hands actions to the other lanes, and
a queue a lane (outsize/runtime/lanes.py). Each of these plays its actions in order and waits for
    - the actions of the same worker that `waits` names, and before one that computes those whose
      bytes must have gone (`settled`);
    - a tensor to receive; a free buffer before it sends, in the calling thread;
    - every member of a group, in a collective. Groups count their collectives: a worker's k-th one
      meets the others' k-th ones, which must be the same.
A wait that is over stays over, and what is done next is never a choice. So all orders in which
threads can run reach the same end (as in Kahn's networks of processes): one play that ends shows
that all do, and one that stops is a deadlock of all.

Copies: workers that have the same list, and speak in the same way with workers that are copies of
each other, are played as one. What the one does, all of them can do in one move of each, since all
members of a group that are its copies come to the same collective together; so the play of the few
ends exactly where that of all does.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from outsize.errors import OutsizeError
from outsize.schedule.action import Action, Kind, Lane
from outsize.schedule.program import Program, Says, Talk
from outsize.schedule.schedule import Schedule
from outsize.schedule.waits import Waits, settled, waits

_Group = tuple[tuple[int, ...], str]
_Pair = tuple[int, int]
_Key = tuple[Any, ...]  # what a thread waits for
_PASSES = (Kind.SEND, Kind.RECV)


@dataclass
class Worker:
    """A worker's actions, and how far it is. blocking: it sends and receives in the calling thread,
    as workers of a coarse list do."""

    rank: int
    actions: Sequence[Action]
    waits: Waits
    settled: dict[int, tuple[int, ...]]
    says: Says
    blocking: bool
    done: bytearray = field(init=False)

    def __post_init__(self) -> None:
        self.done = bytearray(len(self.actions))

    def calls(self, place: int) -> bool:
        """Whether the calling thread runs an action itself."""
        action = self.actions[place]
        if self.blocking:
            return action.kind is not Kind.EXCHANGE
        return action.lane is Lane.COMPUTE


@dataclass
class _Thread:
    """lane: None is the calling thread. at: its next action; talk: the next of what that says."""

    worker: Worker
    lane: Lane | None
    places: Sequence[int]
    at: int = 0
    talk: int = 0

    @property
    def place(self) -> int:
        return self.places[self.at]


class Together:
    """One play of some workers. buffers: of each link."""

    def __init__(self, workers: Sequence[Worker], alike: Sequence[int], buffers: int) -> None:
        self._alike, self._buffers = alike, buffers
        self._threads = [thread for worker in workers for thread in _threads(worker)]
        self._asleep: dict[_Key, list[_Thread]] = defaultdict(list)
        self._why: dict[int, _Key] = {}  # by thread, what it waits for
        self._links: dict[_Pair, deque[Action]] = defaultdict(deque)
        self._sent: dict[_Pair, int] = defaultdict(int)
        self._number: dict[tuple[int, int], tuple[_Pair, int]] = {}  # of a message, by its SEND
        self._met: dict[_Group, list[tuple[Talk, Action, set[int]]]] = defaultdict(list)
        self._speakers: dict[tuple[Hashable, ...], Lane | None] = {}
        self._count: dict[tuple[_Group, int], int] = defaultdict(int)  # by group and worker
        self._handed: dict[tuple[int, Lane], int] = defaultdict(int)  # places below have their turn
        self._ready: deque[_Thread] = deque(self._threads)

    def run(self) -> None:
        """Refuse what does not end."""
        while self._ready:
            self._go_on(self._ready.popleft())
        stopped = [t for t in self._threads if t.at < len(t.places)]
        if stopped:
            thread = min(stopped, key=lambda t: _RANK[self._why[id(t)][0]])
            raise _fault(thread, self._stuck(thread))
        for (_, target), link in self._links.items():
            for action in link:
                raise OutsizeError(
                    f"schedule: at its end: worker {target} does not receive {action.state.value}"
                    f" {action.stage} {action.microbatch}, which was sent"
                )

    def _go_on(self, thread: _Thread) -> None:
        """Play a thread's actions until it waits."""
        while thread.at < len(thread.places):
            key = self._next(thread)
            if key is not None:
                self._asleep[key].append(thread)
                self._why[id(thread)] = key
                return
            thread.at, thread.talk = thread.at + 1, 0

    def _wake(self, key: _Key) -> None:
        self._ready.extend(self._asleep.pop(key, ()))

    def _next(self, thread: _Thread) -> _Key | None:
        """Play a thread's next action; gives what it waits for, if anything."""
        worker, place = thread.worker, thread.place
        if thread.lane is None and not worker.calls(place):
            return self._hand(worker, place)
        if thread.lane is not None and self._handed[worker.rank, thread.lane] <= place:
            return ("turn", worker.rank, thread.lane)
        before = worker.waits[place]
        if thread.lane is None and place in worker.settled:
            before = (*worker.settled[place], *before)
        for other in before:
            if not worker.done[other]:
                return ("done", worker.rank, other)
        key = self._speak(thread, worker.actions[place])
        if key is None:
            worker.done[place] = 1
            self._wake(("done", worker.rank, place))
        return key

    def _hand(self, worker: Worker, place: int) -> _Key | None:
        """Give an action to its lane. What is sent leaves the calling thread here."""
        action = worker.actions[place]
        if action.kind is Kind.SEND and not worker.blocking:
            key = self._send(worker, place)
            if key is not None:
                return key
        lane = Lane.EXCHANGE if worker.blocking else action.lane
        self._handed[worker.rank, lane] = place + 1
        self._wake(("turn", worker.rank, lane))
        return None

    def _speak(self, thread: _Thread, action: Action) -> _Key | None:
        worker, place = thread.worker, thread.place
        if action.kind is Kind.SEND:
            if worker.blocking:
                return self._send(worker, place)
            pair, number = self._number[worker.rank, place]
            left = number - (self._sent[pair] - len(self._links[pair]))
            return ("gone", pair, number) if left >= 0 else None
        if action.kind is Kind.RECV:
            return self._receive(thread, action)
        says = worker.says[place]
        while thread.talk < len(says):
            key = self._meet(thread, action, says[thread.talk])
            if key is not None:
                return key
            thread.talk += 1
        return None

    # -- tensors between stages -----------------------------------------------------------------

    def _pair(self, worker: Worker, place: int) -> _Pair:
        source, target = worker.says[place][0].ranks
        return self._alike[source], self._alike[target]

    def _send(self, worker: Worker, place: int) -> _Key | None:
        pair = self._pair(worker, place)
        link = self._links[pair]
        if len(link) >= self._buffers:
            return ("slot", pair)
        self._number[worker.rank, place] = pair, self._sent[pair]
        link.append(worker.actions[place])
        self._sent[pair] += 1
        self._wake(("message", pair))
        return None

    def _receive(self, thread: _Thread, action: Action) -> _Key | None:
        pair = self._pair(thread.worker, thread.place)
        link = self._links[pair]
        if not link:
            return ("message", pair)
        sent = link.popleft()
        if _tensor(sent) != _tensor(action):
            what = f"{sent.state.value} {sent.stage} {sent.microbatch}"
            raise _fault(thread, f"worker {pair[0]} sent {what} before it")
        self._wake(("slot", pair))
        self._wake(("gone", pair, self._sent[pair] - len(link) - 1))
        return None

    # -- collectives ----------------------------------------------------------------------------

    def _meet(self, thread: _Thread, action: Action, talk: Talk) -> _Key | None:
        """Come to a collective; gives it while others of its group have not."""
        mine = (thread.worker.rank, talk.ranks, talk.channel)
        if self._speakers.setdefault(mine, thread.lane) is not thread.lane:
            raise _fault(thread, "another lane speaks to the same workers: either may be first")
        members = tuple(sorted({self._alike[rank] for rank in talk.ranks}))
        if len(members) == 1:
            return None
        group, rank = (members, talk.channel), thread.worker.rank
        turn, met = self._count[group, rank], self._met[group]
        if turn == len(met):
            met.append((talk, action, set()))
        first, theirs, here = met[turn]
        if rank not in here:
            same = (first.operation, first.bytes) == (talk.operation, talk.bytes)
            if not same or _named(theirs) != _named(action):
                raise _fault(thread, _another(min(here), first, theirs, action, talk))
            here.add(rank)
            if len(here) == len(members):
                self._wake(("group", group, turn))
        if len(here) < len(members):
            return ("group", group, turn)
        self._count[group, rank] += 1
        return None

    def _stuck(self, thread: _Thread) -> str:
        """Why a thread's turn never comes."""
        action, key = thread.worker.actions[thread.place], self._why[id(thread)]
        if key[0] == "group":
            _, group, turn = key
            here = self._met[group][turn][2]
            late = next(rank for rank in group[0] if rank not in here)
            return f"waits for worker {late}'s {_who(action)}, which does not come: deadlock"
        passes = action.kind in _PASSES
        source, target = self._pair(thread.worker, thread.place) if passes else (0, 0)
        if key[0] == "message":
            return f"waits for worker {source}, which does not send it: deadlock"
        if key[0] == "slot":
            what = f"what fills the {self._buffers} buffers"
            return f"worker {target} does not receive {what}: deadlock"
        if key[0] == "gone":
            return f"worker {target} does not receive it: deadlock"
        return "waits for what is never done: deadlock"


_RANK = {"group": 0, "slot": 1, "message": 2, "gone": 3, "done": 4, "turn": 5}


def _threads(worker: Worker) -> Iterable[_Thread]:
    yield _Thread(worker, None, range(len(worker.actions)))
    lanes: dict[Lane, list[int]] = defaultdict(list)
    for place, action in enumerate(worker.actions):
        if not worker.calls(place):
            lanes[Lane.EXCHANGE if worker.blocking else action.lane].append(place)
    yield from (_Thread(worker, lane, places) for lane, places in lanes.items())


def _tensor(action: Action) -> tuple[Hashable, ...]:
    return (action.state, action.stage, action.microbatch, action.part)


def _named(action: Action) -> tuple[Hashable, ...]:
    return (action.kind, action.state, action.stage, action.microbatch, action.part)


def _who(action: Action) -> str:
    return " ".join(str(action).split()[:3]).replace(" *", "")


def _another(rank: int, first: Talk, theirs: Action, action: Action, mine: Talk) -> str:
    if _named(theirs) != _named(action):
        what = f"comes with {_who(theirs)} in its place"
        return f"worker {rank} {what}; expected one order on all workers"
    said = [f"{talk.operation} of {talk.bytes} bytes" for talk in (first, mine)]
    return f"worker {rank} comes to it with {said[0]}, this one with {said[1]}"


def _fault(thread: _Thread, reason: str) -> OutsizeError:
    action = thread.worker.actions[thread.place]
    where = f"worker {thread.worker.rank}, action {thread.place} ({action})"
    return OutsizeError(f"schedule: {where}: {reason}")


def together(program: Program, buffers: int, blocking: Sequence[Schedule | None]) -> None:
    """Play a program's workers. blocking: by list, the same with lanes as `waits` is to see them
    where the worker sends and receives in its calling thread."""
    known: dict[int, tuple[Waits, dict[int, tuple[int, ...]]]] = {}
    workers = []
    for rank, index in enumerate(program.which):
        if program.alike[rank] != rank:
            continue
        schedule = program.lists[index]
        if index not in known:
            seen = blocking[index] or schedule
            known[index] = waits(seen), settled(seen)
        says = program.voices[rank].says(schedule)
        workers.append(
            Worker(rank, schedule.workers[0], *known[index], says, blocking[index] is not None)
        )
    Together(workers, program.alike, buffers).run()
