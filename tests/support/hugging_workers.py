"""Workers of the tensor axis over classes of transformers, in processes of their own. A module that
such a process can import by its name."""

from __future__ import annotations

import os

import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F

import outsize

SIZES = {
    "llama": hf.LlamaConfig(
        vocab_size=40, hidden_size=24, intermediate_size=36, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    ),
    "gpt2": hf.GPT2Config(
        vocab_size=40, n_embd=24, n_layer=2, n_head=4, n_positions=16, resid_pdrop=0,
        attn_pdrop=0, embd_pdrop=0.2,
    ),
}  # fmt: skip


def model_of(name, seed=0, **changes):
    torch.manual_seed(seed)
    config = type(SIZES[name])(**SIZES[name].to_dict() | changes)
    model = hf.AutoModelForCausalLM.from_config(config).double().train()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def batches(count=3):
    """Four rows a step, some tokens without a target."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        ids = torch.randint(0, 40, (4, 7), generator=generator)
        labels = ids.masked_fill(torch.rand(4, 7, generator=generator) < 0.2, -100)
        yield {"input_ids": ids, "labels": labels, "use_cache": False}


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def two_of(name, seed):
    """What a worker of two has to tell after three steps."""
    model = model_of(name, seed)  # the first worker's weights are everybody's
    job = outsize.prepare(
        model, optimizer_of(model), "2MiB", mesh="tensor=2", clip=0.5, loss=loss, count=count,
        recompute=(),
    )  # fmt: skip
    torch.manual_seed(seed)  # and so are its random numbers
    losses = [float(job.step(batch)) for batch in batches()]
    total, targets = job.evaluate(next(batches()))
    weights = {key: weight.tolist() for key, weight in job.weights()}
    held = sum(p.numel() for p in model.parameters())
    report = {
        "losses": losses, "evaluated": total / targets, "weights": weights, "held": held,
        "spread": job.spread, "predicted": job.forecast.peak,
        "peak": max(event.peak for event in job.report.trace.events),
    }  # fmt: skip
    job.close()
    return report


def loss(output, batch):
    """As transformers has it, but in the logits' own precision."""
    wanted = batch["labels"][:, 1:].flatten()
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), wanted, reduction="sum")


def count(batch):
    return float((batch["labels"][:, 1:] != -100).sum())


def worker(rank, ports, pipe):
    """A process that torchrun has started, so to say."""
    torch.set_num_threads(1)
    told = {}
    for name, port in zip(SIZES, ports, strict=True):
        place = {"RANK": str(rank), "WORLD_SIZE": "2"}
        os.environ |= place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        told[name] = two_of(name, seed=rank)
    pipe.send(told)
