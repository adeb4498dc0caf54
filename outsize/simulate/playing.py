"""Forecasts of jobs that are played whole, on fake tensors: those whose steps a technique makes.

Every action of a step is played once under the ledger, which gives its bytes, and under a counter,
which gives its work; rates of the machine make seconds of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch

from outsize.collectives.channel import LIMIT, Form, MessageKey
from outsize.data import Batch
from outsize.hardware import Hardware
from outsize.kernels.product import elsewhere
from outsize.memory import Ledger
from outsize.plan import Plan
from outsize.runtime.engine import Engine, Loaded
from outsize.runtime.job import Job
from outsize.schedule import Action, Kind, Lane, Schedule, State
from outsize.schedule.program import Says
from outsize.schedule.residency import moved
from outsize.schedule.starting import Filling, starting
from outsize.schedule.talk import Said, Spoken
from outsize.simulate import network
from outsize.simulate.costs import ActionCost
from outsize.simulate.fake import FakeMode
from outsize.simulate.forecast import (
    Forecast,
    RankForecast,
    copying,
    duration,
    handed_over,
    host_share,
    rate,
)
from outsize.simulate.rehearse import cost_of, heard, since
from outsize.simulate.replay import Player, filled, kinds_at_peak, play_together
from outsize.simulate.state_bytes import below, held_of
from outsize.trace.trace import Trace

Named = tuple[tuple[str, Mapping[str, int]], ...]
Makers = tuple[Callable[[Plan, Ledger], Job], Callable[[int], object]]


class MakersOf(Protocol):
    """How the job of a place of the pipeline axis is made, and a batch."""

    def __call__(self, *, turn: int) -> Makers: ...


def predicted(
    plan: Plan,
    makers: MakersOf,
    hardware: Hardware,
    filling: Filling,
    ledger_of: Callable[[], Ledger],
) -> Forecast:
    """What a plan will hold and take. makers: of a place of the pipeline axis, called in a fake
    mode, how its job is made, and a batch; ledger_of: makes what counts them."""
    workers, forms = list[_Worker](), dict[MessageKey, tuple[Form, ...]]()
    reserved = hardware.devices[0].reserved
    for turn in range(plan.mesh.pipeline):
        with elsewhere(hardware.devices[0].apart):
            made = _played(plan, makers(turn=turn), ledger_of(), forms)
        workers.append(made.having(reserved) if reserved else made)
    players, clocks = list[Player](), list[Callable[[int, Action], float]]()
    for turn, worker in enumerate(workers):
        players.append(Player(worker.schedule, worker.static, turn))
        clocks.append(worker.clock(hardware))
    trace = play_together(players, clocks)
    ranks = [w.forecast(trace, i, hardware, filling) for i, w in enumerate(workers)]
    most = max(range(len(ranks)), key=lambda turn: ranks[turn].peak)
    top, count = ranks[most], sum(c.work.flops() for w in workers for c in w.costs if c)
    found = {name: kinds for w in reversed(workers) for name, kinds in w.segments}
    names = [name for name, _ in workers[0].job.flow.segments]
    return Forecast(
        plan, top.schedule, top.static, tuple((n, found[n]) for n in names if n in found), top.peak,
        top.peak_by_kind, trace.span(), count, trace, top.below, top.parameters, top.received,
        tuple(ranks) if len(ranks) > 1 else (), max(one.evaluation for one in ranks),
        more=workers[0].job.method.more,
    )  # fmt: skip


def _played(
    plan: Plan, makers: Makers, ledger: Ledger, forms: dict[MessageKey, tuple[Form, ...]]
) -> _Worker:
    """One worker's step and evaluation. forms: of what workers before it send, to which its own are
    added."""
    job_of, batch_of = makers
    with FakeMode():
        job = job_of(plan, ledger)
        if job.stage_links is not None:
            job.stage_links.told(forms)
        job.ready(batch_of(plan.own_rows), 1.0)
        static = {kind: count for kind, count in ledger.live.items() if count}
        costs = _costs(job, ledger)
        batch, size = batch_of(plan.microbatch_size), plan.microbatch_size
        assert isinstance(batch, Batch), "groups are of native decoders"
        with torch.no_grad():
            job.method.microbatches.ready(replace(batch, noise=None), [(0, size)], 1.0)
            evaluation = highest(job.engine, job.playable(job.placement.evaluation(1)), ledger)
        if job.stage_links is not None:  # of what is sent some may be under way
            sent = sum(form.nbytes for one in job.stage_links.forms.values() for form in one)
            static["activations"] = static.get("activations", 0) + LIMIT * sent
            forms |= job.stage_links.forms
            job.stage_links.close()
    actions = (filled(s.action, cost) for s, cost in zip(job.loaded.steps, costs, strict=True))
    schedule = replace(job.loaded.schedule, workers=(tuple(actions),))
    return _Worker(job, static, costs, schedule, evaluation, ledger.grain)


@dataclass(frozen=True)
class _Worker:
    """One place of the pipeline axis: all there is where the plan has no pipeline."""

    job: Job
    static: Mapping[str, int]
    costs: Sequence[ActionCost | None]
    schedule: Schedule
    evaluation: int
    grain: int

    def having(self, reserved: int) -> _Worker:
        """On a device whose libraries keep so many bytes."""
        static = {**self.static, "workspace": self.static.get("workspace", 0) + reserved}
        return replace(self, static=static, evaluation=self.evaluation + reserved)

    @cached_property
    def says(self) -> Says:
        """What its actions say to others."""
        pairs = zip(self.schedule.workers[0], self.costs, strict=True)
        said = {moved_by(action): cost.said for action, cost in pairs if cost is not None}
        voice = Spoken(
            self.job.placement.items, self.job.world.rank,
            self.schedule.first == self.schedule.stages,
            lambda action: said.get(moved_by(action), ()),
        )  # fmt: skip
        return voice.says(self.schedule)

    @property
    def segments(self) -> Named:
        return segments_of(self.job, self.schedule, self.grain)

    def clock(self, hardware: Hardware) -> Callable[[int, Action], float]:
        """How long each of its actions takes."""

        def seconds(index: int, action: Action) -> float:
            talks = sum(network.seconds(talk, hardware) for talk in self.says[index])
            return talks + seconds_of(self.job, hardware, action, self.costs[index])

        return seconds

    def forecast(
        self, trace: Trace, turn: int, hardware: Hardware, filling: Filling
    ) -> RankForecast:
        """Its part of the forecast."""
        placement = self.job.placement
        peak = max(event.peak for event in trace.events if event.worker == turn)
        kinds = kinds_at_peak(trace, self.static, turn)
        begun = {k: n for k, n in self.static.items() if k != "data"}
        begun["workspace"] = hardware.devices[0].reserved + starting(placement, filling)
        if sum(begun.values()) > peak:
            peak, kinds = sum(begun.values()), begun
        role, stages = self.schedule.role, range(self.schedule.stages)
        return RankForecast(
            tuple(stages if role is None else sorted(role.holds)), self.static,
            max(peak, self.evaluation), kinds,
            network.received(self.schedule.workers[0], self.says, self.job.plan, hardware),
            sum(table.numel for table in placement.chunks.tables), self.schedule,
            below(placement, {}), self.evaluation,
        )  # fmt: skip


def moved_by(action: Action) -> tuple[Kind, State, int, int]:
    """What an action of a list is known by, whatever it has been found to cost."""
    return action.kind, action.state, action.stage, action.microbatch


def _costs(job: Job, ledger: Ledger) -> list[ActionCost | None]:
    """What the actions of a step cost, one after the other. None: no bytes, and a number that does
    not exist."""
    made, engine = list[ActionCost | None](), job.engine
    with ledger:
        engine.begin(job.loaded)
        for step in job.loaded.steps:
            before, cost = heard(job), None
            if step.action.kind is not Kind.NORM:
                cost = cost_of(engine, step, ledger)
                cost = replace(cost, said=(*since(before, heard(job)), *_passed(job, step.action)))
            made.append(cost)
    return made


def _passed(job: Job, action: Action) -> Iterator[Said]:
    """What goes to or comes from another worker of a pipeline."""
    if action.kind in (Kind.SEND, Kind.RECV) and job.stage_links is not None:
        yield Said("pipeline", action.kind.lower(), job.stage_links.size(action))


def seconds_of(job: Job, hardware: Hardware, action: Action, cost: ActionCost | None) -> float:
    """What an action takes: of what moves its bytes, of what computes its work and what its method
    has beside that."""
    if cost is None:
        return 0.0
    if action.kind is Kind.COPY:
        return copying(action, hardware)
    placement, rest = job.placement, job.plan.stages[action.stage].rest
    if action.lane is Lane.HOST:
        longer = host_share(hardware, rest.optimizer)
        work = duration(cost.work, hardware.devices[0]) * longer
        return work + handed_over(action, placement, hardware)
    if action.lane is not Lane.COMPUTE:
        if action.kind not in (Kind.FETCH, Kind.EVICT):
            return 0.0
        fetch = action.kind is Kind.FETCH
        if action.state is State.ACTIVATIONS:
            return cost.moves / rate(hardware, rest.activations, fetch)
        return sum(
            span.bytes / rate(hardware, placement.chunks.tier(span.chunk, span.what), fetch)
            for span in placement.items.moved(moved(action), fetch)
        )
    return duration(cost.work, hardware.devices[0]) + job.method.seconds(action)


def highest(engine: Engine, program: Loaded, ledger: Ledger) -> int:
    """The peak of a list, in bytes."""
    with ledger:
        engine.begin(program)
        return max(engine.alone(step).peak for step in program.steps)


def segments_of(job: Job, schedule: Schedule, grain: int = 1) -> Named:
    """By segment its static bytes, what a microbatch keeps of it and its costliest workspace."""
    made = held_of(job.placement, grain)
    for action in schedule.workers[0]:
        if action.lane is not Lane.COMPUTE or action.kind is Kind.NORM:
            continue
        here = made[job.plan.stages[action.stage].first]
        kept = dict(action.allocates).get("device/activations", 0)
        if action.kind.way == "forward" and action.microbatch == 0 and kept > 0:
            here["activations"] = here.get("activations", 0) + kept
        here["workspace"] = max(here.get("workspace", 0), action.workspace)
    names = [name for name, _ in job.flow.segments]
    return tuple(pair for pair in zip(names, made, strict=True) if any(pair[1].values()))
