"""DeepSpeed ZeRO-3 with parameters and optimizer states on disk, one process on the CPU."""

from __future__ import annotations

import os
import time
from pathlib import Path

import deepspeed
import torch
from peers.mapped import mapped
from support.contest import Answer, Task, finish, start
from transformers import AutoConfig, AutoModelForCausalLM

SOLE = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29611", "DS_ACCELERATOR": "cpu",
}  # fmt: skip
SUBGROUP = 1  # elements: it then updates tensor by tensor; its default holds every state at once


def settings(task: Task, largest: int) -> dict[str, object]:
    """What holds least: nothing kept in memory, buffers no larger than the largest tensor (of
    `largest` elements) and no more of them than it runs with, gradients reduced one by one."""
    below = {"device": "nvme", "nvme_path": task.folder, "pin_memory": False}
    return {
        "train_micro_batch_size_per_gpu": task.rows,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": task.lr, "weight_decay": 0.0}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": SUBGROUP,
            "reduce_bucket_size": largest,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "overlap_comm": False,
            "offload_optimizer": {**below, "buffer_count": 4},
            "offload_param": {**below, "max_in_cpu": 0, "buffer_size": largest, "buffer_count": 2},
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 8, "thread_count": 2},
    }


def fill(model: torch.nn.Module, folder: str) -> None:
    """The weights of the files, which then leave the page cache: it is not to count for them."""
    parameters = dict(model.named_parameters())
    for name, value in mapped(folder):
        with deepspeed.zero.GatheredParameters(parameters[name], modifier_rank=0):
            parameters[name].data.copy_(value)
    del value
    for path in Path(folder).iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    task, path = start()
    os.environ.update(SOLE)
    deepspeed.init_distributed("gloo")
    config = AutoConfig.from_pretrained(task.weights)
    told = settings(task, config.vocab_size * config.hidden_size)
    with deepspeed.zero.Init(config_dict_or_path=told):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fill(model, task.weights)
    model.gradient_checkpointing_enable()
    engine, *_ = deepspeed.initialize(model=model, config=told)
    seconds, losses = [], []
    for step in range(task.steps):
        begin = time.perf_counter()
        ids = task.ids(step, config.vocab_size)
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
        seconds.append(time.perf_counter() - begin)
    finish(Answer(seconds, losses), path)


if __name__ == "__main__":
    main()
