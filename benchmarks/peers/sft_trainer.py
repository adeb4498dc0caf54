"""TRL's SFTTrainer over the same model and adapter, its rows tokenised and masked beforehand."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from peers.peft_loop import base_of
from peft import PeftModel
from support.contender_finetune import Found, start
from torch import Tensor
from transformers import AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer


class Watch(TrainerCallback):
    """Reads the clock at the end of every step."""

    def on_train_begin(self, *unused: Any, **unused_too: Any) -> None:
        self.found = Found()

    def on_step_end(self, *unused: Any, **unused_too: Any) -> None:
        self.found.step()


def collated(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Rows are of one length: nothing is padded."""
    made = {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "labels")}
    return {**made, "attention_mask": torch.ones_like(made["input_ids"])}


def main() -> None:
    task, folder = start()
    steps = task.steps()
    ids_NS, labels_NS = (torch.cat([step[i] for step in steps]) for i in (0, 1))
    data = Dataset.from_dict({"input_ids": ids_NS.tolist(), "labels": labels_NS.tolist()})
    settings = SFTConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=task.precision == "bf16",
        max_steps=len(steps),
        per_device_train_batch_size=len(steps[0][0]),
        train_sampling_strategy="sequential",
        gradient_checkpointing=False,
        max_length=ids_NS.shape[1],
        optim="adamw_torch_fused",
        learning_rate=task.lr,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=task.clip,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    watch = Watch()
    trainer = SFTTrainer(
        PeftModel.from_pretrained(base_of(task), task.adapter, is_trainable=True),
        args=settings,
        train_dataset=data,
        data_collator=collated,
        processing_class=AutoTokenizer.from_pretrained(task.weights),
        callbacks=[watch],
    )
    trainer.train()
    log = trainer.state.log_history
    watch.found.losses = [float(entry["loss"]) for entry in log if "loss" in entry]
    watch.found.write(folder)


if __name__ == "__main__":
    main()
