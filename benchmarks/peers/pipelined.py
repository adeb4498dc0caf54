"""torch.distributed.pipelining: its schedules over stages that are cut by hand.

Losses are sums over the step's targets (scale_grads=False), as on our side; outputs of the last
stage are not kept; each rank holds its stages' parameters only; AdamW is the fused one.
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from support.contender_parallel import Answer, Task, answer, serve, targets_of
from support.llama_parallel import NAMES, Layer, adamw, stored_name
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.nn import functional as F

SINGLE = ("ScheduleGPipe", "Schedule1F1B")  # a stage a rank
VEE = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")  # two a rank: down and up again


class Stage(nn.Module):
    """Segments first to last - 1: ids_BS or x_BSD -> x_BSD or logits_BSV.

    Modules have the names that they have in the whole model (support/llama_parallel.py).
    """

    def __init__(self, task: Task, first: int, last: int, sequence: int) -> None:
        super().__init__()
        config = task.config
        hidden, vocabulary = config["hidden_size"], config["vocab_size"]
        end = config["num_hidden_layers"] + 1
        with torch.device("meta"):
            self.embed = nn.Embedding(vocabulary, hidden) if first == 0 else None
            numbers = range(max(first, 1), min(last, end))
            self.layers = nn.ModuleDict({str(n - 1): Layer(config) for n in numbers})
            ends = last > end
            self.norm = nn.RMSNorm(hidden, config["rms_norm_eps"]) if ends else None
            self.head = nn.Linear(hidden, vocabulary, bias=False) if ends else None
        self.to_empty(device="cpu")
        size = config["head_dim"]
        speed_K = config["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
        place_S = torch.arange(sequence, dtype=torch.float32)
        angle_SK = torch.outer(place_S, speed_K).repeat(1, 2)
        self.register_buffer("cos_SK", angle_SK.cos())
        self.register_buffer("sin_SK", angle_SK.sin())

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x, self.cos_SK, self.sin_SK)
        if self.head is not None and self.norm is not None:
            x = self.head(self.norm(x))
        return x

    def fill(self, stored: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(stored[stored_name(name)])


def stages_of(task: Task, rank: int) -> list[int]:
    """The stages of a rank, as the schedule of this name wants them."""
    ranks, count = task.pipeline, len(task.cuts) + 1
    if task.schedule in VEE:
        return [rank, count - 1 - rank]
    return list(range(rank, count, ranks))


class Worker:
    def __init__(self, task: Task, rank: int) -> None:
        dist.init_process_group("gloo")
        steps, rows, sequence = task.steps().shape
        assert steps and rows % task.microbatches == 0, "as many rows in every microbatch"
        self.task, self.rank = task, rank
        self.targets = rows * (sequence - 1)
        spans = list(pairwise((0, *task.cuts, task.config["num_hidden_layers"] + 2)))
        self.numbers = stages_of(task, rank)
        self.stages = nn.ModuleDict(
            {str(n): Stage(task, *spans[n], sequence) for n in self.numbers}
        )
        stored = torch.load(task.state, mmap=True)
        for stage in self.stages.values():
            stage.fill(stored)
        del stored
        self.stages.train()
        self.optimizer = adamw(self.stages, task)
        self.schedule = self._schedule(len(spans))
        self.last = len(spans) - 1 in self.numbers
        takes = inspect.signature(self.schedule.step).parameters
        self.unkept = {"return_outputs": False} if "return_outputs" in takes else {}
        self.steps = 0

    def _schedule(self, count: int) -> pipelining.schedules._PipelineSchedule:
        made = [
            pipelining.PipelineStage(self.stages[str(n)], n, count, torch.device("cpu"))
            for n in self.numbers
        ]
        kind = getattr(pipelining.schedules, self.task.schedule)
        what = made[0] if self.task.schedule in SINGLE else made
        return kind(what, self.task.microbatches, loss_fn=self._loss, scale_grads=False)

    def _loss(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        flat = logits_BSV.flatten(0, 1), targets_BS.flatten()
        return F.cross_entropy(*flat, reduction="sum") / self.targets

    def step(self, ids_BS: Tensor) -> float:
        losses: list[Tensor] = []
        given = (ids_BS,) if 0 in self.numbers else ()
        target = targets_of(ids_BS) if self.last else None
        self.schedule.step(*given, target=target, losses=losses, **self.unkept)
        whole = self._sum(sum(losses)) if self.last else self._sum(torch.zeros(()))
        gradients = [p.grad for p in self.stages.parameters()]
        norm = self._sum(nn.utils.get_total_norm(gradients).square()).sqrt()
        nn.utils.clip_grads_with_norm_(self.stages.parameters(), self.task.clip, norm)
        if not self.steps and self.task.gradients:
            self._leave()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return float(whole)

    def _sum(self, number: Tensor | int) -> Tensor:
        """Over all ranks."""
        total = torch.as_tensor(number).detach().clone().float()
        dist.all_reduce(total)
        return total

    def _leave(self) -> None:
        """The gradients, clipped, by their names in the files."""
        found = {
            stored_name(name): parameter.grad
            for stage in self.stages.values()
            for name, parameter in stage.named_parameters()
        }
        torch.save(found, Path(self.task.gradients, f"theirs-{self.rank}.pt"))

    def found(self, base: int, peak: int) -> Answer:
        return answer(base, peak)


assert "embed" in NAMES, "stored_name knows the names of Stage"

if __name__ == "__main__":
    serve(Worker)
