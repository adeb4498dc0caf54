"""Claim: a vision transformer whose tokens are merged while it adapts is quicker at inference.

Xiong et al., "PYRA: Parallel Yielding Re-Activation for Training-Inference Efficient Task
Adaptation", 2024 (arXiv 2403.09192): of its tables, 745 images a second instead of 425 (ViT-B) and
225 instead of 130 (ViT-L) at its low rate of compression, 1,365 and 427 at its high one, on a GPU
that is not named. Here: images a second of one thread, by its processor time, by the shapes and the
schedules of the paper's code; operations of one image stand beside them and are not judged.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers as hf
from torch.utils.flop_counter import FlopCounterMode
from verdict import Figure, conclude

import outsize

FACTS = {
    "ViT-B": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
              "intermediate_size": 3072},
    "ViT-L": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
              "intermediate_size": 4096},
}  # fmt: skip
# Of the authors' code, model/tome.py.
SCHEDULES = {
    ("ViT-B", "low"): [*[16] * 11, 10],
    ("ViT-B", "high"): [40, 34, 30, 24, 18, 14, 10, 8, 4, 4, 3, 3],
    ("ViT-L", "low"): [*[8] * 23, 6],
    ("ViT-L", "high"): [20, 19, 18, 17, 15, 13, 13, 12, 10, 9, 8, 6, 6, 4, 4, 4, 3, 3, 2, 2,
                        *[1] * 4],
}  # fmt: skip
# Images a second: of the whole model, at the low rate and at the high one.
PAPER = {"ViT-B": {"": 425, "low": 745, "high": 1365}, "ViT-L": {"": 130, "low": 225, "high": 427}}
IMAGES, ROUNDS = 4, 2


def vit(name: str, merged: Sequence[int] | None) -> Any:
    model = hf.ViTForImageClassification(hf.ViTConfig(**FACTS[name])).eval()
    if merged is not None:
        outsize.adapt(model, "pyra", merged=merged, rank=0)
    return model


def operations(name: str, merged: Sequence[int] | None) -> int:
    """Of one image of 224 x 224, on tensors without numbers."""
    with torch.device("meta"):
        model = vit(name, merged)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.empty(1, 3, 224, 224))
    return counter.get_total_flops()


@torch.no_grad()
def seconds(name: str) -> dict[str, float]:
    """Processor seconds of an image by rate of compression, "" of the whole model: the least of
    rounds in turn."""
    ways = {"": vit(name, None)}
    ways |= {rate: vit(name, merged) for (n, rate), merged in SCHEDULES.items() if n == name}
    images = torch.randn(IMAGES, 3, 224, 224)
    found: dict[str, list[float]] = {rate: [] for rate in ways}
    for _ in range(ROUNDS):
        for rate, model in ways.items():
            begun = time.process_time()
            model(images)
            found[rate].append((time.process_time() - begun) / IMAGES)
    return {rate: min(times) for rate, times in found.items()}


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    figures, said = list[Figure](), list[str]()
    for name in FACTS:
        took = seconds(name)
        for rate in ("low", "high"):
            fewer = operations(name, None) / operations(name, SCHEDULES[name, rate])
            gain, theirs = took[""] / took[rate], PAPER[name][rate] / PAPER[name][""]
            said.append(f"{name} {rate} {gain:.2f}x ({fewer:.2f}x fewer operations)")
            figures.append(
                Figure(
                    f"images a second, {name}, {rate} rate", gain, theirs, timed=True,
                    other="on a processor",
                )
            )  # fmt: skip
            print(f"  {said[-1]}, {1 / took[rate]:.2f} images/s", flush=True)
    conclude(
        'Xiong et al., "PYRA", 2024',
        "1.75x and 1.73x the images a second (ViT-B, ViT-L) at a low rate of compression, 3.21x and"
        " 3.28x at a high one",
        f"images a second: {', '.join(said)}",
        "ViT-B/16 and ViT-L/16 at 224 x 224, the schedules of the paper's code, operations counted"
        f" by PyTorch; {IMAGES} images at once, float32, least processor time of {ROUNDS} in turn",
        *figures,
    )


if __name__ == "__main__":
    main()
