"""Forecast: what a plan will hold and take on a machine, before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from outsize.collectives.world import LAYERS
from outsize.hardware import Device, Hardware
from outsize.memory import Ledger
from outsize.memory.ledger import in_grains
from outsize.plan import DEVICE, Plan
from outsize.runtime import Job
from outsize.schedule import Action, Kind, Lane, Schedule, State, prove
from outsize.schedule.action import WHOLE
from outsize.schedule.kept import PARAMETERS
from outsize.schedule.layout import Placement
from outsize.schedule.program import Says
from outsize.schedule.programs import evaluate, train
from outsize.schedule.residency import moved as item_of
from outsize.schedule.starting import starting
from outsize.schedule.staying import bytes_below
from outsize.schedule.talk import Spoken
from outsize.simulate import network
from outsize.simulate.costs import Costs
from outsize.simulate.counter import Work
from outsize.simulate.in_flight import absent, evaluating, with_in_flight
from outsize.simulate.rehearse import rehearse
from outsize.simulate.replay import Player, annotate, kinds_at_peak, play, play_together
from outsize.simulate.state_bytes import below, copied, held_of, segments_of, spilled
from outsize.trace.trace import Trace

_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # as the catalogue has them


@dataclass(frozen=True)
class RankForecast:
    """What one place of the pipeline axis will hold, hear and do, as a Forecast has it. stages: of
    the plan's, those whose parameters it has. evaluation: its peak in one, of one microbatch."""

    stages: tuple[int, ...]
    static: Mapping[str, int]
    peak: int
    peak_by_kind: Mapping[str, int]
    received: Mapping[str, network.Received]
    parameters: int
    schedule: Schedule
    below: Mapping[str, int]
    evaluation: int = 0


@dataclass(frozen=True)
class Forecast:
    """What a plan will hold (bytes) and take (seconds a step).

    static: bytes by kind that are always there. segments: by segment of the model, its static
    bytes, the activations that one microbatch keeps of it, and the workspace of its costliest
    action. peak: highest bytes on the device tier, in a step, in an evaluation of one microbatch
    (`evaluation` alone) or while the first values are written; peak_by_kind: at that moment. flops:
    operations of products and attention in a step, what recompute adds included. below: bytes on
    each tier
    below the device, those of activations included. parameters: of the model, wherever they are.
    received: bytes that this worker has from others in a step, by what brings them.

    Of a pipeline, ranks: of its axis. Schedule, bytes and parameters are of the worker with the
    highest peak, seconds and trace of all, segments of those that have them, flops of all; below,
    for each tier, of the worker that has most there. placements: by place of the pipeline axis.
    why: what the planner chose, each with the reason in a line; () where nothing was open. more:
    what is played before some steps, as of Method; `seconds` is of a step without that.
    """

    plan: Plan
    schedule: Schedule
    static: Mapping[str, int]
    segments: tuple[tuple[str, Mapping[str, int]], ...]
    peak: int
    peak_by_kind: Mapping[str, int]
    seconds: float
    flops: float
    trace: Trace
    below: Mapping[str, int] = field(default_factory=dict)
    parameters: int = 0
    received: Mapping[str, network.Received] = field(default_factory=dict)
    ranks: tuple[RankForecast, ...] = ()
    evaluation: int = 0
    placements: tuple[Placement, ...] = field(default=(), repr=False, compare=False)
    why: tuple[tuple[str, str], ...] = ()
    more: tuple[float, str] = (0.0, "")

    @property
    def mean(self) -> float:
        """Seconds of a step on average."""
        return self.seconds * (1 + self.more[0])

    def prove(self) -> None:
        """Refuse a step or an evaluation that all workers together cannot run exactly."""
        if self.placements:
            first, *others = self.placements
            prove(train(first, others))
            prove(evaluate(first, 1, others))

    @property
    def peaks(self) -> tuple[int, ...]:
        """By place of the pipeline axis."""
        return tuple(turn.peak for turn in self.ranks) or (self.peak,)

    def below_of(self, place: int) -> Mapping[str, int]:
        """Bytes on each tier of a place of the pipeline axis."""
        return self.ranks[place].below if self.ranks else self.below


def forecast(
    plan: Plan,
    job_of: Callable[[Plan, Ledger], Job],
    batch_of: Callable[[int], object],
    hardware: Hardware,
) -> Forecast:
    """Predict a plan by rehearsing one microbatch and replaying the step."""
    costs = rehearse(plan, job_of, batch_of, apart=hardware.devices[0].apart)
    return compose(plan, costs, hardware)


def compose(plan: Plan, costs: Costs, hardware: Hardware) -> Forecast:
    """The forecast of a plan whose actions' costs are known."""
    reserved = hardware.devices[0].reserved
    places = [_Place.of(plan, costs, turn, reserved) for turn in range(plan.mesh.pipeline)]
    clocks = [Clock(place.placement, costs, hardware, place.says) for place in places]
    players = [Player(p.schedule, p.static, turn) for turn, p in enumerate(places)]
    trace = play_together(players, [clock.seconds for clock in clocks])
    ranks = tuple(one.forecast(trace, costs, hardware, i) for i, one in enumerate(places))
    most = max(range(len(ranks)), key=lambda turn: ranks[turn].peak)
    top, place = ranks[most], places[most]
    flops = sum(
        cost.work.flops()
        for place in places
        for a in place.schedule.workers[0]
        if a.part <= 0 and (cost := costs.of(a)) is not None
    )
    held = [place.held for place in places]
    return Forecast(
        plan, place.schedule, top.static, segments_of(plan, costs, held), top.peak,
        top.peak_by_kind, trace.span(), flops, trace, _most(ranks), top.parameters, top.received,
        ranks if len(ranks) > 1 else (), max(turn.evaluation for turn in ranks),
        tuple(place.placement for place in places),
    )  # fmt: skip


def _most(ranks: Sequence[RankForecast]) -> dict[str, int]:
    """By tier, the most bytes that one of them has there."""
    found: dict[str, int] = {}
    for turn in ranks:
        for tier, size in turn.below.items():
            found[tier] = max(size, found.get(tier, 0))
    return found


@dataclass(frozen=True)
class _Place:
    """One place of the pipeline axis: all there is where the plan has no pipeline. held: by
    segment, bytes by kind of the states that are there throughout; static: with what else is.
    copied: of these, what is there in a step alone. says: to others, by action."""

    placement: Placement
    schedule: Schedule
    says: Says
    held: tuple[Mapping[str, int], ...]
    static: Mapping[str, int]
    copied: int

    @staticmethod
    def of(plan: Plan, costs: Costs, turn: int, reserved: int) -> _Place:
        """reserved: bytes that the device's libraries keep. Raises OutsizeError for a schedule that
        cannot run."""
        placement = costs.facts.placement(plan, turn)
        line = placement.chunks.pipelining
        schedule = with_in_flight(annotate(placement.schedule, costs), costs, line)
        facts = costs.facts
        held, grain = held_of(placement, facts.grain), facts.grain
        static = {
            "data": costs.data,
            "window": in_grains(placement.pool, grain),
            "activations": absent(placement.chunks, grain),
            "workspace": reserved,
        }
        for kinds in held:
            for kind, count in kinds.items():
                static[kind] = static.get(kind, 0) + count
        static["optimizer"] = static.get("optimizer", 0) + (
            more := copied(placement, facts.frozen, grain)
        )
        static = {kind: count for kind, count in static.items() if count}
        prove(schedule, static=sum(static.values()))
        rank = placement.chunks.index * plan.mesh.stride("data")
        rank += turn * plan.mesh.stride("pipeline")
        says = Spoken(placement.items, rank, inside=costs.said).says(schedule)
        return _Place(placement, schedule, says, tuple(held), static, more)

    def evaluation(self, costs: Costs) -> tuple[int, dict[str, int]]:
        """What an evaluation of one microbatch will hold: the peak, and bytes by kind at it. 0
        where none was rehearsed."""
        if not costs.forward:
            return 0, {}
        mine, static = costs.evaluation, {**self._between, "data": costs.evaluated}
        schedule = annotate(self.placement.evaluation(1), mine)
        schedule = evaluating(schedule, mine, self.placement.chunks.pipelining)
        trace = play(schedule, static, lambda index, action: 0.0)
        return trace.peak(), kinds_at_peak(trace, static) if trace.peak() else {}

    @property
    def _between(self) -> Mapping[str, int]:
        """What is there between steps."""
        if not self.copied:
            return self.static
        return {**self.static, "optimizer": self.static["optimizer"] - self.copied}

    def begun(self, costs: Costs) -> dict[str, int]:
        """Bytes by kind while the first values are written, where that takes any."""
        beside = starting(self.placement, costs.facts.filling)
        kinds = {k: n for k, n in self._between.items() if k not in ("data", "activations")}
        beside = in_grains(beside, costs.facts.grain)
        kinds["workspace"] = kinds.get("workspace", 0) + beside
        return kinds if beside else {}

    def forecast(self, trace: Trace, costs: Costs, hardware: Hardware, turn: int) -> RankForecast:
        """Its part of the forecast."""
        role, count = self.schedule.role, len(self.placement.plan.stages)
        stages = range(count) if role is None else sorted(role.holds)
        plan = self.placement.plan
        received = network.received(self.schedule.workers[0], self.says, plan, hardware)
        peak = max(event.peak for event in trace.events if event.worker == turn)
        kinds = kinds_at_peak(trace, self.static, turn)
        if (first := self.begun(costs)) and sum(first.values()) > peak:
            peak, kinds = sum(first.values()), first
        evaluation, held = self.evaluation(costs)
        if evaluation > peak:
            peak, kinds = evaluation, held
        return RankForecast(
            tuple(stages), self.static, in_grains(peak, costs.facts.grain), kinds, received,
            sum(table.numel for table in self.placement.chunks.tables), self.schedule,
            below(self.placement, spilled(self.schedule, costs)), evaluation,
        )  # fmt: skip


@dataclass(frozen=True)
class Clock:
    """How long actions take on a machine."""

    placement: Placement
    costs: Costs
    hardware: Hardware
    says: Says

    def seconds(self, index: int, action: Action) -> float:
        """Of one action alone on its lane, at a place of the schedule."""
        if action.kind in (Kind.FETCH, Kind.EVICT):
            return self._moving(action)
        if action.kind is Kind.COPY:
            return copying(action, self.hardware)
        saying, beside = (self._saying(index, beside) for beside in (False, True))
        cost = self.costs.of(action)
        if cost is None or action.kind in (Kind.SEND, Kind.RECV):
            return saying
        whole = duration(cost.work, self.hardware.devices[0])
        if action.lane is Lane.HOST:
            tier = self.placement.plan.stages[action.stage].rest.optimizer
            whole *= host_share(self.hardware, tier)
        if action.kind is Kind.UPDATE:
            whole *= network.updated(self.placement.chunks, action.stage)
            whole *= 1.0 if action.part == WHOLE else self._share(action)
        if action.lane is Lane.HOST:
            whole += handed_over(action, self.placement, self.hardware)
        return network.together(whole, saying, beside)

    def _saying(self, index: int, beside: bool) -> float:
        """What is said inside an action, in its own thread or in one beside it. Of a tensor that
        is sent: what a RECV waits for from the start of its SEND, which itself waits for
        nothing."""
        said = (talk for talk in self.says[index] if (talk.channel == LAYERS[True]) == beside)
        return sum(network.seconds(talk, self.hardware) for talk in said)

    def _share(self, action: Action) -> float:
        """The part of its stage that an update of a part is."""
        pieces = self.placement.items.pieces[action.stage]
        here = pieces[action.part]
        every = sum(piece.last - piece.first for piece in pieces)
        return (here.last - here.first) / max(1, every)

    def _moving(self, action: Action) -> float:
        fetch = action.kind is Kind.FETCH
        if action.state is State.ACTIVATIONS:
            cost = self.costs.of(action)
            size = 0 if cost is None else cost.moves
            tier = self.placement.plan.stages[action.stage].rest.activations
            return size / rate(self.hardware, tier, fetch)
        total, chunks = 0.0, self.placement.chunks
        for span in self.placement.items.moved(item_of(action), fetch):
            tier = chunks.tier(span.chunk, span.what)
            size = bytes_below(chunks, span.chunk, span.what, span.first, span.last)
            total += size / rate(self.hardware, tier, fetch)
        return total


def copying(action: Action, hardware: Hardware) -> float:
    """Seconds in which the bytes of a COPY come to the device: by the link to the host, or where
    there is none within its memory."""
    links = (one.bandwidth.value for one in hardware.links if one.between == "device and host")
    speed = next(links, hardware.devices[0].bandwidth.value / 2)
    return sum(count for _, count in action.allocates) / speed


def rate(hardware: Hardware, tier: str, fetch: bool) -> float:
    """Bytes a second between a tier and the device; where it was not measured, those of a copy."""
    known = hardware.tier(tier)
    found = known.read if fetch else known.write
    return hardware.devices[0].bandwidth.value / 2 if found is None else found.value


def host_share(hardware: Hardware, tier: str) -> float:
    """How many times longer an update takes on the host than on the device, of states that rest on
    a tier of memory: both move bytes and little else, the host at the rate of that memory, or where
    it is not known at that of the link. Where the device is the host's own processor, as long."""
    device, own = hardware.devices[0], hardware.tier(tier).own
    if not device.apart:
        return 1.0
    reached = rate(hardware, tier, True) if own is None else own.value
    return max(1.0, device.bandwidth.value / reached)


def handed_over(action: Action, placement: Placement, hardware: Hardware) -> float:
    """Seconds in which the weights of a part that the host has updated come to the device, where
    that has memory of its own and they stay."""
    rest = placement.plan.stages[action.stage].rest
    if rest.parameters != DEVICE or not hardware.devices[0].apart:
        return 0.0
    piece = placement.items.pieces[action.stage][action.part]
    first, last = placement.chunks.within(piece.chunk, PARAMETERS, piece.first, piece.last)
    size = bytes_below(placement.chunks, piece.chunk, PARAMETERS, first, last)
    return size / rate(hardware, rest.optimizer, True)


def duration(work: Work, device: Device) -> float:
    """Seconds of an action's work at a device's measured rates.

    Products at the measured rate of their shape, attention at its own, everything else at the
    bandwidth of memory, and the fixed cost of every operator call: as a step of training has it,
    where that was measured. Where the host runs ahead of the device, what takes longer of its
    handing out and the device's work.
    """
    measured = device.measured
    total = work.moved / device.bandwidth.value
    each = measured.handed or measured.overhead
    call = 0.0 if each is None else each.value
    for (m, k, n, dtype), calls in work.products.items():
        total += calls * _product(device, (m, k, n), dtype, call)
    for (direction, dtype), operations in work.attention.items():
        total += operations / _attention_rate(device, direction, dtype)
    if device.apart and measured.handed is not None:
        return max(total, work.calls * call)
    return total + work.calls * call


def _product(device: Device, shape: tuple[int, int, int], dtype: str, call: float) -> float:
    """Seconds of a product beside its call, which all operators have."""
    name = _NAMES.get(dtype, dtype)
    if not device.apart and name in device.measured.laws:
        seconds, own = device.measured.product_seconds(shape, name)
        return max(0.0, seconds - min(own, call))
    if not device.apart and dtype == "float64":
        return 2 * _product(device, shape, "float32", call)
    m, k, n = shape
    return 2.0 * m * k * n / _product_rate(device, m, k, n, dtype)


def _product_rate(device: Device, m: int, k: int, n: int, dtype: str) -> float:
    name = _NAMES.get(dtype, dtype)
    if any(entry.dtype == name for entry in device.measured.matmul):
        return device.measured.matmul_rate(m, k, n, name)
    if dtype == "float64":
        return _product_rate(device, m, k, n, "float32") / 2
    return _peak(device, name)


def _attention_rate(device: Device, direction: str, dtype: str) -> float:
    name = _NAMES.get(dtype, dtype)
    for entry in device.measured.attention:
        if entry.dtype == name and entry.direction == direction:
            return entry.rate.value
    if dtype == "float64":
        return _attention_rate(device, direction, "float32") / 2
    return _peak(device, name) / 2


def _peak(device: Device, name: str) -> float:
    """The catalogue's peak; a dtype it does not list at half of the slowest it does, of 16 bits or
    fewer where there are: those of 32 are another unit's."""
    if name in device.peak:
        return device.peak[name].value
    few = [rate.value for dtype, rate in device.peak.items() if dtype != "fp32"]
    return min(few or [rate.value for rate in device.peak.values()]) / 2
