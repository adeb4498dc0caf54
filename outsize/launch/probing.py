"""What workers take to talk to each other, measured by all of them: collectives by operation, size
and group, rates from each to each, and how much talking and computing slow each other.

Every worker calls the same in the same order. A collective takes as long as its slowest worker, and
of some repetitions the shortest counts, since whatever else runs can only add to it. Ranks are
counted machine by machine, with as many on each.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean

import torch

from outsize import accelerator
from outsize.collectives.collective import Collective, even
from outsize.collectives.world import World, everyone, told
from outsize.errors import OutsizeError
from outsize.hardware.hardware import Hardware, Rate, Slowed, Talked
from outsize.hardware.shared import shared
from outsize.hardware.talking import link_of, slowed

Operation = Callable[[], object]
SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)  # bytes of a tensor
MESSAGE = 1 << 23  # bytes from one worker to another
WINDOW = 0.2  # seconds of computing and of talking, each alone
SQUARE, SUMMED = 512, 1 << 20  # of a product; bytes of the sum beside it
LONGEST = 2.0  # seconds that one call may be expected to take
LEAST, MOST, ENOUGH = 2, 20, 0.05  # repetitions, and seconds after which the shortest stands


@dataclass(frozen=True)
class Crew:
    """The workers of a probe as one of them sees them. near: of them on each machine."""

    world: World
    near: int
    device: torch.device
    date: str

    def __post_init__(self) -> None:
        counts = {int(near) for (near,) in told(self.world, [self.near])}
        if len(counts) > 1 or self.size % self.near:
            raise OutsizeError(
                f"machines have {', '.join(map(str, sorted(counts)))} workers; a probe expects as"
                " many on each"
            )

    @property
    def size(self) -> int:
        return self.world.mesh.size

    @property
    def machines(self) -> int:
        return self.size // self.near

    def groups(self) -> list[tuple[int, ...]]:
        """Of this worker: all, those of its machine, those of its place on every machine."""
        rank, near = self.world.rank, self.near
        first = rank // near * near
        found = [tuple(range(self.size))]
        if 1 < near < self.size:
            found.append(tuple(range(first, first + near)))
            found.append(tuple(range(rank % near, self.size, near)))
        return found


def joined(hardware: Hardware, crew: Crew, pairs: bool) -> Hardware:
    """The machine with what its workers, or all machines', have measured together. pairs: rates
    from each machine to each, or of one machine from each worker to each."""
    talked = tuple(_talked(crew))
    rates = _rates(crew) if pairs else ()
    beside = None if accelerator.queues(crew.device) else _slowed(crew)
    links = tuple(link for link in hardware.links if link.between == "device and host")
    near = [entry for entry in talked if entry.inside == entry.workers]
    far = [entry for entry in talked if entry.inside < entry.workers]
    if crew.near > 1:
        links += (link_of(near, "workers", "devices"),)
    if crew.machines > 1:
        links += (link_of(far, "network", "nodes", crew.machines),)
        hardware = shared(hardware, crew.near)
        hardware = replace(hardware, devices=(replace(hardware.devices[0], count=crew.near),))
    return replace(hardware, links=links, talked=talked, rates=rates, slowed=beside)


# -- collectives -----------------------------------------------------------------------------------


def _talked(crew: Crew) -> Iterator[Talked]:
    for ranks in crew.groups():
        inside = sum(rank // crew.near == ranks[0] // crew.near for rank in ranks)
        group = crew.world.group(ranks)
        for name in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all"):
            spent, before = 0.0, 0
            for size in SIZES:
                if before and spent * size / before > LONGEST:
                    break
                work, bytes_ = _operation(group, name, size, crew.device)
                spent, before = _timed(crew, work), size
                yield Talked(name, bytes_, len(ranks), inside, _seconds(spent, crew))
    ends = [(0, 1)] if crew.near > 1 else []
    ends += [(0, crew.near)] if crew.machines > 1 else []
    for first, second in ends:
        inside = 2 if second < crew.near else 1
        for size in SIZES:
            spent = _timed(crew, _message(crew, first, second, size))
            yield Talked("send", size, 2, inside, _seconds(spent, crew))


def _operation(
    group: Collective, name: str, size: int, device: torch.device
) -> tuple[Operation, int]:
    """A call over a tensor of about so many bytes, and its bytes."""
    count = max(1, size // 4 // group.size) * group.size
    whole, other = (torch.zeros(count, device=device) for _ in range(2))
    spans = even(count, group.size)
    mine = torch.zeros(count // group.size, device=device)
    parts = whole.chunk(group.size), other.chunk(group.size)
    calls: dict[str, Operation] = {
        "all_reduce": lambda: group.all_reduce(whole),
        "reduce_scatter": lambda: group.reduce_scatter(whole, spans, mine),
        "all_gather": lambda: group.all_gather(mine, spans, whole),
        "all_to_all": lambda: group.all_to_all(*parts),
    }
    return calls[name], whole.nbytes


def _message(crew: Crew, first: int, second: int, size: int) -> Operation:
    """So many bytes from one worker to another; nothing, of all others."""
    if crew.world.rank not in (first, second):
        return lambda: None
    pair = (min(first, second), max(first, second))
    group = crew.world.group(pair, "stages")
    tensor = torch.zeros(max(1, size // 4), device=crew.device)
    return partial(group.broadcast, tensor, pair.index(first))


def _rates(crew: Crew) -> tuple[tuple[float, ...], ...]:
    """B/s from each machine (its first worker) to each, or from each worker to each; 0 to itself:
    one pair after the other."""
    step = crew.near if crew.machines > 1 else 1
    ends = range(0, crew.size, step)
    return tuple(
        tuple(
            0.0 if one == other else MESSAGE / _timed(crew, _message(crew, one, other, MESSAGE))
            for other in ends
        )
        for one in ends
    )


# -- computing beside it ---------------------------------------------------------------------------


def _slowed(crew: Crew) -> Slowed:
    """Products and sums of all workers, by themselves and at once: the mean of the workers."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(SQUARE, SQUARE, generator=generator)
    summed = torch.zeros(SUMMED // 4)
    group = everyone(crew.world, "beside")

    def product() -> None:
        torch.mm(x, x)

    def sums() -> None:
        group.all_reduce(summed)

    works = [_repeated(crew, work) for work in (product, sums)]
    alone = [_timed(crew, work) for work in works]
    beside = [0.0, 0.0]

    def clocked(place: int) -> None:
        start = time.perf_counter()
        works[place]()
        beside[place] = time.perf_counter() - start

    everyone(crew.world).barrier()
    thread = threading.Thread(target=clocked, args=(1,), name="talking", daemon=True)
    thread.start()
    clocked(0)
    thread.join()
    by_rank = told(crew.world, beside)
    return slowed(
        (alone[0], alone[1]), (mean(r[0] for r in by_rank), mean(r[1] for r in by_rank)), crew.date
    )


def _repeated(crew: Crew, work: Operation) -> Operation:
    """So often that it takes WINDOW, the same number of times on every worker."""
    count = max(1, round(WINDOW / _timed(crew, work)))

    def all_of_it() -> None:
        for _ in range(count):
            work()

    return all_of_it


# -- the clock -------------------------------------------------------------------------------------


def _timed(crew: Crew, work: Operation) -> float:
    """Seconds of a call that all workers make."""
    barrier = everyone(crew.world).barrier

    def once() -> float:
        barrier()
        accelerator.settle(crew.device)
        start = time.perf_counter()
        work()
        accelerator.settle(crew.device)
        return time.perf_counter() - start

    once()  # builds groups and buffers
    first = max(seconds for (seconds,) in told(crew.world, [once()]))
    repeats = max(LEAST, min(MOST, int(ENOUGH / first)))
    by_rank = told(crew.world, [once() for _ in range(repeats)])
    return float(min(first, *(max(each) for each in zip(*by_rank, strict=True))))


def _seconds(value: float, crew: Crew) -> Rate:
    return Rate(value, "s", "probe", crew.date)
