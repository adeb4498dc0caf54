"""LoRA+: B learns at its own rate, as peft's optimizer for it has it."""

from __future__ import annotations

import peft
import torch
import transformers
from adapting import some_ids, sum_of_losses
from float64 import Float64
from peft.optimizers import create_loraplus_optimizer
from subjects import CONFIGS

import outsize
from outsize.models.names import adapter_layout
from outsize.optim import AdamW


def test_updates_are_those_of_pefts_optimizer(tmp_path):
    facts = {k: v for k, v in CONFIGS["llama, untied"].items() if k != "model_type"}
    torch.manual_seed(3)
    with Float64():
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**facts)).double()
        theirs.save_pretrained(tmp_path / "base")
        said = peft.LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=6, target_modules=["q_proj"])
        adapted = peft.get_peft_model(theirs, said).double()
        ours = outsize.adapt(
            outsize.load(tmp_path / "base", torch.float64), "lora", rank=3, alpha=6.0,
            targets=["attention.q"], rate_ratio=16.0,
        )  # fmt: skip
        files = {e.ours[0]: e.theirs[0] for e in adapter_layout(ours.config)}
        values = {n.replace(".default", ""): p for n, p in adapted.named_parameters()}
        for name, file in files.items():
            values[file].data.copy_(ours.get_parameter(name).detach())
        optimizer = create_loraplus_optimizer(
            adapted, torch.optim.AdamW, lr=1e-2, loraplus_lr_ratio=16.0, eps=1e-4, betas=(0.9, 0.95)
        )
        job = outsize.prepare(ours, AdamW(1e-2, eps=1e-4, weight_decay=0.0))
        ids = some_ids()
        for _ in range(3):
            job.step(ids)
            (sum_of_losses(adapted(ids).logits, ids) / (ids.numel() - len(ids))).backward()
            optimizer.step()
            optimizer.zero_grad()
    trained = dict(job.weights())
    for name, file in files.items():
        torch.testing.assert_close(trained[name], values[file].detach(), rtol=1e-9, atol=1e-10)
    plain = optimizer.param_groups
    assert {group["lr"] for group in plain} >= {1e-2, 16e-2}, "or this says nothing"
