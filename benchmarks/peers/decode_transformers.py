"""`generate` of transformers, all prompts in one batch, in float32."""

from __future__ import annotations

import torch
from support.contender_decode import Generate, Prompts, Task, measure
from transformers import AutoModelForCausalLM


def make(task: Task) -> Generate:
    assert task.format == "float32", "as plain PyTorch has it"
    torch.set_num_threads(task.threads)
    model = AutoModelForCausalLM.from_pretrained(task.weights, dtype=torch.float32).eval()

    @torch.inference_mode()
    def generate(prompts: Prompts, count: int) -> list[list[int]]:
        ids = torch.tensor([list(one) for one in prompts])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count,
            min_new_tokens=count, pad_token_id=0,
        )  # fmt: skip
        return [one[len(ids[0]) :].tolist() for one in out]

    return generate


if __name__ == "__main__":
    measure(make)
