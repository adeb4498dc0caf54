"""LLaMA-Factory's own trainer over the same model and adapter, its rows tokenised beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict
from llamafactory.train.tuner import run_exp
from support.contender_finetune import Found, Task, start
from transformers import TrainerCallback


class Watch(TrainerCallback):
    """Reads the clock at the end of every step."""

    def on_train_begin(self, *unused: Any, **unused_too: Any) -> None:
        self.found = Found()

    def on_step_end(self, *unused: Any, **unused_too: Any) -> None:
        self.found.step()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **unused: Any) -> None:
        if logs and "loss" in logs:
            self.found.losses.append(float(logs["loss"]))


def settings_of(task: Task, folder: Path, steps: int, rows: int, length: int) -> dict[str, Any]:
    return {
        "stage": "sft",
        "do_train": True,
        "model_name_or_path": task.weights,
        "adapter_name_or_path": task.adapter,
        "finetuning_type": "lora",
        "template": "empty",
        "tokenized_path": str(folder / "tokenized"),
        "cutoff_len": length,
        "output_dir": str(folder / "llama-factory"),
        "max_steps": steps,
        "per_device_train_batch_size": rows,
        "disable_shuffling": True,
        "disable_gradient_checkpointing": True,
        "optim": "adamw_torch_fused",
        "learning_rate": task.lr,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": task.clip,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": task.precision == "bf16",
        "flash_attn": "sdpa",
        "dataloader_pin_memory": False,
    }


def main() -> None:
    task, folder = start()
    steps = task.steps()
    ids_NS, labels_NS = (torch.cat([step[i] for step in steps]) for i in (0, 1))
    ones = torch.ones_like(ids_NS).tolist()
    columns = {"input_ids": ids_NS.tolist(), "attention_mask": ones, "labels": labels_NS.tolist()}
    nothing = [[None]] * len(ids_NS)
    columns |= {"images": nothing, "videos": nothing, "audios": nothing}
    DatasetDict({"train": Dataset.from_dict(columns)}).save_to_disk(str(folder / "tokenized"))
    watch = Watch()
    rows, length = steps[0][0].shape
    run_exp(settings_of(task, folder, len(steps), rows, length), callbacks=[watch])
    watch.found.write(folder)


if __name__ == "__main__":
    main()
