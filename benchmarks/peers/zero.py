"""DeepSpeed ZeRO, stages 1 to 3, over PyTorch's gloo."""

from __future__ import annotations

import os

import deepspeed
from support.contender_parallel import Answer, Task, answer, serve
from support.llama_parallel import adamw, loss_of, model_of
from torch import Tensor


def stage_of(shards: tuple[int, int, int]) -> int:
    """The ZeRO stage that has these degrees."""
    return sum(degree > 1 for degree in shards)


class Worker:
    def __init__(self, task: Task, rank: int) -> None:
        os.environ["LOCAL_RANK"] = str(rank)
        deepspeed.init_distributed("gloo")
        self.task, self.rank = task, rank
        model = model_of(task)
        rows = task.steps().shape[1] // task.data
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=adamw(model, task),
            config={
                "train_micro_batch_size_per_gpu": rows,
                "gradient_accumulation_steps": 1,
                "gradient_clipping": task.clip,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": stage_of(task.shards)},
            },
        )

    def step(self, ids_BS: Tensor) -> float:
        mine_BS = self.task.mine(ids_BS, self.rank)
        loss = loss_of(self.engine(mine_BS), mine_BS)
        self.engine.backward(loss)
        self.engine.step()
        return float(loss)

    def found(self, base: int, peak: int) -> Answer:
        return answer(base, peak)


if __name__ == "__main__":
    serve(Worker)
