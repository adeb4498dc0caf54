"""Plain PyTorch over memory-mapped files: training or generating.

The transformers model, whose weights are the mapped safetensors files themselves; in training,
weights, gradients and moments are mapped files of their own, which the system pages in and out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from support.contest import Answer, Task, finish, start
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM


def model_of(task: Task) -> Any:
    """The model with its weights as they lie mapped."""
    config = AutoConfig.from_pretrained(task.weights)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(dict(mapped(task.weights)), assign=True)
    rotary = model.model.rotary_emb  # its table is no weight: made again, off the meta device
    model.model.rotary_emb = type(rotary)(config=config)
    return model


def mapped(folder: str) -> Iterator[tuple[str, Tensor]]:
    """Weights as views of the files; safetensors keeps the mapping while a view lives."""
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118  it has no other iterator
                yield name, weights.get_tensor(name)


def file_like(tensor: Tensor, path: Path) -> Tensor:
    """Zeros of the same shape in a new file, mapped."""
    flat = torch.from_file(str(path), shared=True, size=tensor.numel(), dtype=tensor.dtype)
    return flat.view(tensor.shape)


def trained(task: Task) -> Answer:
    model = model_of(task).train()
    model.gradient_checkpointing_enable()
    folder = Path(task.folder)
    moments = []
    for number, parameter in enumerate(model.parameters()):
        data = file_like(parameter, folder / f"{number}.weight")
        data.copy_(parameter.detach())
        parameter.data = data
        parameter.grad = file_like(parameter, folder / f"{number}.grad")
        moments.append([file_like(parameter, folder / f"{number}.{name}") for name in ("m", "v")])
    seconds, losses = [], []
    for step in range(task.steps):
        begin = time.perf_counter()
        ids = task.ids(step, model.config.vocab_size)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        for parameter, (m, v) in zip(model.parameters(), moments, strict=True):
            torch._fused_adamw_(
                [parameter.detach()], [parameter.grad], [m], [v], [], [torch.tensor(step + 1.0)],
                lr=task.lr, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8, amsgrad=False,
                maximize=False,
            )  # fmt: skip
            parameter.grad.zero_()
        losses.append(float(loss))
        seconds.append(time.perf_counter() - begin)
    return Answer(seconds, losses)


def generated(task: Task) -> Answer:
    model = model_of(task).eval()
    return decoded(model, task)


def decoded(model: Any, task: Task) -> Answer:
    """Greedy tokens one by one with the model's own cache; the prompt's step is not timed."""
    ids, cache = task.ids(0, model.config.vocab_size)[:1], None
    seconds, tokens = [], []
    with torch.no_grad():
        for _ in range(task.steps + 1):
            begin = time.perf_counter()
            out = model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            ids = out.logits[:, -1:].argmax(-1)
            tokens.append(float(ids))
            seconds.append(time.perf_counter() - begin)
    return Answer(seconds[1:], tokens)


def main() -> None:
    task, path = start()
    finish(trained(task) if task.what == "train" else generated(task), path)


if __name__ == "__main__":
    main()
