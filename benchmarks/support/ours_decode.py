"""`outsize.engine` on the task of benchmarks/decode_cpu.py."""

from __future__ import annotations

import torch
from support.contender_decode import Generate, Prompts, Task, measure

import outsize


def make(task: Task) -> Generate:
    torch.set_num_threads(task.threads)
    name = f"{task.format}:32+head" + ("+a8" if task.eights else "")
    coded = {} if task.format == "float32" else {"weights": name}
    context = max(map(len, task.prompts)) + task.new
    engine = outsize.engine(task.weights, context=context, requests=len(task.prompts), **coded)
    engine.__enter__()

    def generate(prompts: Prompts, count: int) -> list[list[int]]:
        return engine.generate([list(ids) for ids in prompts], max_tokens=count)  # type: ignore[return-value]

    return generate


if __name__ == "__main__":
    measure(make)
