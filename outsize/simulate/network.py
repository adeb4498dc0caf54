"""What sharing states takes of the network, action by action: bytes by level, and seconds.

What one worker has from others: of B bytes over n workers an all-gather or a reduce-scatter brings
B (n - 1) / n, an all-reduce twice as many. Workers of one machine are neighbours; a group that has
k of them on each of m machines talks inside the machines and between ranks of the same place on all
of them (outsize/collectives/hierarchical.py), so that B (m - 1) / (m k) cross the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from outsize.collectives import Mesh
from outsize.hardware import Hardware
from outsize.schedule import Action, Kind, Schedule
from outsize.schedule.chunks import Chunks
from outsize.schedule.kept import GRADIENTS, MASTER, PARAMETERS
from outsize.schedule.residency import SHARED
from outsize.simulate.costs import Said

SAID = (*SHARED, Kind.MERGE)  # actions in which workers share what they hold
STAGES = "stages"  # what passes between the stages of a pipeline
EXCHANGED = "exchange"  # what all workers of a pipeline sum for a cut vocabulary


@dataclass(frozen=True)
class Message:
    """One collective. bytes: of the whole tensor, twice for an all-reduce; its group: `count`
    workers whose ranks lie `stride` apart. direct: every two of them say something of their own, so
    that nothing is summed or handed on inside a machine before it leaves."""

    bytes: float
    count: int
    stride: int = 1
    direct: bool = False

    @property
    def received(self) -> float:
        """Bytes that a worker has from others."""
        return self.bytes * (self.count - 1) / self.count

    def near(self, machine: int) -> float:
        """Of these, bytes from workers of its own machine, where `machine` workers are one."""
        inside = self._inside(machine)
        return self.bytes * (inside - 1) / (self.count if self.direct else inside)

    def far(self, machine: int) -> float:
        """Bytes from other machines."""
        return self.received - self.near(machine)

    def _inside(self, machine: int) -> int:
        """Workers of the group on one machine."""
        return max(1, min(self.count, machine // self.stride))

    def seconds(self, hardware: Hardware) -> float:
        """How long it takes, one level after the other."""
        machine = workers_of_a_machine(hardware)
        inside = self._inside(machine)
        bandwidth, wait = _inner(hardware, inside * self.stride)
        total = self.near(machine) / bandwidth + wait * (inside - 1)
        if inside == self.count:
            return total
        bandwidth, wait = _outer(hardware)
        return total + self.far(machine) / bandwidth + wait * (self.count / inside - 1)


def messages(chunks: Chunks, action: Action, last: bool = True) -> Iterator[Message]:
    """What is said in an action of SAID. last: of a REDUCE, the last of its stage in the step."""
    for index in chunks.of_stage[action.stage]:
        yield from _of_chunk(chunks, index, action.kind, last)


def _of_chunk(chunks: Chunks, index: int, kind: Kind, last: bool) -> Iterator[Message]:
    table, own = chunks.tables[index], chunks.shards
    dtypes = dict(chunks.held(index))
    mesh = chunks.plan.mesh
    apart = mesh.stride("data")
    if kind is Kind.GATHER:
        yield Message(table.numel * dtypes[PARAMETERS].itemsize, own.parameters, apart)
    if kind is Kind.GATHER or not table.trainable:
        return
    if kind is Kind.COLLECT:
        mine = table.numel * dtypes[PARAMETERS].itemsize / own.parameters
        yield Message(mine, own.optimizer // own.parameters, own.parameters * apart)
        return
    if kind is Kind.MERGE:
        first, end = chunks.extent(index, MASTER)
        turns = chunks.holders(table)
        if len(turns) > 1:
            mine = 2 * (end - first) * dtypes[GRADIENTS].itemsize
            yield Message(mine, len(turns), (turns[1] - turns[0]) * mesh.stride("pipeline"))
        return
    whole = table.numel * dtypes[GRADIENTS].itemsize
    yield Message(whole, own.gradients, apart)
    if last:
        mine = whole / own.gradients
        yield Message(mine, own.optimizer // own.gradients, own.gradients * apart)
        mine = 2 * whole / own.optimizer
        yield Message(mine, own.size // own.optimizer, own.optimizer * apart)
        if table.partial:
            yield Message(mine, table.shared, mesh.stride(table.axis))
        others = [axis for axis in mesh.axes if axis.sums(table.axis)]
        if others:  # their order is that of the ranks: the last one's workers lie next to others
            count = prod(mesh[axis.name] for axis in others)
            yield Message(mine, count, mesh.stride(others[-1].name))


def within(said: Said, mesh: Mesh) -> Message:
    """What is said inside an action."""
    if said.operation == "receive":
        return Message(2 * said.bytes, 2, mesh.stride(said.axis))
    count = mesh[said.axis]
    whole, direct = said.bytes * count / max(1, count - 1), said.operation == "all_to_all"
    return Message(whole, count, mesh.stride(said.axis), direct)


# -- a step ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Received:
    """Bytes that a worker has from others in a step: of its own machine, and of other machines."""

    near: float = 0.0
    far: float = 0.0

    @property
    def total(self) -> float:
        return self.near + self.far

    def plus(self, message: Message, machine: int) -> Received:
        return Received(self.near + message.near(machine), self.far + message.far(machine))


def last_sums(schedule: Schedule) -> frozenset[int]:
    """Places of the REDUCEs that are the last of their stage."""
    found = ((a.stage, i) for i, a in enumerate(schedule.workers[0]) if a.kind is Kind.REDUCE)
    return frozenset(dict(found).values())


def received(
    chunks: Chunks,
    schedule: Schedule,
    inside: Callable[[Action], Iterable[Said]],
    hardware: Hardware,
) -> Mapping[str, Received]:
    """By kind of action, or by axis what layers say over it ("stages": what passes between those of
    a pipeline), the bytes of a step. inside: what is said inside an action."""
    machine, last = workers_of_a_machine(hardware), last_sums(schedule)
    found: dict[str, Received] = {}

    def count(name: str, message: Message) -> None:
        found[name] = found.get(name, Received()).plus(message, machine)

    for index, action in enumerate(schedule.workers[0]):
        if action.kind in SAID:
            for message in messages(chunks, action, index in last):
                count(action.kind.value.lower(), message)
        for said in inside(action):
            name = {"receive": STAGES, "exchange": EXCHANGED}.get(said.operation, said.axis)
            count(name, within(said, chunks.plan.mesh))
    return {name: count for name, count in found.items() if count.total}


# -- the machine -----------------------------------------------------------------------------------


def workers_of_a_machine(hardware: Hardware) -> int:
    """Its devices, where something joins it to others; else it has all workers."""
    joined = any(link.between == "nodes" for link in hardware.links)
    return hardware.devices[0].count if joined else 1 << 30


def _inner(hardware: Hardware, reach: int) -> tuple[float, float]:
    """(bytes a second that one worker has from others of its machine, seconds until the first):
    over the fastest link that joins `reach` neighbours, or where they share one memory a quarter of
    its bandwidth, for a copy in and a copy out."""
    found = [
        (link.bandwidth.value, link.latency.value if link.latency else 0.0)
        for link in hardware.links
        if link.between == "devices" and (not link.joins or link.joins >= reach)
    ]
    return max(found, default=(hardware.devices[0].bandwidth.value / 4, 0.0))


def _outer(hardware: Hardware) -> tuple[float, float]:
    link = next(link for link in hardware.links if link.between == "nodes")
    return link.bandwidth.value, link.latency.value if link.latency else 0.0


def updated(chunks: Chunks, stage: int) -> float:
    """The share of a stage's trained elements that this worker updates."""
    mine = every = 0
    for index in chunks.of_stage[stage]:
        if chunks.tables[index].trainable:
            first, last = chunks.extent(index, MASTER)
            mine, every = mine + last - first, every + chunks.tables[index].numel
    return mine / every if every else 1.0
