"""A plain PyTorch loop over a transformers model with peft's LoRA; the base in fp32, or in NF4 by
bitsandbytes."""

from __future__ import annotations

import torch
from peft import PeftModel, prepare_model_for_kbit_training
from support.contender_finetune import Found, Task, start
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


def base_of(task: Task) -> nn.Module:
    if not task.nf4:
        return AutoModelForCausalLM.from_pretrained(task.weights, dtype=torch.float32)
    coded = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if task.precision == "bf16" else torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(
        task.weights, quantization_config=coded, dtype=torch.float32, device_map="cpu"
    )
    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def main() -> None:
    task, folder = start()
    model = PeftModel.from_pretrained(base_of(task), task.adapter, is_trainable=True).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=task.lr, weight_decay=0.0, fused=True)
    found = Found()
    for ids_BS, labels_BS in task.steps():
        with torch.autocast("cpu", torch.bfloat16, enabled=task.precision == "bf16"):
            loss = model(input_ids=ids_BS, labels=labels_BS, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(trained, task.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found.step(float(loss))
    found.write(folder)


if __name__ == "__main__":
    main()
