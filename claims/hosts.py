"""Hosts on one machine: network namespaces joined by links with a latency and, where it is said, a
rate each, for claims (root).

Each namespace has a TUN device; this process carries packets between them and hands each over when
its delay has passed. TCP runs over it as over any link. Names of the devices: tun0, addresses
10.77.0.1, 10.77.0.2, ... No queueing discipline of the kernel is needed (netem often is not there).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from heapq import heappop, heappush

_MTU = 9000
_SETIFF, _TUN, _PLAIN = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
_NETWORK = 0x40000000  # CLONE_NEWNET


class Hosts:
    """`count` namespaces with links of `seconds` one way. A context: namespaces end with it.

    rates: bytes a second of the link from each to each; (): as fast as they go."""

    def __init__(self, count: int, seconds: float, rates: Sequence[Sequence[float]] = ()) -> None:
        self.names = [f"outsize-{os.getpid()}-{i}" for i in range(count)]
        self._rates = rates
        self._seconds, self._end = seconds, threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._ready = threading.Event()

    def __enter__(self) -> Hosts:
        for name in self.names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        self._thread.start()
        assert self._ready.wait(20), "the links did not come up"
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False)

    def inside(self, host: int, command: list[str]) -> list[str]:
        """A command to be run in a namespace."""
        return ["ip", "netns", "exec", self.names[host], *command]

    def _carry(self) -> None:
        devices = [self._device(i, name) for i, name in enumerate(self.names)]
        self._ready.set()
        poll, waiting = select.poll(), list[tuple[float, int, int, bytes]]()
        free, count = dict[tuple[int, int], float](), 0
        for device in devices:
            poll.register(device, select.POLLIN)
        while not self._end.is_set():
            ahead = waiting[0][0] - time.monotonic() if waiting else 0.05
            for device, _ in poll.poll(max(ahead, 0.0) * 1e3):
                packet = os.read(device, _MTU + 4)
                # the last bytes of IPv4 addresses
                link = packet[15] - 1, packet[19] - 1
                if packet[0] >> 4 == 4 and packet[16:19] == bytes((10, 77, 0)):
                    through = self._taken(link, len(packet))
                    free[link] = max(free.get(link, 0.0), time.monotonic()) + through
                    count += 1
                    heappush(waiting, (free[link] + self._seconds, count, link[1], packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, to, packet = heappop(waiting)
                os.write(devices[to], packet)
        for device in devices:
            os.close(device)

    def _taken(self, link: tuple[int, int], count: int) -> float:
        """Seconds until so many bytes are on a link."""
        return count / self._rates[link[0]][link[1]] if self._rates else 0.0

    def _device(self, host: int, name: str) -> int:
        """A TUN device of a namespace, opened by this thread from within it."""
        libc = ctypes.CDLL(None, use_errno=True)
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(f"/run/netns/{name}", os.O_RDONLY)
        assert libc.setns(there, _NETWORK) == 0, os.strerror(ctypes.get_errno())
        device = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(device, _SETIFF, struct.pack("16sH22x", b"tun0", _TUN | _PLAIN))
        for words in (
            ["addr", "add", f"10.77.0.{host + 1}/24", "dev", "tun0"],
            ["link", "set", "tun0", "mtu", str(_MTU), "up"],
            ["link", "set", "lo", "up"],
        ):
            subprocess.run(["ip", "-n", name, *words], check=True)
        assert libc.setns(home, _NETWORK) == 0
        os.close(home)
        os.close(there)
        return device
