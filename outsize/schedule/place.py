"""Placement: which worker plays which stage, for which microbatches.

A stage may live on several workers: a bidirectional pipeline holds every stage twice and sends each
microbatch along one of two routes. A route names the worker of each stage.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """routes[r][s] is the worker of stage s on route r; route[m] is the route of microbatch m.

    share: a stage's part of the layers whose time and activations count as one unit.
    """

    workers: int
    routes: tuple[tuple[int, ...], ...]
    route: tuple[int, ...]
    share: float = 1.0

    @property
    def stages(self) -> int:
        """How many stages the model is cut into."""
        return len(self.routes[0])

    @property
    def microbatches(self) -> int:
        """How many microbatches a step has."""
        return len(self.route)

    def worker(self, stage: int, microbatch: int) -> int:
        """Who plays this stage for this microbatch."""
        return self.routes[self.route[microbatch]][stage]

    def holders(self, stage: int) -> tuple[int, ...]:
        """Every worker that holds the stage, in order."""
        return tuple(sorted({route[stage] for route in self.routes}))


def looped(workers: int, chunks: int) -> tuple[int, ...]:
    """The route 0 1 2 0 1 2: stage after stage round the workers, `chunks` times."""
    return tuple(range(workers)) * chunks


def waved(workers: int, chunks: int) -> tuple[int, ...]:
    """The route 0 1 2 2 1 0: down the workers and up again, `chunks` passes in all."""
    down = tuple(range(workers))
    return tuple(w for chunk in range(chunks) for w in (down[::-1] if chunk % 2 else down))


def one_way(workers: int, route: tuple[int, ...], microbatches: int) -> Placement:
    """Every microbatch along one route; the stages of a worker together are one unit."""
    return Placement(workers, (route,), (0,) * microbatches, workers / len(route))


def two_way(workers: int, down: tuple[int, ...], microbatches: int) -> Placement:
    """The first half of the microbatches along `down`, the rest along its mirror image."""
    up = tuple(workers - 1 - w for w in down)
    half = (microbatches + 1) // 2
    route = (0,) * half + (1,) * (microbatches - half)
    return Placement(workers, (down, up), route, workers / len(down))
