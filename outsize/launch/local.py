"""Workers of this machine: forked from a process that has imported everything once, and watched.

One interpreter pays for the imports and the workers share its memory, which takes about 10 ms a
worker; it must not have computed anything, since threads do not survive a fork. The parent does
nothing but watch: the pipes and ends of its workers at once, what they do four times a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from mmap import mmap
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from outsize.launch import fingerprint
from outsize.launch.activity import activity
from outsize.launch.board import Board, memory, read
from outsize.launch.capture import Capture, held, tail
from outsize.launch.failure import CRASH, Failure, failure_by_status, failure_of
from outsize.launch.heartbeat import Mailbox
from outsize.launch.watchdog import Sample, Verdict, Watchdog, seen, waiting

if TYPE_CHECKING:
    from outsize.torch_private import Store

Work = Callable[[Mailbox], int]
HOST = "127.0.0.1"
LOOK = 0.25  # seconds between looks at what workers do
SETTLE = 0.3  # seconds in which several ends count as one event: the fault may be the second
FOLLOWED = 10.0  # seconds for it to show where all that have failed did so because of another
SHARED = Path("/dev/shm")
KILL_PATIENCE = 5.0  # seconds until a killed process must be gone
CONNECT = 60.0  # seconds
_PR_SET_PDEATHSIG = 1
_DONE = "done"


@dataclass(frozen=True)
class Speaker:
    """The worker that prints where the run was started, by its rank. farewell: seconds that it may
    go on where another has failed, to say so to those that wait for it elsewhere."""

    rank: int = 0
    farewell: float = 0.0


FIRST = Speaker()


def run_here(count: int, work: Work, speaker: Speaker = FIRST) -> int:
    """Run work(post) in `count` processes; gives the exit code of the run.

    0, or what the workers agreed on giving; of a failure the failing worker's: 2 for an
    OutsizeError, 1 for any other exception, 128 + the signal for a worker that was killed, 1 for
    one that was stopped or hung. The report is on standard error then, and no process is left.
    SIGINT and SIGTERM are passed on to the workers.
    """
    listener = socket.create_server((HOST, 0), backlog=count)
    team = _Team(count, memory(count), speaker)
    fingerprint.code()  # which each of them would find out
    for rank in range(count):
        team.fork(rank, work, listener)
    with team.signals():
        store = serve(listener)
        try:
            return team.watch()
        finally:
            team.end()
            del store


@dataclass
class _Worker:
    """What the parent knows of one. pipe: what it says; held: what it prints before the run has a
    directory; log: the file afterwards."""

    pid: int
    pipe: int
    held: int | None
    text: bytes = b""
    log: Path | None = None
    done: int | None = None  # the exit code that it said it would leave with
    failure: Failure | None = None
    ended: bool = False
    mute: bool = False  # it has closed its end of the pipe

    def listen(self) -> None:
        """Take what has come through the pipe."""
        with contextlib.suppress(BlockingIOError):
            while not self.mute:
                data = os.read(self.pipe, 1 << 16)
                self.text, self.mute = self.text + data, not data
        *lines, self.text = self.text.split(b"\n")
        for line in lines:
            word, _, rest = line.decode(errors="replace").partition(" ")
            if word == "log":
                self.log = Path(rest)
            elif word == _DONE:
                self.done = int(rest)
            else:
                self.failure = Failure.from_json(rest)

    def reap(self) -> bool:
        """Whether it has ended, by now at the latest."""
        if not self.ended:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.ended = True
                self.listen()
                if self.failure is None and self.done is None:
                    self.failure = failure_by_status(status)
        return self.ended


@dataclass
class _Team:
    count: int
    board: mmap
    speaker: Speaker
    workers: list[_Worker] = field(default_factory=list)
    asked: int | None = None  # the signal that asked the run to stop
    watchdog: Watchdog = field(default_factory=Watchdog)

    def fork(self, rank: int, work: Work, listener: socket.socket) -> None:
        """Start one worker."""
        parent = os.getpid()
        reading, writing = os.pipe()
        output = None if rank == self.speaker.rank else held(rank)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _die_with(parent)
            port = int(listener.getsockname()[1])
            listener.close()
            os.close(reading)
            for other in self.workers:
                os.close(other.pipe)
            board = Board(self.board, rank)
            _child(_Start(rank, self.count, port, board, writing, Capture(rank, output)), work)
        os.close(writing)
        os.set_blocking(reading, False)
        self.workers.append(_Worker(pid, reading, output))

    # -- signals ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """While entered, what asks this process to stop asks its workers."""
        here = threading.current_thread() is threading.main_thread()  # no other may set handlers
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP) if here else ()
        before = {number: signal.signal(number, self._pass_on) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTSTP:  # Ctrl-Z: the workers have groups of their own
            self._send(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            self._send(signal.SIGCONT)
            return
        self.asked = self.asked or number
        self._send(number)

    def _send(self, number: int) -> None:
        for worker in self.workers:
            if not worker.ended:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, number)

    # -- watching --------------------------------------------------------------------------------

    def watch(self) -> int:
        """Until all are done or one is not well; gives the exit code."""
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
            for worker in self.workers:
                ended = os.pidfd_open(worker.pid)
                stack.callback(os.close, ended)
                selector.register(ended, selectors.EVENT_READ, worker)
                selector.register(worker.pipe, selectors.EVENT_READ, worker)
            look = 0.0
            while selector.get_map():
                for key, _ in selector.select(LOOK):
                    self._hear(selector, key)
                if self._over():
                    return self._failed()
                if time.monotonic() >= look:
                    look = time.monotonic() + LOOK
                    verdict = self.watchdog.look(time.monotonic(), self._samples())
                    if verdict is not None:
                        return self._judged(verdict)
        return max((worker.done or 0 for worker in self.workers), default=0)

    def _hear(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        worker: _Worker = key.data
        if key.fd == worker.pipe:
            worker.listen()
            if worker.mute:
                selector.unregister(worker.pipe)
        elif worker.reap():
            selector.unregister(key.fileobj)

    def _samples(self) -> list[Sample]:
        every = enumerate(self.workers)
        return [seen(activity(worker.pid), read(self.board, rank)) for rank, worker in every]

    def _over(self) -> bool:
        """Whether somebody has failed, and not because of another who has not said so yet."""
        failed = [w.failure for w in self.workers if w.failure is not None]
        if len(failed) == self.count or not all(failure.followed for failure in failed):
            return True
        return bool(failed) and time.monotonic() > failed[0].when + FOLLOWED

    def _failed(self) -> int:
        """Somebody has failed: find out who was first, and say it."""
        until = time.monotonic() + SETTLE
        while time.monotonic() < until:
            for worker in self.workers:
                worker.listen()
                worker.reap()
            time.sleep(SETTLE / 10)
        samples = self._samples()
        failed = [(r, w.failure) for r, w in enumerate(self.workers) if w.failure is not None]
        self._part()
        self.end()
        rank, first = min(failed, key=lambda pair: _order(pair[1]))
        if self._was_asked(first):
            print("interrupted; nothing had begun that could be saved", file=sys.stderr)
            return 128 + (self.asked or signal.SIGINT)
        self._report(rank, first, samples)
        return first.code

    def _was_asked(self, failure: Failure) -> bool:
        return failure.kind == "interrupted" or (
            self.asked is not None and failure.kind == "ended" and failure.code == 128 + self.asked
        )

    def _report(self, rank: int, failure: Failure, samples: Sequence[Sample]) -> None:
        where = samples[rank].place
        if failure.kind == "error":
            who = "" if rank == self.speaker.rank else f"rank {rank}: "
            _say(f"error: {who}{failure.text}")
            return
        if failure.kind == "crash":
            _say(failure.text)
            what = f"rank {rank} failed (in {where})"
        else:
            what = f"rank {rank} (in {where}) {failure.text}"
        _say(f"error: {what}{waiting(samples, (rank,))}")
        self._show(rank)

    def _judged(self, verdict: Verdict) -> int:
        if self.speaker.rank not in verdict.culprits:
            self._part()
        self.end()
        _say(f"error: {verdict.what}; the run was ended")
        for rank in verdict.culprits:
            self._show(rank)
        return CRASH

    def _show(self, rank: int) -> None:
        """What a worker printed, where nobody has seen it."""
        worker = self.workers[rank]
        if text := tail(rank, worker.held, worker.log):
            _say(text)

    # -- the end ---------------------------------------------------------------------------------

    def _part(self) -> None:
        """End all but the worker that speaks, which sees it, and leave it its time."""
        speaker, until = self.workers[self.speaker.rank], time.monotonic() + self.speaker.farewell
        if self.speaker.farewell:
            self._kill(worker for worker in self.workers if worker is not speaker)
        while time.monotonic() < until and not speaker.reap():
            time.sleep(0.02)

    def _kill(self, some: Iterable[_Worker]) -> None:
        for worker in some:
            if not worker.ended:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.pid, signal.SIGKILL)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)

    def end(self) -> None:
        """No worker, nor what it started, is left."""
        self._kill(self.workers)
        until = time.monotonic() + KILL_PATIENCE
        while not all([w.reap() for w in self.workers]) and time.monotonic() < until:
            time.sleep(0.005)
        for worker in self.workers:  # killed between making shared memory and taking its name away
            for path in SHARED.glob(f"outsize-{worker.pid}-*"):
                path.unlink(missing_ok=True)


def _order(failure: Failure) -> tuple[bool, bool, float]:
    """First whoever was ended from without, then who failed by itself, then who failed because of
    another; by time."""
    return failure.followed, failure.kind != "ended", failure.when


def _say(text: str) -> None:
    if sys.stderr.isatty():  # a bar that was killed leaves the cursor hidden, and half a line
        sys.stderr.write("\x1b[?25h\r\x1b[K")
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


# -- in the worker -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Start:
    rank: int
    count: int
    port: int
    board: Board
    pipe: int
    capture: Capture

    def say(self, line: str) -> None:
        os.write(self.pipe, f"{line}\n".encode())

    def output(self, directory: Path) -> None:
        self.capture.settle(directory)
        if self.capture.path is not None:
            self.say(f"log {self.capture.path}")


def _die_with(parent: int) -> None:
    """The system kills this process when its parent ends, however that ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(CRASH)


def _child(start: _Start, work: Work) -> NoReturn:
    """The whole life of a worker. It leaves without the parent's handlers for the end."""
    code = CRASH
    try:
        os.setpgid(0, 0)  # the terminal's Ctrl-C goes to the parent alone
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        start.capture.begin()
        faulthandler.enable(file=2)
        code = _work(start, work)
        start.say(f"{_DONE} {code}")
    except BaseException as error:
        followed = read(start.board.memory, start.rank).waits is not None
        failure = failure_of(error, followed)
        code = failure.code
        start.say(f"failed {failure.to_json()}")
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _work(start: _Start, work: Work) -> int:
    pulse = start.board
    pulse.at("joining")
    store: Store = client(HOST, start.port)
    rank, count = start.rank, start.count
    code = work(Mailbox(rank, count, rank, count, 0, store, pulse, start.output))
    pulse.at("the end")
    return code


def serve(listener: socket.socket) -> Store:
    """Serve a store on a socket that listens already; the store owns it from now on. It starts a
    thread: workers are forked before."""
    from outsize.torch_private import TCPStore

    host, port = listener.getsockname()[:2]
    descriptor = listener.detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


def client(host: str, port: int) -> Store:
    """A worker's connection to it."""
    from outsize.torch_private import TCPStore

    return TCPStore(host, port, timeout=timedelta(seconds=CONNECT), wait_for_workers=False)
