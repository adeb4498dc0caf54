"""What happens beside the actions of a schedule, by their places: read off the list beforehand."""

from __future__ import annotations

from collections import defaultdict

from outsize.runtime.placement import Placement
from outsize.schedule import Kind, Schedule, State
from outsize.schedule.residency import Presence, Residency

_ADD = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


class Turns:
    """anew: stages whose gradients in the pool begin, by the place of the action that adds first.
    complete: stages whose gradients have all been added and will leave, by the last that adds.
    at_norm: stages whose gradients stay until NORM. outdated: places of the updates that change
    parameters which the pool holds still. spilled: (stage, microbatch) whose activations leave."""

    def __init__(self, schedule: Schedule, placement: Placement) -> None:
        actions = schedule.workers[0]
        residency = schedule.residency or Residency(placement.residency.uses)
        self.spilled = {
            (a.stage, a.microbatch)
            for a in actions
            if a.kind is Kind.FETCH and a.state is State.ACTIVATIONS
        }
        self.anew: dict[int, list[int]] = defaultdict(list)
        self.outdated: set[int] = set()
        presence = Presence(residency, schedule.stages - 1, schedule.first)
        last: dict[int, int] = {}
        for index, action in enumerate(actions):
            if presence.outdated(action):
                self.outdated.add(index)
            for name in presence.step(action):
                if name.startswith(State.GRADIENTS):
                    self.anew[index].append(int(name.split()[1]))
            adds = action.kind in _ADD or (
                action.kind is Kind.FORWARD and action.stage == schedule.stages - 1
            )
            if adds:
                last |= dict.fromkeys(residency.uses[action.stage], index)
        behind = placement.plan.update == "behind"
        self.complete: dict[int, list[int]] = defaultdict(list)
        for stage, index in last.items():
            if behind or stage in residency.gradients:
                self.complete[index].append(stage)
        gone = {stage for stages in self.complete.values() for stage in stages}
        self.at_norm = tuple(s for s in range(schedule.stages) if s not in gone)
