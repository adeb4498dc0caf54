"""Runs a command in which `outsize` and `python` are forked from a process that has PyTorch.

    python tools/warm.py DIR [--import MODULE,...] -- COMMAND...

Documents have scores of commands, each of which would import PyTorch and what else it needs of
others for two seconds. Of Outsize a fork has what forks that ended before it imported, in their
order: each module is first imported by a command that needs it. DIR gets programs `outsize` and
`python`, first on COMMAND's PATH. What calls one is answered by a fork with its arguments,
directory, environment, standard input and outputs, which gets its signals and whose exit code it
has. Nothing else may differ: variables that PyTorch reads while it is imported are those that this
process was started with, and modules are not taken apart at the end: a fork would copy all of them
for it, a third of a second. `python` without a script first becomes an interpreter of its own.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

MOST = 1 << 20  # bytes: of arguments and environment
MODULES = "torch,torch.distributed.tensor,sympy,tensorboardX,jinja2,rich.progress,psutil,yaml"
PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
CALLER = """#!{python} -SE
import json, os, signal, socket, sys
there = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, {most})
there.connect({path!r})
ignored = [number for number in {passed} if signal.getsignal(number) == signal.SIG_IGN]
for number in set({passed}).difference(ignored):
    signal.signal(number, lambda number, frame: there.send(bytes([number])))
said = json.dumps([sys.argv, os.getcwd(), dict(os.environ), ignored]).encode()
socket.send_fds(there, [said], [0, 1, 2])
code = there.recv(1)
os._exit(code[0] if code else 70)
"""


class Forks:
    """What is forked for callers, and how each ends."""

    def __init__(
        self, listener: socket.socket, command: subprocess.Popen[bytes], learnt: Path
    ) -> None:
        self.listener, self.command, self.learnt = listener, command, learnt
        self.running: set[int] = set()
        self.watch = selectors.DefaultSelector()
        self.watch.register(listener, selectors.EVENT_READ)
        self.watch.register(os.pidfd_open(command.pid), selectors.EVENT_READ, 0)
        told, origin = os.eventfd(0), os.getpid()
        self.watch.register(told, selectors.EVENT_READ, "ended")

        def ended(*_: object) -> None:
            if os.getpid() != origin:  # a fork that has not yet become what it was called for
                os._exit(143)
            os.eventfd_write(told, 1)

        signal.signal(signal.SIGTERM, ended)

    def serve(self) -> list[str] | None:
        """Answer until the command ends: None. In a fork: its program and arguments."""
        while True:
            for key, _ in self.watch.select():
                if key.fileobj is self.listener:
                    caller, _ = self.listener.accept()
                    if (arguments := self._begin(caller)) is not None:
                        return arguments
                elif key.data in (0, "ended"):
                    for pid in self.running:
                        _kill(pid)
                    if key.data:
                        sys.exit(143)
                    return None
                elif isinstance(key.fileobj, socket.socket):
                    self._pass_on(key.fileobj, key.data)
                else:
                    self._end(key.fd, *key.data)

    def _begin(self, caller: socket.socket) -> list[str] | None:
        said, streams, _, _ = socket.recv_fds(caller, MOST, 3)
        if not said:  # gone already
            caller.close()
            return None
        _import(self.learnt)
        pid = os.fork()
        if pid == 0:
            return _become(json.loads(said), streams)
        self.running.add(pid)
        for stream in streams:
            os.close(stream)
        self.watch.register(caller, selectors.EVENT_READ, pid)
        self.watch.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, caller))
        return None

    def _pass_on(self, caller: socket.socket, pid: int) -> None:
        """A signal to the caller; where it is gone, it was killed, and so is what it called."""
        number = caller.recv(1)
        if number:
            os.kill(pid, number[0])
        else:
            self.watch.unregister(caller)
            _kill(pid)

    def _end(self, descriptor: int, pid: int, caller: socket.socket) -> None:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self.running.discard(pid)
        self.watch.unregister(descriptor)
        os.close(descriptor)
        if caller in self.watch.get_map():
            self.watch.unregister(caller)
            caller.send(bytes([status if status >= 0 else 128 - status]))
        caller.close()


def _import(learnt: Path) -> None:
    """What forks that have ended imported of Outsize."""
    for name in learnt.read_text().split() if learnt.exists() else ():
        importlib.import_module(name)
    gc.freeze()


def _learn(learnt: Path, before: Sequence[str]) -> None:
    """Add what this fork has imported of Outsize; in one write, as others may end meanwhile."""
    new = [name for name in sys.modules if name not in before and name.split(".")[0] == "outsize"]
    with learnt.open("a") as file:
        file.write("".join(f"{name}\n" for name in new))


def _kill(pid: int) -> None:
    """A fork and what it has started; it may have no group of its own yet."""
    for end in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            end(pid, signal.SIGKILL)


def _become(
    said: tuple[list[str], str, dict[str, str], list[int]], streams: Sequence[int]
) -> list[str]:
    """Take the caller's place in a fork; gives its program and arguments."""
    arguments, directory, environment, ignored = said
    for number in PASSED:
        plain = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in ignored else plain)
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
    os.closerange(3, max(streams) + 64)
    os.setsid()  # ended as a whole where its caller is
    os.chdir(directory)
    os.environ.clear()
    os.environ |= environment
    return arguments


def _as_python(words: list[str]) -> None:
    """What the interpreter does with such arguments."""
    if not words or words[0].startswith("-"):
        os.execv(sys.executable, [sys.executable, *words])
    sys.argv = words
    sys.path[0] = str(Path(words[0]).resolve().parent)
    runpy.run_path(words[0], run_name="__main__")


def _run(arguments: list[str]) -> None:
    """What a fork was called for."""
    program, *words = arguments
    if Path(program).name == "python":
        _as_python(words)
        return
    sys.argv = ["outsize", *words]
    sys.path[0] = str(Path(sys.executable).parent)  # as a program that pip installed has it
    from outsize.cli.main import main as outsize

    outsize()


def _leave(codes: list[int]) -> None:
    """End at once where the exit code is known: last of all that is done at exit."""
    if codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(codes[0])


def _asked() -> tuple[Path, list[str], list[str]]:
    parser = argparse.ArgumentParser(description="Run a command with a warm `outsize`.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--import", dest="modules", default=MODULES)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    return options.directory.resolve(), options.modules.split(","), options.command


def main() -> int:
    codes: list[int] = []  # of a fork that has ended
    atexit.register(_leave, codes)  # first, so that it is called last
    directory, modules, command = _asked()
    directory.mkdir(parents=True, exist_ok=True)
    place = str(directory / "calls")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(place)
    listener.listen(64)
    told = {"python": sys.executable, "most": MOST, "path": place}
    for name in ("outsize", "python"):
        caller = directory / name
        caller.write_text(CALLER.format(**told, passed=tuple(map(int, PASSED))))
        caller.chmod(0o755)
    for name in modules:
        importlib.import_module(name)
    path = f"{directory}:{os.environ['PATH']}"
    started = subprocess.Popen(command, env={**os.environ, "PATH": path})
    learnt = directory / "learnt"
    arguments = Forks(listener, started, learnt).serve()
    if arguments is None:
        return started.wait()
    atexit.register(_learn, learnt, tuple(sys.modules))
    try:
        _run(arguments)
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        codes.append(int(end.code or 0))
    else:
        codes.append(0)
    return codes[0]


if __name__ == "__main__":
    sys.exit(main())
