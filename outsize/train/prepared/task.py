"""Task: training and predictions in three functions, on any mesh.

Tan et al., "Redco: A Lightweight Tool to Automate Distributed Training of LLMs on Any GPU/TPUs",
2023: how examples become a batch, what loss an output has and what is predicted of it are all that
one job says and another does not. Which worker takes which examples, microbatches, where the output
is on a pipeline, and who hands predictions to whom follow from the mesh.

task = outsize.Task(collate, loss, predict)
job = outsize.prepare(model, "adamw", loss=task.loss, count=task.count, mesh="data=2,tensor=2")
losses = task.fit(job, examples, rows=8, epochs=2)
predictions = task.predict(job, examples)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from outsize.collectives import Collective, World, everyone
from outsize.collectives.channel import HEADER, form_of, forms_in, header_of
from outsize.errors import OutsizeError
from outsize.train.prepared.batches import rows_in
from outsize.train.prepared.job import Prepared
from outsize.train.prepared.loss_sums import has_values

Collate = Callable[[Sequence[Any]], Any]


class Task:
    """collate: a list of examples -> a batch, whose tensors have a row for each of them. loss:
    (output, batch) -> the sum of losses of its examples. predict: (output, batch) -> a tensor with
    a row for each. count: of a batch, what the sum is divided by; None: its examples."""

    def __init__(
        self,
        collate: Collate,
        loss: Callable[[Any, Any], Tensor],
        predict: Callable[[Any, Any], Tensor],
        count: Callable[[Any], float] | None = None,
    ) -> None:
        self.collate, self.count = collate, count or _examples
        self._loss, self._predict = loss, predict
        self._found: list[Tensor] | None = None  # predictions, while they are asked for

    def loss(self, output: Any, batch: Any) -> Tensor:
        """What `prepare` takes as loss."""
        if self._found is None or not has_values(output):
            return self._loss(output, batch)
        made, rows = self._predict(output, batch), rows_in(batch)
        if not isinstance(made, Tensor) or made.ndim == 0 or len(made) != rows:
            said = tuple(made.shape) if isinstance(made, Tensor) else f"a {type(made).__name__}"
            raise OutsizeError(
                f"predict gives {said} for {rows} examples; expected a tensor with a row for each"
            )
        self._found.append(made.detach().clone())
        return torch.zeros((), device=made.device)

    def fit(
        self,
        job: Prepared,
        examples: Sequence[Any],
        rows: int,
        epochs: int = 1,
        seed: int = 0,
        lr: float | None = None,
    ) -> list[float]:
        """Train on all examples, in another order in every epoch; gives the mean loss of each step.
        Every worker has all examples and takes its own of each step. rows: examples of a step, of
        all workers; those that are left at the end of an epoch are not used in it."""
        mesh, place = _meet(job)
        if rows < 1 or rows % mesh.rows or rows > len(examples):
            raise OutsizeError(
                f"rows is {rows}, expected a multiple of {mesh.rows}, which share a step's"
                f" examples, up to the {len(examples)} that there are"
            )
        own, losses = rows // mesh.rows, list[float]()
        for epoch in range(epochs):
            draws = torch.Generator().manual_seed(seed + epoch)
            order = torch.randperm(len(examples), generator=draws).tolist()
            for first in range(place * own, len(order) - rows + place * own + 1, rows):
                mine = [examples[i] for i in order[first : first + own]]
                losses.append(float(job.step(self.collate(mine), lr)))
        return losses

    def predict(self, job: Prepared, examples: Sequence[Any]) -> list[Tensor]:
        """What is predicted of each example, on every worker; after a first step. Modules are in
        evaluation meanwhile. As many examples go through at once as a microbatch has on every
        worker."""
        mesh, place = _meet(job)
        own, training = job.plan.microbatch_rows, job.model.training
        rows, found = own * mesh.rows, list[Tensor]()
        job.model.eval()
        try:
            for first in range(0, len(examples), rows):
                here = examples[first : first + rows]
                # Every worker has as many: what is missing at the end is the last one again.
                mine = [here[min(i, len(here) - 1)] for i in range(place * own, place * own + own)]
                made = _gathered(self._asked(job, mine), job)
                found += list(torch.cat(made)[: len(here)])
        finally:
            job.model.train(training)
        return found

    def _asked(self, job: Prepared, examples: Sequence[Any]) -> Tensor | None:
        """Predictions of a microbatch; None on workers of a pipeline that have no output."""
        self._found = []
        try:
            job.evaluate(self.collate(examples))
            return self._found[0] if self._found else None
        finally:
            self._found = None


def _examples(batch: Any) -> float:
    return float(rows_in(batch))


def _meet(job: Prepared) -> tuple[Any, int]:
    """The mesh, and which part of the rows this worker takes."""
    job.preparing.join()
    world = job.preparing.world
    return world.mesh, world.mesh.rows_index(world.rank)


def _gathered(made: Tensor | None, job: Prepared) -> list[Tensor]:
    """What workers with different rows have, in order of the rows; of those with the same rows the
    first that has anything says it."""
    world: World = job.preparing.world
    if world.mesh.size == 1:
        assert made is not None
        return [made]
    group, device = everyone(world), job.preparing.device
    has = torch.zeros(world.mesh.size, dtype=torch.float64, device=device)
    has[world.rank] = made is not None
    having = [rank for rank, one in enumerate(group.all_reduce(has).tolist()) if one]
    sources = {world.mesh.rows_index(rank): rank for rank in reversed(having)}
    return [_told(made, group, sources[place], device) for place in range(world.mesh.rows)]


def _told(made: Tensor | None, group: Collective, source: int, device: torch.device) -> Tensor:
    """One worker's tensor."""
    header = torch.empty(HEADER, dtype=torch.int64, device=device)
    mine = made if group.rank == source else None
    if mine is not None:
        header = header_of([form_of(mine)]).to(device)
    (form,) = forms_in(group.broadcast(header, source))
    return group.broadcast(form.empty(device) if mine is None else mine.contiguous(), source)
