"""The Hugging Face Trainer, set as the other contenders are, logging the loss only."""

from __future__ import annotations

import tempfile
from typing import Any

import accelerate  # noqa: F401  the Trainer imports it when used
import torch
import transformers.models.llama.modeling_llama  # noqa: F401  transformers imports it when used
from support.contender import Clock, Result, Task, baseline, finish, labels_of, peak, start
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Rows(Dataset[dict[str, Tensor]]):
    """Every row of every step, in order."""

    def __init__(self, rows_NS: Tensor) -> None:
        self.rows_NS, self.labels_NS = rows_NS, labels_of(rows_NS)

    def __len__(self) -> int:
        return len(self.rows_NS)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows_NS[index], "labels": self.labels_NS[index]}


class Watch(TrainerCallback):
    """Reads the clock at the end of every step."""

    def on_train_begin(self, *unused: Any, **unused_too: Any) -> None:
        self.clock = Clock()

    def on_step_end(self, *unused: Any, **unused_too: Any) -> None:
        self.clock.step()


def arguments_of(task: Task, steps: int, rows: int, directory: str) -> TrainingArguments:
    return TrainingArguments(
        output_dir=directory,
        use_cpu=True,
        bf16=task.precision == "bf16",
        torch_compile=task.compiled,
        max_steps=steps,
        per_device_train_batch_size=task.microbatch_rows,
        gradient_accumulation_steps=rows // task.microbatch_rows,
        train_sampling_strategy="sequential",
        optim="adamw_torch_fused",
        learning_rate=task.lr,
        lr_scheduler_type="constant",
        adam_beta1=task.betas[0],
        adam_beta2=task.betas[1],
        adam_epsilon=task.eps,
        weight_decay=task.weight_decay,
        max_grad_norm=task.clip,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def main() -> None:
    task, path = start()
    steps, base = task.steps(), baseline()
    model = AutoModelForCausalLM.from_pretrained(task.weights, dtype=torch.float32)
    model.config.use_cache = False
    watch = Watch()
    with tempfile.TemporaryDirectory() as directory:
        arguments = arguments_of(task, len(steps), len(steps[0]), directory)
        trainer = Trainer(model, arguments, train_dataset=Rows(torch.cat(steps)), callbacks=[watch])
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    finish(Result(watch.clock.seconds, losses, peak(), base), path)


if __name__ == "__main__":
    main()
