"""Every method of adaptation that peft has too: settings here and there, over small models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from subjects import CONFIGS, VOCAB

from outsize.techniques.adapt.dora import Dora
from outsize.techniques.adapt.ia3 import Ia3
from outsize.techniques.adapt.loha import Loha
from outsize.techniques.adapt.lokr import Lokr
from outsize.techniques.adapt.lora import Lora
from outsize.techniques.adapt.oft import Oft
from outsize.techniques.adapt.vera import Vera

EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
DENSE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Method:
    """theirs: peft's config; said: of it, for a model whose weights are called so; ours: how its
    plans are tested; begins: whether parameters of it begin at 1."""

    theirs: type
    said: dict[str, Any]
    ours: Any
    begins: float = 0.0


METHODS = {
    "dora": Method(
        peft.LoraConfig, {"r": 3, "lora_alpha": 5, "use_dora": True, "target_modules": DENSE},
        Dora(3, 5.0), 1.0,
    ),
    "loha": Method(
        peft.LoHaConfig, {"r": 3, "alpha": 5, "target_modules": DENSE}, Loha(3, 5.0)
    ),
    "lokr": Method(
        peft.LoKrConfig, {"r": 2, "alpha": 3, "target_modules": DENSE},
        Lokr(2, 3.0, ("attention.q", "attention.o")),
    ),
    "ia3": Method(
        peft.IA3Config,
        {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
        Ia3(), 1.0,
    ),
    "vera": Method(
        peft.VeraConfig, {"r": 5, "d_initial": 0.5, "target_modules": DENSE},
        Vera(5, 0.5, ("all-linear",)),
    ),
    "oft": Method(peft.OFTConfig, {"oft_block_size": 4, "target_modules": DENSE}, Oft(4)),
}  # fmt: skip

LORA = Method(
    peft.LoraConfig, {"r": 3, "lora_alpha": 5, "target_modules": DENSE}, Lora(3, 5.0)
)  # tested by itself


def theirs(
    name: str, family: str, folder: Path, facts: dict[str, Any] | None = None, **more: Any
) -> peft.PeftModel:
    """A model of transformers with peft's adapter, both of random values, in float64; the model in
    folder/base, the adapter in folder/adapter. more: fields of the adapter."""
    method = {**METHODS, "lora": LORA}[name]
    facts = facts or {k: v for k, v in CONFIGS[family].items() if k != "model_type"}
    config = transformers.AutoConfig.for_model(family, **facts)
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config, **EAGER).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder / "base")
    model.name_or_path = str(folder / "base")
    said = {"task_type": "CAUSAL_LM", **method.said, **more}
    made = peft.get_peft_model(model, method.theirs(**said))
    for parameter in made.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, dtype=torch.float64) * 0.3
            parameter.data = parameter.data.double() * (method.begins > 0) + noise
    made.peft_config["default"].base_model_name_or_path = str(folder / "base")
    made.save_pretrained(folder / "adapter")
    return made.eval()


def pretrained(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float64", **EAGER)


def sum_of_losses(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    flat = logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(flat, ids[:, 1:].flatten(), reduction="sum")


def some_ids() -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 11), generator=torch.Generator().manual_seed(1))
