"""Claim: a vision transformer whose tokens are merged while it adapts needs less at inference.

Xiong et al., "PYRA: Parallel Yielding Re-Activation for Training-Inference Efficient Task
Adaptation", 2024: 1.7 times as quick at its low rate of compression, more than 3 times at its high
one. Here operations of one image are counted, by the shapes and the schedules of the paper's code;
they are no time of a device.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch.utils.flop_counter import FlopCounterMode
from verdict import Figure, conclude

import outsize

BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072}  # fmt: skip
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
         "intermediate_size": 4096}  # fmt: skip
# Of the authors' code, model/tome.py.
SCHEDULES = {
    ("ViT-B", "low"): [*[16] * 11, 10],
    ("ViT-B", "high"): [40, 34, 30, 24, 18, 14, 10, 8, 4, 4, 3, 3],
    ("ViT-L", "low"): [*[8] * 23, 6],
    ("ViT-L", "high"): [20, 19, 18, 17, 15, 13, 13, 12, 10, 9, 8, 6, 6, 4, 4, 4, 3, 3, 2, 2,
                        *[1] * 4],
}  # fmt: skip
CLAIMED = {"low": 1.7, "high": 3.0}


def vit(**facts: Any) -> Any:
    return hf.ViTForImageClassification(hf.ViTConfig(**facts)).eval()


def operations(facts: dict[str, int], merged: list[int] | None) -> int:
    """Of one image of 224 x 224, on tensors without numbers."""
    with torch.device("meta"):
        model = vit(**facts)
        if merged is not None:
            outsize.adapt(model, "pyra", merged=merged, rank=0)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.empty(1, 3, 224, 224))
    return counter.get_total_flops()


def main() -> None:
    figures, said = list[Figure](), list[str]()
    for (name, rate), merged in SCHEDULES.items():
        facts = BASE if name == "ViT-B" else LARGE
        ratio = operations(facts, None) / operations(facts, merged)
        said.append(f"{name} {rate} {ratio:.2f}x")
        what, other = f"fewer operations, {name}, {rate} rate", "counted, not images a second"
        figures.append(Figure(what, ratio, CLAIMED[rate], other=other))
        print(f"  {said[-1]}", flush=True)
    conclude(
        'Xiong et al., "PYRA", 2024',
        "1.7x the speed at inference at a low rate of compression, above 3.0x at a high one",
        f"fewer operations of an image: {', '.join(said)}",
        "ViT-B/16 and ViT-L/16 at 224 x 224, the schedules of the paper's code, counted by PyTorch",
        *figures,
    )


if __name__ == "__main__":
    main()
