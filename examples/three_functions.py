"""A T5 and a GPT-J that learn to turn a row of tokens round, each said in three functions.

Tan et al., "Redco: A Lightweight Tool to Automate Distributed Training of LLMs on Any GPU/TPUs",
2023. `collate` makes a batch of examples, `loss` a sum of losses of an output, `predict` a row for
each example. Nothing below says how many workers there are or what each of them has:

    python examples/three_functions.py
    torchrun --nproc-per-node 2 examples/three_functions.py --model gptj --mesh tensor=2

Needs transformers.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import outsize

VOCAB, LENGTH, SEPARATOR, START, NO_TARGET = 16, 4, 1, 0, -100
Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Job:
    """A model, and the three functions of its job."""

    make: Callable[[], nn.Module]
    collate: Callable[[Sequence[Tensor]], Batch]
    loss: Callable[[Any, Batch], Tensor]
    predict: Callable[[Any, Batch], Tensor]

    @property
    def task(self) -> outsize.Task:
        return outsize.Task(self.collate, self.loss, self.predict, targets)


def targets(batch: Batch) -> float:
    """What a sum of losses is divided by."""
    return float((batch["labels"] != NO_TARGET).sum())


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=NO_TARGET, reduction="sum"
    )


# -- T5: an encoder reads the row, a decoder writes it turned --------------------------------------


def t5() -> nn.Module:
    import transformers as hf

    config = hf.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=START, tie_word_embeddings=False,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def collate_t5(examples: Sequence[Tensor]) -> Batch:
    rows = torch.stack(list(examples))
    return {"input_ids": rows, "labels": rows.flip(1)}


def loss_t5(output: Any, batch: Batch) -> Tensor:
    return _cross_entropy(output.logits, batch["labels"])


def predict_t5(output: Any, batch: Batch) -> Tensor:
    found: Tensor = output.logits.argmax(-1)
    return found


# -- GPT-J: the row, a separator and the row turned are one sequence -------------------------------


def gptj() -> nn.Module:
    import transformers as hf

    config = hf.GPTJConfig(
        vocab_size=VOCAB, n_positions=2 * LENGTH + 1, n_embd=32, n_layer=2, n_head=4, rotary_dim=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=START, eos_token_id=START,
    )  # fmt: skip
    return hf.GPTJForCausalLM(config)


def collate_gptj(examples: Sequence[Tensor]) -> Batch:
    rows = torch.stack(list(examples))
    ids = torch.cat((rows, torch.full((len(rows), 1), SEPARATOR), rows.flip(1)), 1)
    labels = ids.clone()
    labels[:, : LENGTH + 1] = NO_TARGET
    return {"input_ids": ids, "labels": labels}


def loss_gptj(output: Any, batch: Batch) -> Tensor:
    return _cross_entropy(output.logits[:, :-1], batch["labels"][:, 1:])


def predict_gptj(output: Any, batch: Batch) -> Tensor:
    found: Tensor = output.logits[:, LENGTH:-1].argmax(-1)
    return found


JOBS = {
    "t5": Job(t5, collate_t5, loss_t5, predict_t5),
    "gptj": Job(gptj, collate_gptj, loss_gptj, predict_gptj),
}


def make_examples(count: int) -> list[Tensor]:
    """Rows of tokens, the same every time."""
    drawn = torch.Generator().manual_seed(0)
    return list(torch.randint(SEPARATOR + 1, VOCAB, (count, LENGTH), generator=drawn))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train and predict by three functions.")
    parser.add_argument("--model", choices=JOBS, default="t5")
    parser.add_argument("--mesh", help="such as tensor=2; by default all workers are on data")
    parser.add_argument("--epochs", type=int, default=12)
    said = parser.parse_args()
    torch.manual_seed(0)
    own = JOBS[said.model]
    model, task, examples = own.make(), own.task, make_examples(512)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    job = outsize.prepare(model, optimizer, loss=task.loss, count=task.count, mesh=said.mesh)
    losses = task.fit(job, examples[:448], 32, said.epochs)
    held = examples[448:]
    found = task.predict(job, held)
    right = torch.stack(found) == torch.stack(held).flip(1)
    if os.environ.get("RANK", "0") == "0":
        print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, {right.double().mean():.0%} of tokens")
    job.close()


if __name__ == "__main__":
    main()
