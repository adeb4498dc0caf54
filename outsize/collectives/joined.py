"""Joined: the world of a run of several processes, met through a store.

Groups are made when they are first asked for, each by its own members, under keys of its own. Ranks
of one host talk through shared memory, others over the network; a group that spans hosts with
several ranks each does both (collectives/hierarchical.py). What a processor sums over the network,
it sums as a table of the group's links says (collectives/tables.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from outsize import accelerator
from outsize.collectives.c10d import C10d, over_device, over_gloo
from outsize.collectives.collective import Alone, Collective
from outsize.collectives.hierarchical import Hierarchical, own
from outsize.collectives.mesh import Mesh
from outsize.collectives.shared import MOST, Shared, over_memory, usable
from outsize.collectives.tables import Chosen, table_of
from outsize.collectives.watch import Process, this_process
from outsize.collectives.world import Key, Use
from outsize.errors import OutsizeError, counted
from outsize.hardware.probe import user_cache
from outsize.torch_private import PrefixStore, Store, TCPStore

Closable = C10d | Shared
SUMMING: tuple[Use, ...] = ("compute", "network", "beside", "merge", "agreement")
PATIENCE = 600.0  # seconds that a worker waits for another, unless told otherwise


@dataclass(frozen=True)
class Seat:
    """Where a rank runs. host: ranks of equal hosts can map the same memory. device: what tells
    its accelerator from others there; "" where its tensors are the host's."""

    host: str
    shared: bool  # whether it can
    pid: int
    started: float  # seconds
    device: str

    @property
    def process(self) -> Process:
        return Process(self.pid, self.started)


class Joined:
    """This worker among mesh.size of them. `close` when the run is over; `abort` when it failed."""

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        store: Store,
        device: str,
        seat: Seat,
        patience: float,
    ) -> None:
        self.mesh, self.rank = mesh, rank
        self._store, self._device, self._patience = store, device, patience
        self.groups: dict[Key, Collective] = {}
        self._open: list[Closable] = []
        self.seats = _seated(store, rank, mesh.size, seat)
        if shared := _on_one_device(self.seats):
            _leave_together(store, rank, mesh.size)
            raise OutsizeError(shared)

    def group(self, ranks: Sequence[int], use: Use = "compute") -> Collective:
        """The collective of some ranks in that order. The threads of the two uses may be in here at
        once: each makes its own keys, and waits on its own connection to the store."""
        key = (tuple(ranks), use)
        if key not in self.groups:
            self.groups[key] = self._made(key[0], use)
        return self.groups[key]

    def across(self) -> float:
        """Bytes from other hosts; of a group that several hosts have unequal parts of,
        their share of its workers."""
        here, total = self.seats[self.rank].host, 0.0
        for (ranks, _), group in list(self.groups.items()):
            away = sum(self.seats[rank].host != here for rank in ranks)
            total += sum(own(group).values()) * away / max(1, len(ranks) - 1)
        return total

    def abort(self, reason: str) -> str:
        """Make whoever waits in any group of this worker, here and elsewhere, fail at once. Gives
        the reason of the first worker that called it."""
        first = self._store.compare_set("aborted", "", reason).decode()
        for group in self._open:
            group.abort(first)
        return first

    def close(self) -> None:
        """Give back memory and connections. The groups must not be used any more."""
        for group in self._open:
            group.close()
        self._open.clear()
        self.groups.clear()

    def _made(self, ranks: tuple[int, ...], use: Use) -> Collective:
        if self.rank not in ranks or len(set(ranks)) < len(ranks) or max(ranks) >= self.mesh.size:
            raise OutsizeError(
                f"rank {self.rank}: a group of ranks {list(ranks)}; expected different ranks below"
                f" {self.mesh.size}, this one among them"
            )
        if len(ranks) == 1:
            return Alone()
        hosts = self._hosts(ranks)
        if 1 < len(hosts) < len(ranks) and len({len(places) for places in hosts}) == 1:
            return self._hierarchical(ranks, use, hosts)
        return self._shared(ranks, use) or self._network(ranks, use, len(hosts))

    def _network(self, ranks: tuple[int, ...], use: Use, hosts: int) -> Collective:
        """The group over the network; with the quickest sums, where it sums between hosts."""
        group = self._flat(ranks, use)
        if hosts == 1 or self._device != "cpu" or use not in SUMMING:
            return group
        seated = [self.seats[rank].host for rank in ranks]
        table = table_of(group, seated, user_cache())
        group.received.clear()  # of the run's own
        return Chosen(group, table)

    def _hosts(self, ranks: Sequence[int]) -> list[list[int]]:
        """The places of the ranks, host by host, in the order of the hosts' first ranks."""
        by_host: dict[str, list[int]] = {}
        for place, rank in enumerate(ranks):
            by_host.setdefault(self.seats[rank].host, []).append(place)
        return list(by_host.values())

    def _hierarchical(
        self, ranks: tuple[int, ...], use: Use, hosts: list[list[int]]
    ) -> Hierarchical:
        me = ranks.index(self.rank)
        near = next(places for places in hosts if me in places)
        across = [places[near.index(me)] for places in hosts]
        inner = self.group([ranks[p] for p in near], use)
        outer = self.group([ranks[p] for p in across], use)
        return Hierarchical(me, hosts, inner, outer, lambda: self._flat(ranks, use))

    def _shared(self, ranks: tuple[int, ...], use: Use) -> Shared | None:
        """The group over shared memory, where all of it can have that."""
        seats = [self.seats[r] for r in ranks]
        near = len({seat.host for seat in seats}) == 1 and all(seat.shared for seat in seats)
        if not near or self._device != "cpu" or len(ranks) > MOST:
            return None
        processes = [seat.process for seat in seats]
        at, keys = ranks.index(self.rank), self._keys(ranks, use)
        made = over_memory(keys, at, ranks, processes, self._patience)
        if made is not None:
            self._open.append(made)
        return made

    def _keys(self, ranks: tuple[int, ...], use: Use) -> Store:
        """Keys of a group, on a connection of its own."""
        digest = hashlib.blake2b(repr((ranks, use)).encode(), digest_size=8).hexdigest()
        connection: Any = self._store
        return PrefixStore(f"group/{digest}", connection.clone())

    def _flat(self, ranks: tuple[int, ...], use: Use) -> C10d:
        store, at = self._keys(ranks, use), ranks.index(self.rank)
        if self._device != "cpu":
            made = over_device(store, at, ranks, self._patience, self._device)
        else:
            made = over_gloo(store, at, ranks, self._patience, self._address(ranks))
        self._open.append(made)
        return made

    def _address(self, ranks: Sequence[int]) -> str:
        """The loopback interface where no other host is in the group."""
        return "127.0.0.1" if len({self.seats[r].host for r in ranks}) == 1 else ""


def join(
    mesh: Mesh,
    rank: int,
    store: Store,
    device: str = "cpu",
    host: str = "",
    patience: float = PATIENCE,
) -> Joined:
    """The world of the mesh, where every rank has come with a store that all of them see.

    device: the kind whose tensors it carries: "cpu", or an accelerator, of which each worker has
    its current one. host: a name for this machine, if ranks shall be taken as being on different
    ones. patience: seconds to wait for another rank.
    """
    if not 0 <= rank < mesh.size:
        raise OutsizeError(f"rank {rank} of mesh {mesh}; expected 0 to {mesh.size - 1}")
    store.set_timeout(timedelta(seconds=patience))
    process, machine = this_process(), host or _machine()
    own = "" if device == "cpu" else accelerator.identity(accelerator.find(device))
    seat = Seat(machine, _built(store, machine), process.pid, process.started, own)
    return Joined(mesh, rank, store, device, seat, patience)


def from_environment(mesh: Mesh, environment: Mapping[str, str], device: str = "cpu") -> Joined:
    """The world that torchrun, or whoever sets the same variables, has started this process in. A
    process may have several, one after another or at once: all workers make them in one order."""
    _, size = (number(environment, name) for name in ("RANK", "WORLD_SIZE"))
    if size != mesh.size:
        raise OutsizeError(
            f"mesh {mesh} has {counted(mesh.size, 'worker')}, WORLD_SIZE is {size}; start"
            f" {counted(mesh.size, 'worker')}"
            f" or give a mesh of {size}, such as data={size}"
        )
    rank, store = _turn(environment)
    return join(mesh, rank, store, device)


def stay_away(environment: Mapping[str, str], reason: str) -> None:
    """Say that this worker does not come to the world that the others make next: they are refused
    for the same reason. The one that serves the meeting point waits for them to have read it."""
    rank, store = _turn(environment)
    store.set(f"seat/{rank}", json.dumps(reason))
    _read(store, rank)
    if rank == 0 and not served(environment):
        for other in range(number(environment, "WORLD_SIZE")):
            store.get(f"read/{other}")


def _turn(environment: Mapping[str, str]) -> tuple[int, Store]:
    """This worker's rank, and the keys of the world that it makes next."""
    rank, store = number(environment, "RANK"), meeting(environment)
    turn = store.add(f"joins/{rank}", 1)  # what the one before has written is not read again
    return rank, PrefixStore(f"join/{turn}", store)


def meeting(environment: Mapping[str, str], seconds: float = PATIENCE) -> Store:
    """The store at MASTER_ADDR and MASTER_PORT, with this attempt's keys: a restarted worker does
    not read what the attempt before wrote. Served by rank 0, unless torchrun's agent serves it."""
    rank, size = number(environment, "RANK"), number(environment, "WORLD_SIZE")
    address, port = environment.get("MASTER_ADDR", "127.0.0.1"), number(environment, "MASTER_PORT")
    serves = rank == 0 and not served(environment)
    try:
        store = TCPStore(
            address, port, size, serves, timedelta(seconds=seconds), wait_for_workers=False
        )
    except RuntimeError as error:
        raise OutsizeError(_unreachable(rank, address, port, serves, error)) from error
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"outsize/{attempt}", store)


def served(environment: Mapping[str, str]) -> bool:
    """Whether torchrun's agent serves the meeting point."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _unreachable(rank: int, address: str, port: int, serves: bool, error: Exception) -> str:
    cause = str(error).strip().splitlines()[0]
    if serves:
        return (
            f"rank {rank} cannot serve the meeting point {address}:{port} ({cause}); another"
            " program may use the port: give a free one as MASTER_PORT"
        )
    return (
        f"rank {rank} cannot reach the meeting point {address}:{port} ({cause}); see that rank 0"
        " runs there and that the port is open between the hosts"
    )


def number(environment: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    """A variable that is a number."""
    text = environment.get(name, "" if otherwise is None else str(otherwise))
    if not text.isdecimal():
        raise OutsizeError(
            f"{name} is {text!r}; expected a number, as torchrun sets it for every worker"
        )
    return int(text)


def _machine() -> str:
    """What processes share that can share memory: the running kernel, the namespace of process
    numbers and the file system of shared memory."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
        parts.append(str(os.stat("/dev/shm").st_dev))
    return "/".join(parts)


def _built(store: Store, machine: str) -> bool:
    """Whether shared memory can be used; the first rank of a machine finds out, which may mean to
    compile, while the others wait."""
    if store.add(f"built/{machine}/ranks", 1) == 1:
        usable()
        store.set(f"built/{machine}", "")
    else:
        store.get(f"built/{machine}")
    return usable()


def _on_one_device(seats: Sequence[Seat]) -> str:
    """What to say where two ranks have one accelerator, which no transport allows; or ""."""
    had: dict[tuple[str, str], int] = {}
    for rank, seat in enumerate(seats):
        first = had.setdefault((seat.host, seat.device), rank)
        if seat.device and first != rank:
            return (
                f"ranks {first} and {rank} are on one device, {seat.device}; expected one each:"
                " call torch.accelerator.set_device_index(local rank) before the model is made, or"
                " start fewer workers"
            )
    return ""


def _leave_together(store: Store, rank: int, size: int) -> None:
    """Before all are refused alike: the rank that may serve the store goes last."""
    _read(store, rank)
    for other in range(0 if rank else size):
        store.get(f"read/{other}")


def _seated(store: Store, rank: int, size: int, seat: Seat) -> tuple[Seat, ...]:
    """Where everybody runs; waits until all have said so. OutsizeError in the words of the first
    that stays away."""
    store.set(f"seat/{rank}", json.dumps(asdict(seat)))
    said = []
    for other in range(size):
        try:
            said.append(json.loads(store.get(f"seat/{other}")))
        except RuntimeError as error:
            raise OutsizeError(
                f"rank {rank}: rank {other} of {size} has not come to the meeting point"
                f" ({str(error).strip().splitlines()[0]}); see what that rank printed"
            ) from error
    reasons = [one for one in said if isinstance(one, str)]
    if reasons:
        _read(store, rank)
        raise OutsizeError(reasons[0])
    return tuple(Seat(**one) for one in said)


def _read(store: Store, rank: int) -> None:
    """A worker knows who stays away, and why."""
    store.set(f"read/{rank}", "")
