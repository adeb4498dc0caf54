"""Hugging Face Accelerate by itself: layers in memory as far as they may be, others on disk."""

from __future__ import annotations

import time

import torch
from support.contest import Answer, finish, start
from transformers import AutoModelForCausalLM


def main() -> None:
    """Greedy tokens of some requests of one prompt; the first one's seconds are the prompt's."""
    task, path = start()
    model = AutoModelForCausalLM.from_pretrained(
        task.weights, dtype="auto", device_map="auto", max_memory={"cpu": task.memory},
        offload_folder=task.folder,
    )  # fmt: skip
    seconds, tokens = [], []
    with torch.no_grad():
        for _ in range(task.rows):
            ids, past = task.ids(0, model.config.vocab_size)[:1], None
            for _ in range(task.steps):
                begin = time.perf_counter()
                out = model(ids, past_key_values=past, use_cache=True, logits_to_keep=1)
                past, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
                tokens.append(float(ids))
                seconds.append(time.perf_counter() - begin)
    finish(Answer(seconds, tokens), path)


if __name__ == "__main__":
    main()
