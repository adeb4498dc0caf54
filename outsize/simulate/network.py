"""What workers that talk take of the network: bytes by level, and seconds.

Who says what is in outsize/schedule/talk.py. Workers of one machine are neighbours; a group that
has k of them on each of m machines talks inside the machines and between ranks of the same place on
all of them (outsize/collectives/hierarchical.py), so that of B bytes B (m - 1) / (m k) cross the
network. In an all-to-all every two workers say something of their own: nothing is summed or handed
on inside a machine before it leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outsize.collectives.axes import TENSOR
from outsize.collectives.world import LAYERS
from outsize.hardware import Hardware
from outsize.plan import Plan
from outsize.schedule import Action
from outsize.schedule.chunks import Chunks
from outsize.schedule.kept import MASTER
from outsize.schedule.program import Says, Talk

BORDERS = "borders"  # where blocks that share rows meet others
AGREED = "agreement"  # the channel of the few numbers on which all agree: they are not told
ALONE = ("stages", "exchange")  # channels that have a name of their own


def near(talk: Talk, machine: int) -> float:
    """Of the bytes that a worker has from others, those of its own machine, where `machine` workers
    are one."""
    inside = _inside(talk, machine)
    direct = talk.operation == "all_to_all"
    share = (inside - 1) / (len(talk.ranks) if direct else inside)
    return talk.carried * share * _wide(talk, inside)


def far(talk: Talk, machine: int) -> float:
    """Those of other machines."""
    return talk.received * _wide(talk, _inside(talk, machine)) - near(talk, machine)


def _wide(talk: Talk, inside: int) -> float:
    """Levels sum in a wider dtype than one level does."""
    return talk.wide if 1 < inside < len(talk.ranks) else 1


def _inside(talk: Talk, machine: int) -> int:
    """Workers of the group on the machine of its first."""
    here = talk.ranks[0] // machine
    return sum(1 for rank in talk.ranks if rank // machine == here)


def seconds(talk: Talk, hardware: Hardware) -> float:
    """How long it takes, one level after the other."""
    if not talk.carried:
        return 0.0
    machine, count = workers_of_a_machine(hardware), len(talk.ranks)
    inside = _inside(talk, machine)
    stride = talk.ranks[1] - talk.ranks[0] if count > 1 else 1
    bandwidth, wait = _inner(hardware, inside * stride)
    total = near(talk, machine) / bandwidth + wait * (inside - 1)
    total += talk.memory / hardware.devices[0].bandwidth.value
    if inside == count:
        return total
    bandwidth, wait = _outer(hardware)
    return total + far(talk, machine) / bandwidth + wait * (count / inside - 1)


def together(computing: float, saying: float, beside: float) -> float:
    """Seconds of what computes and says so long in one thread, while another says so long."""
    return max(computing + saying, beside)


# -- a step ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Received:
    """Bytes that a worker has from others in a step: of its own machine, and of other machines; and
    the seconds that these messages take, one after the other."""

    near: float = 0.0
    far: float = 0.0
    seconds: float = 0.0

    @property
    def total(self) -> float:
        return self.near + self.far


def received(
    actions: tuple[Action, ...], says: Says, plan: Plan, hardware: Hardware
) -> Mapping[str, Received]:
    """By kind of action, or by axis what workers say over it while they compute ("stages": what
    passes between those of a pipeline; "borders": what makes rows of wholes and wholes of rows),
    the bytes of a step."""
    machine, found = workers_of_a_machine(hardware), dict[str, Received]()
    for action, said in zip(actions, says, strict=True):
        for talk in said:
            if talk.received and talk.channel != AGREED:
                name = _name(action, talk, plan)
                had = found.get(name, Received())
                found[name] = Received(
                    had.near + near(talk, machine), had.far + far(talk, machine),
                    had.seconds + seconds(talk, hardware),
                )  # fmt: skip
    return found


def _name(action: Action, talk: Talk, plan: Plan) -> str:
    """What brings the bytes of a talk."""
    if talk.channel in ALONE:
        return talk.channel
    if talk.channel not in LAYERS:
        return action.kind.lower()
    mesh, stage = plan.mesh, plan.stages[action.stage]
    name = next(a.name for a in mesh.axes if mesh.ranks(a.name, talk.ranks[0]) == talk.ranks)
    shares = stage.first > 0 and stage.last <= 1 + plan.by_rows  # and says nothing inside
    return BORDERS if shares and name == TENSOR.name else name


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
