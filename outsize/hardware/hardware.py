"""Hardware: devices, memory tiers and links with their rates, as data.

Rates are of dense maths, and of links in one direction. Every rate says what it counts, and where
and when it comes from, because catalogues mix these and a plan must not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, get_args

from outsize.errors import OutsizeError, nearest

if TYPE_CHECKING:
    from outsize.hardware.products import Law

Unit = Literal["FLOP/s", "B/s", "B", "s", "W", "money/h"]
Kind = Literal["cpu", "gpu", "systolic", "pim"]
UNITS = get_args(Unit)
NAME = r"[A-Za-z][A-Za-z0-9_-]*"  # of a tier


@dataclass(frozen=True)
class Rate:
    """One figure. upto is the upper end where the source gives a range; value is the lower."""

    value: float
    unit: Unit
    source: str
    date: str  # year-month-day; of the measurement, or of the table
    upto: float | None = None
    note: str = ""

    def __post_init__(self) -> None:
        _positive("rate", self.value, self.unit)
        if self.unit not in UNITS:
            raise OutsizeError(f"rate unit {self.unit!r}{nearest(self.unit, UNITS)}")
        if self.upto is not None and not self.value <= self.upto < math.inf:
            raise OutsizeError(f"rate upto {self.upto}, expected at least its value {self.value}")


@dataclass(frozen=True)
class Matmul:
    """How fast (T, I) x (I, O) runs in one dtype: one entry of a table by shape."""

    tokens: int
    d_in: int
    d_out: int
    dtype: str
    rate: Rate  # FLOP/s, of 2 T I O operations

    def __post_init__(self) -> None:
        for name in ("tokens", "d_in", "d_out"):
            _positive(f"matmul {name}", getattr(self, name), "count")

    @property
    def flops(self) -> int:
        """Operations of one call: a multiply and an add for each of T I O."""
        return 2 * self.tokens * self.d_in * self.d_out


@dataclass(frozen=True)
class Attention:
    """How fast causal attention runs; operations count the causal half only.

    Forward is 2 T^2 K H operations (two products, half of each), backward 5 T^2 K H (five).
    """

    tokens: int
    heads: int
    head_size: int
    dtype: str
    direction: Literal["forward", "backward"]
    rate: Rate  # FLOP/s

    def __post_init__(self) -> None:
        for name in ("tokens", "heads", "head_size"):
            _positive(f"attention {name}", getattr(self, name), "count")


@dataclass(frozen=True)
class Measured:
    """What a probe found beyond the peaks of a device: rates by shape, and what a call costs."""

    matmul: tuple[Matmul, ...] = ()
    attention: tuple[Attention, ...] = ()
    overhead: Rate | None = None  # seconds of an operator on a tiny tensor
    handed: Rate | None = None  # seconds of the host for an operator of a training step

    @cached_property
    def laws(self) -> Mapping[str, Law]:
        """By dtype, what products take on a processor."""
        from outsize.hardware.products import laws  # which needs more than most commands do

        return laws(self.matmul)

    def product_seconds(self, shape: tuple[int, int, int], dtype: str) -> tuple[float, float]:
        """(seconds of a product on a processor, of which its call). shape: (T, I, O) of (T, I) x
        (I, O). Of a dtype of which few shapes were measured, by their rates alone. Raises
        OutsizeError for one that was not measured."""
        law = self.laws.get(dtype)
        if law is None:
            return 2.0 * math.prod(shape) / self.matmul_rate(*shape, dtype), 0.0
        return law.seconds(shape), law.call

    def matmul_rate(self, tokens: int, d_in: int, d_out: int, dtype: str) -> float:
        """FLOP/s of a shape, between the measured ones in the logarithms of T, I and O.

        Weights fall with the square of the distance; a measured shape gives its own rate.
        Raises OutsizeError for a dtype that was not measured.
        """
        table = [entry for entry in self.matmul if entry.dtype == dtype]
        if not table:
            known = tuple(sorted({entry.dtype for entry in self.matmul}))
            raise OutsizeError(f"no matmul rate for dtype {dtype!r}{nearest(dtype, known)}")
        weight, total = 0.0, 0.0
        for entry in table:
            far = (
                math.log(tokens / entry.tokens) ** 2
                + math.log(d_in / entry.d_in) ** 2
                + math.log(d_out / entry.d_out) ** 2
            )
            if far == 0:
                return entry.rate.value
            weight += 1 / far
            total += math.log(entry.rate.value) / far
        return math.exp(total / weight)


@dataclass(frozen=True)
class Banks:
    """Memory that multiplies where it lies. count: banks that do so at once; width: bytes that one
    multiplies in a `cycle` (seconds); row: bytes of its open row; opening: seconds to close a row
    and open the next."""

    count: int
    width: int
    cycle: float
    row: int
    opening: float

    def __post_init__(self) -> None:
        for name in ("count", "width", "cycle", "row", "opening"):
            _positive(f"banks: {name}", getattr(self, name), "s" if name == "opening" else "count")

    @property
    def inside(self) -> float:
        """B/s of all banks together, rows opened and closed."""
        return self.count * self.row / (self.row / self.width * self.cycle + self.opening)


@dataclass(frozen=True)
class Device:
    """Devices of one kind. peak: FLOP/s by dtype of one device ("fp32", "bf16", "fp8", ...). grain:
    bytes of which its allocator gives whole multiples; reserved: that its libraries keep. watts,
    price: of one device in use, where known. array: rows and columns of a systolic array, 0 where
    there is none. threads: of a processor, those that its rates were measured with, of its cores;
    0: all that it has; granted: the cores' worth of time that a quota leaves of them, 0: all of it.
    banks: of memory that multiplies; `bandwidth` is then that of its pins."""

    name: str
    kind: Kind
    memory: Rate  # bytes of one device, as sold or as found
    peak: Mapping[str, Rate]
    bandwidth: Rate  # B/s of its own memory
    count: int = 1
    visible: Rate | None = None  # bytes that a process sees, where known: what may be planned with
    measured: Measured = field(default_factory=Measured)
    note: str = ""
    grain: int = 1
    reserved: int = 0
    watts: Rate | None = None
    price: Rate | None = None  # money/h
    array: int = 0
    cores: int = 0
    threads: int = 0
    granted: float = 0.0
    banks: Banks | None = None

    def __post_init__(self) -> None:
        _positive(f"device {self.name}: grain", self.grain, "B")
        if self.reserved < 0:
            raise OutsizeError(f"{self.name}: reserved {self.reserved} B, expected 0 or more")
        _positive(f"device {self.name}: count", self.count, "count")
        _unit(f"device {self.name}: memory", self.memory, "B")
        _unit(f"device {self.name}: bandwidth", self.bandwidth, "B/s")
        for dtype, rate in self.peak.items():
            _unit(f"device {self.name}: peak {dtype}", rate, "FLOP/s")
        for name, of, unit in (("watts", self.watts, "W"), ("price", self.price, "money/h")):
            if of is not None:
                _unit(f"device {self.name}: {name}", of, unit)

    def __hash__(self) -> int:
        return hash((self.name, self.count, self.measured))  # a mapping of peaks has none

    @property
    def apart(self) -> bool:
        """Whether its memory is not the host's."""
        return self.kind != "cpu"

    @property
    def memory_bytes(self) -> int:
        """Bytes of one device that a plan may count on: the visible ones, else the lower end."""
        return int((self.visible or self.memory).value)


@dataclass(frozen=True)
class Tier:
    """A place where bytes rest: capacity in bytes, and rates towards the device where known.

    "device", "host", "disk", or a name that somebody declared, such as "cxl". own: of memory, B/s
    that the host's processor reads and writes of it, which is what updates at rest take.
    """

    name: str
    bytes: int
    read: Rate | None = None
    write: Rate | None = None
    own: Rate | None = None

    def __post_init__(self) -> None:
        if self.own is not None:
            _unit(f"tier {self.name}: own", self.own, "B/s")
        if not re.fullmatch(NAME, self.name):
            raise OutsizeError(f"tier {self.name!r}; expected a letter, then letters, digits, _, -")
        if self.bytes < 0:
            raise OutsizeError(f"tier {self.name}: {self.bytes} bytes, expected 0 or more")


@dataclass(frozen=True)
class Link:
    """What joins devices, or a device and the host; bandwidth is per device. joins: between
    devices, so many neighbours of a machine; between nodes, so many machines; 0: all of them."""

    name: str  # "nvlink", "pcie", "network", ...
    between: Literal["devices", "device and host", "nodes"]
    bandwidth: Rate
    latency: Rate | None = None
    joins: int = 0

    def __post_init__(self) -> None:
        _unit(f"link {self.name}: bandwidth", self.bandwidth, "B/s")
        if self.latency is not None:
            _unit(f"link {self.name}: latency", self.latency, "s")


@dataclass(frozen=True)
class Talked:
    """How long a collective takes: one entry of a table by operation, size and group. bytes: of the
    whole tensor, on each worker; of "send", of the message. inside: workers on one machine."""

    operation: Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send"]
    bytes: int
    workers: int
    inside: int
    seconds: Rate

    def __post_init__(self) -> None:
        for name in ("bytes", "workers", "inside"):
            _positive(f"{self.operation} {name}", getattr(self, name), "count")
        _unit(self.operation, self.seconds, "s")


@dataclass(frozen=True)
class Slowed:
    """How many times as long computing takes beside talking, and talking beside computing."""

    computing: float
    talking: float
    date: str

    def __post_init__(self) -> None:
        for name in ("computing", "talking"):
            _positive(f"slowed: {name}", getattr(self, name), "times")


@dataclass(frozen=True)
class Hardware:
    """A machine or a cluster of like machines. source: "probe", "catalogue", or a file's own.
    talked, slowed: as workers measured it; rates: B/s from each machine to each, or of one machine
    from each worker to each."""

    devices: tuple[Device, ...]
    tiers: tuple[Tier, ...]
    links: tuple[Link, ...]
    source: str
    talked: tuple[Talked, ...] = ()
    rates: tuple[tuple[float, ...], ...] = ()
    slowed: Slowed | None = None

    def __post_init__(self) -> None:
        if not self.devices:
            raise OutsizeError("hardware without devices; expected at least one")
        names = [tier.name for tier in self.tiers]
        if len(set(names)) != len(names):
            raise OutsizeError(f"hardware tiers {', '.join(names)}; expected each once")

    @property
    def machines(self) -> int:
        """As many as a link between them says that it joins."""
        return max((link.joins for link in self.links if link.between == "nodes"), default=1) or 1

    def tier(self, name: str) -> Tier:
        """The tier of this name. Raises OutsizeError when the hardware has none."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise OutsizeError(f"tier {name!r}{nearest(name, tuple(t.name for t in self.tiers))}")


def _positive(what: str, value: float, unit: str) -> None:
    if not 0 < value < math.inf:
        raise OutsizeError(f"{what} {value} {unit}, expected a positive number")


def _unit(what: str, rate: Rate, unit: str) -> None:
    if rate.unit != unit:
        raise OutsizeError(f"{what} is in {rate.unit!r}, expected {unit!r}")
