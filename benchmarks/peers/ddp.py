"""torch DistributedDataParallel: gradients in buckets, summed while the backward goes on."""

from __future__ import annotations

import torch.distributed as dist
from support.contender_parallel import Answer, Task, answer, serve
from support.llama_parallel import adamw, loss_of, model_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Worker:
    def __init__(self, task: Task, rank: int) -> None:
        dist.init_process_group("gloo")
        self.task, self.rank = task, rank
        self.model = DistributedDataParallel(model_of(task), gradient_as_bucket_view=True)
        self.optimizer = adamw(self.model, task)

    def step(self, ids_BS: Tensor) -> float:
        mine_BS = self.task.mine(ids_BS, self.rank)
        loss = loss_of(self.model(mine_BS), mine_BS)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.task.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)

    def found(self, base: int, peak: int) -> Answer:
        return answer(base, peak)


if __name__ == "__main__":
    serve(Worker)
