"""DeepSpeed ZeRO-3 with parameters and optimizer states on disk, one process on the CPU."""

from __future__ import annotations

import os
import time

import deepspeed
import torch
from peers.mapped import mapped
from support.contest import Answer, Task, finish, start
from transformers import AutoConfig, AutoModelForCausalLM

SOLE = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29611", "DS_ACCELERATOR": "cpu",
}  # fmt: skip
SUBGROUP = 50_000_000  # elements: its default of 1e9 would hold every state at once


def settings(task: Task) -> dict[str, object]:
    below = {"device": "nvme", "nvme_path": task.folder, "pin_memory": False}
    return {
        "train_micro_batch_size_per_gpu": task.rows,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": task.lr, "weight_decay": 0.0}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": SUBGROUP,
            "offload_optimizer": below,
            "offload_param": {**below, "buffer_size": 100_000_000, "buffer_count": 5},
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 8, "thread_count": 2},
    }


def main() -> None:
    task, path = start()
    os.environ.update(SOLE)
    deepspeed.init_distributed("gloo")
    config = AutoConfig.from_pretrained(task.weights)
    with deepspeed.zero.Init(config_dict_or_path=settings(task)):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    values = dict(mapped(task.weights))
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
            parameter.data.copy_(values[name])
    model.gradient_checkpointing_enable()
    engine, *_ = deepspeed.initialize(model=model, config=settings(task))
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
