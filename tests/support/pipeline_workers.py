"""Workers of a pipeline over somebody else's modules, in processes of their own. A module that such
a process can import by its name."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
from between import Skips, made
from torch import nn
from torch.nn import functional as F

import outsize
from outsize.collectives import parse_mesh
from outsize.errors import OutsizeError

_SMALL = {"vocab_size": 40, "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 3,
          "intermediate_size": 36}  # fmt: skip
# name: (its classes' prefix in transformers, the model's class, the configuration)
SIZES = {
    "llama": ("Llama", "ForCausalLM", {**_SMALL, "num_key_value_heads": 2}),
    "gpt2": (
        "GPT2", "LMHeadModel",
        {"vocab_size": 40, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 16,
         "resid_pdrop": 0, "attn_pdrop": 0, "embd_pdrop": 0},
    ),
    "bert": (
        "Bert", "ForMaskedLM",
        {**_SMALL, "max_position_embeddings": 16, "hidden_dropout_prob": 0,
         "attention_probs_dropout_prob": 0},
    ),
    "t5": (
        "T5", "ForConditionalGeneration",
        {"vocab_size": 40, "d_model": 24, "d_kv": 8, "d_ff": 36, "num_layers": 2, "num_heads": 3,
         "dropout_rate": 0, "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu",
         "tie_word_embeddings": False},
    ),
}  # fmt: skip


class Own(Skips):
    """Takes labels, as classes of transformers do, and a cache that it has none of."""

    def forward(self, input_ids, labels=None, attention_mask=None, use_cache=False):
        return super().forward(input_ids % 11)


def model_of(name, seed=0, **changes):
    torch.manual_seed(seed)
    if name == "own":
        return made(Own, seed=seed)
    import transformers as hf

    kind, what, facts = SIZES[name]
    model = getattr(hf, kind + what)(getattr(hf, f"{kind}Config")(**facts | changes))
    model = model.double().train()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def batches(name, count=2):
    """Six rows a step, the last tokens of some rows not there, some without a target."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        ids = torch.randint(3, 40, (6, 7), generator=generator)
        there = (torch.arange(7) < torch.randint(4, 8, (6, 1), generator=generator)).long()
        labels = ids.masked_fill(torch.rand(6, 7, generator=generator) < 0.2, -100)
        labels = labels.masked_fill(there == 0, -100)
        batch = {"input_ids": ids, "attention_mask": there, "labels": labels}
        yield batch if name == "bert" else batch | {"use_cache": False}


def optimizer_of(model):
    """eps is far above the rounding of gradients that should be 0, which Adam would enlarge."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4)


def loss(output, batch):
    """In the logits' own precision."""
    logits = output if isinstance(output, torch.Tensor) else output.logits
    wanted = batch["labels"].flatten()
    if logits.shape[-1] == 11:
        wanted = wanted.where(wanted < 0, wanted % 11)
    return F.cross_entropy(logits.flatten(0, 1), wanted, reduction="sum")


def count(batch):
    return float((batch["labels"] != -100).sum())


def piped(name, model, mesh="pipeline=2", rows=slice(None), **changes):
    """What a worker has to tell after two steps with its rows."""

    def mine(batch):
        return {k: v if isinstance(v, bool) else v[rows] for k, v in batch.items()}

    settings = {"microbatches": 3, "clip": 0.5, "recompute": ()} | changes
    job = outsize.prepare(model, optimizer_of(model), loss=loss, count=count, mesh=mesh, **settings)
    losses = [float(job.step(mine(batch))) for batch in batches(name)]
    total, targets = job.evaluate(mine(next(batches(name))))
    weights = {key: weight.tolist() for key, weight in job.weights()}
    held = {slot.name for chunk in job._job.chunks for slot in chunk.table.slots}
    turn = (parse_mesh(mesh) if isinstance(mesh, str) else mesh).index(
        "pipeline", job._job.world.rank
    )
    predicted = 0 if job.forecast is None else job.forecast.ranks[turn].peak
    peak = max(event.peak for event in job.report.trace.events)
    job.close()
    return {
        "losses": losses, "evaluated": total / targets, "weights": weights, "held": held,
        "peak": peak, "predicted": predicted,
    }  # fmt: skip


def worker(rank, port, pipe):
    """A process that torchrun has started, so to say."""
    torch.set_num_threads(1)
    place = {"RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    pipe.send(piped("own", model_of("own", seed=rank)))  # the first worker's weights are all's


def refused(rank, port, pipe):
    """What a worker is told where the second alone is refused: inside prepare, before a step, in
    one."""
    torch.set_num_threads(1)
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    batch, told = next(batches("own")), []

    def failing(output, batch):
        if len(told) == 2:
            raise RuntimeError("this loss is lost")
        return loss(output, batch)

    def refusal(call, **settings):
        with pytest.raises((OutsizeError, RuntimeError)) as caught:
            call(**settings)
        told.append(str(caught.value))

    def made(loss=loss, clip=None):
        settings = {"loss": loss, "count": count, "clip": clip, "mesh": "data=2"}
        return outsize.prepare(model_of("own"), "adamw", **settings)

    def first_step(**settings):
        made(**settings).step(batch)

    refusal(first_step, clip=-1.0 if rank else None)
    job = made(failing if rank else loss)
    job.step(batch)
    refusal(partial(job.step, batch), lr=-1.0 if rank else 0.0)
    refusal(partial(job.step, batch))
    pipe.send(told)
