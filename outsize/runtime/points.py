"""What happens beside the actions of a schedule, by their places: read off the list beforehand."""

from __future__ import annotations

from collections import defaultdict

from outsize.runtime.flow import Way
from outsize.schedule import Kind, Schedule, State
from outsize.schedule.item import Item
from outsize.schedule.passes.shard import adds
from outsize.schedule.residency import Presence, Residency
from outsize.schedule.role import Role

_NOTHING = frozenset[int]()
_LATER = (Kind.SAMPLE, Kind.SEND)  # what a walk stays for, behind its stages


class Points:
    """uses: by stage, those whose parameters it computes with. behind: stages are updated before
    NORM. start: what the list expects to find in the pool. evaluates: nothing is updated.

    anew: stages whose gradients in the pool begin, by the place of the action that adds first.
    complete: stages whose gradients have all been added and will leave, by the last that adds.
    at_update: stages whose sums are known just before their update; at_reduce: those whose sums
    leave with the last REDUCE. outdated: places of the updates that change parameters which the
    pool holds still. sums: places of the REDUCEs that are the last of their stage. spilled: (stage,
    microbatch) whose activations leave. ends: microbatches whose walk has no more to do, by the
    place of the last action that needs it: none where the losses of
    an evaluation come later, from all workers."""

    def __init__(
        self, schedule: Schedule, uses: tuple[tuple[int, ...], ...], behind: bool = False
    ) -> None:
        actions = schedule.workers[0]
        self.schedule = schedule
        self.start = frozenset[Item]() if schedule.residency is None else schedule.residency.start
        self.evaluates = not any(a.kind in (Kind.NORM, Kind.UPDATE) for a in actions)
        residency = schedule.residency or Residency(uses)
        self.spilled = {
            (a.stage, a.microbatch)
            for a in actions
            if a.kind is Kind.FETCH and a.state is State.ACTIVATIONS
        }
        self.anew: dict[int, list[int]] = defaultdict(list)
        self.outdated: set[int] = set()
        presence = Presence(residency, schedule.first)
        last: dict[int, int] = {}
        reduced: dict[int, int] = {}
        for index, action in enumerate(actions):
            if presence.outdated(action):
                self.outdated.add(index)
            for name in presence.step(action):
                if name.state is State.GRADIENTS:
                    self.anew[index].append(name.stage)
            if action.kind is Kind.REDUCE:
                reduced[action.stage] = index
            if adds(action, schedule.first):
                last |= dict.fromkeys(residency.uses[action.stage], index)
        walked = {
            a.microbatch: index
            for index, a in enumerate(actions)
            if a.kind.way or a.kind.end or a.kind in _LATER
        }
        samples = any(a.kind is Kind.SAMPLE for a in actions)  # behind everything else
        later = self.evaluates and schedule.ends is not None and not samples
        self.ends = {} if later else {index: microbatch for microbatch, index in walked.items()}
        self._held = None if schedule.role is None else _held(schedule.role)
        self.behind = behind
        self.complete: dict[int, list[int]] = defaultdict(list)
        for stage, index in last.items():
            if stage not in residency.summed and (behind or stage in residency.gradients):
                self.complete[index].append(stage)
        self.sums = frozenset(reduced.values())
        self.at_reduce = frozenset(s for one, s in residency.shares if one is State.GRADIENTS)
        self.at_update = residency.summed - self.at_reduce if behind else frozenset[int]()
        gone = {stage for stages in self.complete.values() for stage in stages}
        gone |= self.at_update | self.at_reduce
        self._at_norm = tuple(s for s in range(schedule.stages) if s not in gone)

    @property
    def forward(self) -> bool:
        """Nothing goes back."""
        return self.schedule.first == self.schedule.stages

    def at_norm(self, stage: int) -> tuple[int, ...]:
        """Of a NORM, the stages whose gradients stay until then, or are summed over workers."""
        return tuple(s for s in self._at_norm if self.schedule.norm(s) == stage)

    def held(self, microbatch: int) -> frozenset[int] | None:
        """The stages of a microbatch that this worker computes; None: all."""
        return None if self._held is None else self._held.get(microbatch, _NOTHING)

    def way(self, microbatch: int) -> Way:
        """The first and the last stage of a microbatch."""
        return Way(microbatch, self.schedule.begin(microbatch), self.schedule.end(microbatch))


def _held(role: Role) -> dict[int, frozenset[int]]:
    found: dict[int, set[int]] = defaultdict(set)
    for stage, microbatch in role.plays:
        found[microbatch].add(stage)
    return {microbatch: frozenset(stages) for microbatch, stages in found.items()}
