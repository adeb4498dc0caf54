"""DeepSpeed ZeRO-3 with parameters and optimizer states in host memory, in an environment of its
own: python -m support.gpu.zero_offload ANSWER CONFIG ROWS SEQUENCE STEPS (CONFIG: JSON)."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import deepspeed
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

SOLE = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29611",
}  # fmt: skip


def main() -> None:
    answer, (rows, sequence, steps) = Path(sys.argv[1]), map(int, sys.argv[3:])
    os.environ.update(SOLE)
    below = {"device": "cpu", "pin_memory": True}
    told = {
        "train_micro_batch_size_per_gpu": rows,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}},
        "zero_optimization": {"stage": 3, "offload_optimizer": below, "offload_param": below},
    }
    config = LlamaConfig(**json.loads(sys.argv[2]))
    deepspeed.init_distributed()
    with deepspeed.zero.Init(config_dict_or_path=told):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable()
    engine, *_ = deepspeed.initialize(model=model, config=told)
    seconds, losses = [], []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, config.vocab_size, (rows, sequence), generator=generator)
        ids = ids.to(engine.device)
        begin = time.perf_counter()
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
        torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - begin)
    found = {
        "every second": seconds,
        "losses": losses,
        "peak": torch.accelerator.max_memory_allocated(),
    }
    answer.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
