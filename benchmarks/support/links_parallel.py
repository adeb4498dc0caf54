"""Three machines on slow links: network namespaces, each with one link to a switch, whose rate is
capped in both directions by a token bucket. Needs root, and ip and tc (Debian: iproute2)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

from support.bench_parallel import CONTESTS, OURS, Bench, Contest
from support.volume_parallel import volume
from support.worlds_parallel import Spot, World

MACHINES = 3
NAMES = ("data", "zero-1", "fully-sharded", "tensor", "tensor-sequence")
MIB = 2**20


def run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@dataclass(frozen=True)
class Links:
    """The namespaces of the machines and of the switch."""

    machines: tuple[str, ...]
    switch: str

    def spot(self) -> Spot:
        """A worker a machine; both gloos take the only link."""
        count = len(self.machines)
        return Spot(
            count,
            address(0),
            tuple(("ip", "netns", "exec", name) for name in self.machines),
            ({"GLOO_SOCKET_IFNAME": "eth0"},) * count,
        )

    def arrived(self) -> int:
        """Bytes that have come to all machines so far, headers included."""
        paths = [f"/sys/class/net/p{i}/statistics/tx_bytes" for i in range(len(self.machines))]
        return sum(map(int, run("ip", "netns", "exec", self.switch, "cat", *paths).split()))


def address(machine: int) -> str:
    return f"10.77.0.{machine + 1}"


@contextmanager
def links(rate: str) -> Iterator[Links]:
    """The machines, while this lasts."""
    if os.geteuid() or shutil.which("ip") is None or shutil.which("tc") is None:
        raise SystemExit("--links needs root, and ip and tc: apt-get install iproute2")
    own = f"outsize{os.getpid()}"
    made = Links(tuple(f"{own}-{i}" for i in range(MACHINES)), f"{own}-s")
    spaces: list[str] = []
    try:
        for name in (made.switch, *made.machines):
            run("ip", "netns", "add", name)
            spaces.append(name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", made.switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", made.switch, "link", "set", "br0", "up")
        for i, name in enumerate(made.machines):
            _join(i, name, made.switch, rate)
        yield made
    finally:
        for name in spaces:
            run("ip", "netns", "del", name)


def _join(machine: int, name: str, switch: str, rate: str) -> None:
    port = f"p{machine}"
    run("ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", port, "netns", switch)
    run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
    run("ip", "-n", name, "addr", "add", f"{address(machine)}/24", "dev", "eth0")
    run("ip", "-n", name, "link", "set", "eth0", "up")
    for space, device in ((name, "eth0"), (switch, port)):
        run("tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf", "rate", rate,
            "burst", "256kb", "latency", "100ms")  # fmt: skip


def show_links(bench: Bench, rate: str) -> None:
    """A table: each layout over three workers, by PyTorch and by Outsize."""
    print(f"three machines, links of {rate}; MiB over the links: of all three together, a step\n")
    print("| layout | peer | peer s | ours s | peer MiB | ours MiB | formula MiB |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    with links(rate) as made:
        for name in NAMES:
            each = CONTESTS[name]
            wide = MACHINES if each.data > 1 else 1
            spread = replace(each, data=wide, tensor=MACHINES // wide)
            print(_line(bench, name, spread, made), flush=True)


def _line(bench: Bench, name: str, contest: Contest, made: Links) -> str:
    task = bench.task(contest, made.machines)
    there = contest.module != "peers.zero" or bench.zero_python != sys.executable
    # DTensor does not cut the 1,024 inner features over three.
    peer = contest.module if there and contest.tensor == 1 else None
    modules = (OURS,) if peer is None else (peer, OURS)
    with bench.ready(modules, task, made.spot()) as worlds:
        bytes_of = _in_turns(worlds, bench.steps, made)
        seconds = [f"{median(w.seconds[bench.warm :]):.2f}" for w in worlds]
    each = [f"{median(found[bench.warm :]) / MIB:.0f}" for found in bytes_of]
    if peer is None:
        seconds, each = ["-", *seconds], ["-", *each]
    formula = MACHINES * sum(volume(task, bench.parameters(), bench.rows, bench.sequence)) / MIB
    title = "-" if peer is None else contest.title
    return (
        f"| {name} | {title} | {seconds[0]} | {seconds[1]} | {each[0]} | {each[1]} |"
        f" {formula:.0f} |"
    )


def _in_turns(worlds: list[World], steps: int, made: Links) -> list[list[int]]:
    """Steps of each world in turns; by world and step, bytes that came over the links."""
    found: list[list[int]] = [[] for _ in worlds]
    for number in range(steps):
        for world, counts in zip(worlds, found, strict=True):
            before = made.arrived()
            world.step(number)
            counts.append(made.arrived() - before)
    return found
