"""Workers that something else has started, on one machine or many: torchrun, or whoever sets RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

There is no parent that sees all of them, so each watches the others: a thread tells the store twice
a second how its worker is, and reads how the others are. A worker whose word comes no more is dead,
or its machine is. Whoever sees that something is wrong ends itself; one on each machine says why.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, NoReturn, TextIO

from outsize import typed
from outsize.collectives.joined import meeting, number
from outsize.errors import OutsizeError
from outsize.launch.activity import GONE, Activity, activity
from outsize.launch.board import Board, Place, memory, read
from outsize.launch.capture import Capture, held, tail
from outsize.launch.failure import CRASH, Failure, failure_of
from outsize.launch.heartbeat import Mailbox
from outsize.launch.local import FIRST, Speaker
from outsize.launch.watchdog import GAP, SILENCE, Sample, Verdict, Watchdog, seen, waiting

if TYPE_CHECKING:
    from outsize.torch_private import Store

CONNECT = 60.0  # seconds until all must have come
BEAT = 0.5  # seconds between words
LEAVE = 60.0  # seconds for the others to end after this one
LINGER = 20 * BEAT  # seconds for the others to see that a run is over

Work = Callable[[Mailbox], int]


def started(environment: Mapping[str, str]) -> bool:
    """Whether this process is one of several that were started together."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def run_there(work: Work, environment: Mapping[str, str], speaker: Speaker = FIRST) -> NoReturn:
    """Run work(post) as the worker that the environment says, and end this process with the exit
    code that it gives, without Python's own way out: threads that come back from PyTorch's C++ then
    (the one that watches does) are ended inside of it, which aborts the process.

    Whoever fails first reports it on its standard error, and all end. OutsizeError for an address
    that cannot be reached or served, and for workers that do not come within a minute, or twice.
    """
    rank, count = number(environment, "RANK"), number(environment, "WORLD_SIZE")
    if rank >= count:
        raise OutsizeError(f"RANK is {rank}; expected less than WORLD_SIZE, which is {count}")
    store = meeting(environment, CONNECT)
    _all_here(store, rank, count, environment)
    capture = Capture(rank, None if rank == speaker.rank else held(rank))
    error = os.fdopen(os.dup(2), "w", buffering=1)  # where the run was started
    capture.begin()
    board = Board(memory(1), 0)
    here, near = (
        number(environment, "LOCAL_RANK", rank),
        number(environment, "LOCAL_WORLD_SIZE", count),
    )
    machine = number(environment, "GROUP_RANK", 0)
    post = Mailbox(rank, count, here, near, machine, store, board, capture.settle)
    watch = _Watch(post, store.clone(), board, capture, error, speaker)  # type: ignore[attr-defined]
    watch.start()
    try:
        code = work(post)
    except BaseException as fault:
        followed = read(board.memory, 0).waits is not None
        watch.fail(failure_of(fault, followed))
    watch.leave()
    _end(code)


def _all_here(store: Store, rank: int, count: int, environment: Mapping[str, str]) -> None:
    where = f"{environment.get('MASTER_ADDR', '')}:{environment.get('MASTER_PORT', '')}"
    if store.add(f"here/{rank}", 1) > 1:
        raise OutsizeError(
            f"rank {rank} has come to {where} twice; expected each rank once: see that no workers"
            " of another run use this address, and that ranks differ"
        )
    until = time.monotonic() + CONNECT
    while missing := [r for r in range(count) if not store.check([f"here/{r}"])]:
        if time.monotonic() > until:
            some = ", ".join(map(str, missing[:8]))
            raise OutsizeError(
                f"rank {rank}: of {count} workers, rank {some} did not come to {where} within"
                f" {CONNECT:g} s; see that they run and can reach that address"
            )
        time.sleep(0.05)


@dataclass
class _Watch:
    """The thread of one worker that tells how it is and sees how the others are.

    store: a connection of its own, since the worker may be waiting on the other.
    """

    post: Mailbox
    store: Store
    board: Board
    capture: Capture
    error: TextIO
    speaker: Speaker = FIRST
    watchdog: Watchdog = field(default_factory=Watchdog)
    _heard: dict[int, tuple[Message, float]] = field(default_factory=dict)
    _looked: float = 0.0
    _leaving: bool = False
    _failing: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        self._tell(0)
        threading.Thread(target=self._run, daemon=True, name="watch").start()

    def _run(self) -> None:
        beat = 0
        while True:
            time.sleep(BEAT)
            beat += 1
            try:
                self._tell(beat)
                verdict = self._look()
                self._heed()
            except RuntimeError:
                if not self._leaving:
                    self._lost()
                return
            if verdict is not None:
                self._judged(self._first(verdict))

    def _heed(self) -> None:
        """End where somebody else has failed, who says so himself, or has come to a verdict."""
        if self.store.check(["failed"]) and not self._failing.is_set():
            self._part()
            self._linger()
        if self.store.check(["verdict"]):
            self._judged(self._first(Verdict((), "")))

    def _first(self, verdict: Verdict) -> Verdict:
        """The verdict that somebody came to first: ends that follow from it are not faults."""
        mine = json.dumps([verdict.culprits, verdict.what])
        culprits, what = json.loads(self.store.compare_set("verdict", "", mine))
        return Verdict(tuple(culprits), what)

    def _tell(self, beat: int) -> None:
        said = word(beat, self.post.machine, self._leaving, read(self.board.memory, 0))
        self.store.set(f"word/{self.post.rank}", said.to_json())

    # -- seeing ----------------------------------------------------------------------------------

    def _look(self) -> Verdict | None:
        """All workers as their words say; None as well while some have said nothing yet."""
        keys = [f"word/{rank}" for rank in range(self.post.count)]
        if len(self._heard) < len(keys) and not all(self.store.check([key]) for key in keys):
            return None
        now = time.monotonic()
        if now - self._looked > GAP:  # this worker was held up itself, not all of the others
            self._heard = {rank: (said, now) for rank, (said, _) in self._heard.items()}
        self._looked = now
        for rank, text in enumerate(self.store.multi_get(keys)):
            said = Message.from_json(bytes(text).decode())
            if rank not in self._heard or said.beat != self._heard[rank][0].beat:
                self._heard[rank] = (said, now)
        words = [self._heard[rank][0] for rank in range(self.post.count)]
        if any(said.leaving for said in words):
            return None
        found = self._dead(words) or self.watchdog.look(now, self._samples(now))
        # Who is gone by now may have left together with this one, without another word: this is
        # looked at last, because nobody goes before all have said that they leave.
        return None if self._leaving else found

    def _samples(self, now: float) -> list[Sample]:
        """As they say; what is on this machine as it is seen from here, where that is more."""
        found = []
        for _, (said, at) in sorted(self._heard.items()):
            sample = said.sample(now - at)
            if said.machine == self.post.machine:
                sample = replace(sample, activity=activity(said.pid), heard=0.0)
            found.append(sample)
        return found

    def _dead(self, words: list[Message]) -> Verdict | None:
        """of this machine one sees at once who has ended."""
        for rank, said in enumerate(words):
            if said.machine == self.post.machine and activity(said.pid).state == GONE:
                samples = self._samples(time.monotonic())
                what = f"rank {rank} has died (last heard of in {samples[rank].place})"
                return Verdict((rank,), what + waiting(samples, (rank,)))
        return None

    # -- ending ----------------------------------------------------------------------------------

    def fail(self, failure: Failure) -> NoReturn:
        """This worker has failed: say it, unless another has said it already."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun is as quick
        if failure.followed:  # it is another's fault, whose word or silence is seen by the thread
            time.sleep(SILENCE + 2 * BEAT)
        self._failing.set()
        with suppress(RuntimeError):
            if self.store.add("failures", 1) == 1:
                self.store.set("failed", str(self.post.rank))
                self._report(failure)
        self._linger(failure.code)

    def _report(self, failure: Failure) -> None:
        rank, place = self.post.rank, read(self.board.memory, 0)
        if failure.kind == "error":
            who = "" if rank == self.speaker.rank else f"rank {rank}: "
            self._say(f"error: {who}{failure.text}")
            return
        self._say(failure.text)
        self._say(f"error: rank {rank} on {socket.gethostname()} failed (in {place})")
        if text := tail(rank, self.capture.held, self.capture.path):
            self._say(text)

    def _judged(self, verdict: Verdict) -> NoReturn:
        """The run is over. What cannot end itself is ended by its neighbours."""
        words = [said for _, (said, _) in sorted(self._heard.items())]
        near = [r for r, said in enumerate(words) if said.machine == self.post.machine]
        if self.post.rank == min((r for r in near if r not in verdict.culprits), default=-1):
            hosts = "".join(f"; rank {r} runs on {words[r].host}" for r in verdict.culprits)
            self._say(f"error: {verdict.what}{hosts}; the run was ended")
            for rank in set(near) & set(verdict.culprits):
                with suppress(OSError):
                    os.kill(words[rank].pid, signal.SIGKILL)
        if self.post.rank not in verdict.culprits:
            self._part()
        self._linger(but=verdict.culprits)

    def _part(self) -> None:
        """The worker that speaks to others sees that those it works with end, and has its time to
        say so."""
        if self.post.rank == self.speaker.rank:
            time.sleep(self.speaker.farewell)

    def _linger(self, code: int = CRASH, but: Sequence[int] = ()) -> NoReturn:
        """The first worker may serve the store, where the others read why the run ends: it waits
        until they have, as far as they can. but: ranks that cannot."""
        keys = [f"ends/{rank}" for rank in range(self.post.count) if rank not in but]
        with suppress(RuntimeError):
            self.store.set(f"ends/{self.post.rank}", "seen")
            until = time.monotonic() + LINGER
            while self.post.rank == 0 and not self.store.check(keys) and time.monotonic() < until:
                time.sleep(BEAT / 10)
        _end(code)

    def _lost(self) -> NoReturn:
        if self.post.here == 0:
            place = read(self.board.memory, 0)
            self._say(
                f"error: rank {self.post.rank} on {socket.gethostname()} (in {place}) has lost the"
                f" meeting point of the run, which rank 0 or torchrun serves; see what they say"
            )
        _end(CRASH)

    def leave(self) -> None:
        """This worker is through. It waits for the others, since it may serve the store."""
        self._leaving = True
        with suppress(RuntimeError):
            self.post.store.add("left", 1)
            until = time.monotonic() + LEAVE
            while self.post.store.add("left", 0) < self.post.count and time.monotonic() < until:
                time.sleep(BEAT / 10)

    def _say(self, text: str) -> None:
        print(text, file=self.error, flush=True)


def _end(code: int) -> NoReturn:
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


@dataclass(frozen=True)
class Message:
    """beat: counts up. machine: a number; pid: on it. leaving: its part of the run is done. place:
    with how long ago each change was."""

    beat: int
    host: str
    machine: int
    pid: int
    leaving: bool
    place: Place
    activity: Activity

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Message:
        said: Message = typed.read(Message, json.loads(text), "word")
        return said

    def sample(self, heard: float) -> Sample:
        """heard: seconds ago."""
        return seen(self.activity, self.place.counted_from(time.monotonic() - heard), heard)


def word(beat: int, machine: int, leaving: bool, place: Place) -> Message:
    """Of this process, which is at `place`."""
    host, pid, since = socket.gethostname(), os.getpid(), place.counted_from(time.monotonic())
    return Message(beat, host, machine, pid, leaving, since, activity(pid))
