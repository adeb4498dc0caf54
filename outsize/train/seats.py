"""Ranks of a run on the machines that its plan puts them on.

A plan of machines whose links differ says in which order the machines have the ranks
(outsize/foresight/planning/placement.py). Whoever starts the workers numbers them machine by
machine, as torchrun does; here each gets the rank that the plan has for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from outsize.collectives.joined import number, served
from outsize.errors import OutsizeError, counted
from outsize.plan.file import read_plan
from outsize.train.planned import KEY
from outsize.train.resolve import Resolved, recorded_values


def seated(
    environment: Mapping[str, str], said: Callable[[], Resolved], directory: Path | None
) -> dict[str, str]:
    """The environment of a worker that was started, with its rank in the plan. directory: of a run
    that goes on. OutsizeError for a plan of other machines."""
    try:
        values = said() if directory is None else recorded_values(directory)
        path = values.get(KEY)
        machines = () if path is None else read_plan(Path(path)).machines
    except OutsizeError:  # which the worker itself says, once for all
        machines = ()
    return moved(environment, machines) if machines else dict(environment)


def moved(environment: Mapping[str, str], machines: Sequence[int]) -> dict[str, str]:
    """RANK as these machines, by the number of their start, have the ranks in turn."""
    rank, size = number(environment, "RANK"), number(environment, "WORLD_SIZE")
    near = number(environment, "LOCAL_WORLD_SIZE", 1)
    if near * len(machines) != size:
        raise OutsizeError(
            f"the plan is for {counted(len(machines), 'machine')}, and {counted(size, 'worker')} of"
            f" {near} a machine were started; expected as many on each, or another plan"
        )
    if machines[0] != 0 and not served(environment):
        raise OutsizeError(
            f"the plan has rank 0 on machine {machines[0]}, and machine 0 serves the meeting point;"
            " start the workers with torchrun, whose agent serves it"
        )
    place = list(machines).index(rank // near)
    return {**environment, "RANK": str(place * near + rank % near)}
