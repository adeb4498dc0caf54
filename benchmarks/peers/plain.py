"""A plain PyTorch loop over the transformers model, uncompiled or under torch.compile.

fp32 weights; bf16 by autocast, which is the field's habit. Fused AdamW, matrices decayed and
vectors not, gradients clipped. The optimizer and the loop are never compiled.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers.models.llama.modeling_llama  # noqa: F401  transformers imports it when used
from support.contender import Clock, Result, Task, baseline, finish, labels_of, peak, start
from torch import Tensor, nn
from transformers import AutoModelForCausalLM


def optimizer_of(model: nn.Module, task: Task) -> torch.optim.AdamW:
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": task.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=task.lr, betas=task.betas, eps=task.eps, fused=True)


def step(model: Any, optimizer: torch.optim.Optimizer, ids_BS: Tensor, task: Task) -> float:
    """One step, in microbatches if the task wants them; gives its mean loss."""
    total, parts = 0.0, ids_BS.split(task.microbatch_rows)
    for part_BS in parts:
        with torch.autocast("cpu", torch.bfloat16, enabled=task.precision == "bf16"):
            loss = model(input_ids=part_BS, labels=labels_of(part_BS), use_cache=False).loss
        loss = loss * (part_BS.shape[0] / ids_BS.shape[0]) if len(parts) > 1 else loss
        loss.backward()
        total += float(loss)
    nn.utils.clip_grad_norm_(model.parameters(), task.clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


def main() -> None:
    task, path = start()
    steps, base = task.steps(), baseline()
    model = AutoModelForCausalLM.from_pretrained(task.weights, dtype=torch.float32).train()
    optimizer = optimizer_of(model, task)
    run = torch.compile(model) if task.compiled else model
    losses, clock = [], Clock()
    for ids_BS in steps:
        losses.append(step(run, optimizer, ids_BS, task))
        clock.step()
    finish(Result(clock.seconds, losses, peak(), base), path)


if __name__ == "__main__":
    main()
