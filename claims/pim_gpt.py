"""Claim: memory that multiplies where it lies decodes a GPT many times as fast as a GPU does.

Wu et al., "PIM-GPT: A Hybrid Process-in-Memory Accelerator for Autoregressive Transformers", 2024:
41 to 137 times an NVIDIA T4 on eight models, 1,024 tokens from one prompt each. Here the memory is
a declared device of the catalogue, priced bank by bank (outsize/foresight/banks.py), and the GPU
what its data sheet and its host allow: the operators that transformers runs for one token are
counted, and each takes the host as long as those of a model that was measured. What is in reach of
the paper is its range, not the figure of each model: both ends and the order are compared.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from verdict import Figure, conclude

from outsize.foresight.shape import Shape
from outsize.hardware import parse_spec
from outsize.serve.described import Served

LOW, HIGH = 41.0, 137.0
# Seconds of a token of transformers, a Llama of 22 layers, bound by its host (docs/gpu.md).
SLOW, SLOW_LAYERS = 1 / 56.6, 22
TOKENS, VOCAB = 1024, 50257
# Layers, hidden size, heads: Radford et al., 2019; Brown et al., 2020 (d_head of XL: 2048 / 16).
MODELS = {
    "GPT2-small": (12, 768, 12), "GPT2-medium": (24, 1024, 16), "GPT2-large": (36, 1280, 20),
    "GPT2-XL": (48, 1600, 25), "GPT3-small": (12, 768, 12), "GPT3-medium": (24, 1024, 16),
    "GPT3-large": (24, 1536, 16), "GPT3-XL": (24, 2048, 16),
}  # fmt: skip
FREE = ("view", "transpose", "permute", "split", "slice", "select", "unsqueeze", "expand", "detach",
        "alias", "t.default", "squeeze", "_to_copy", "empty")  # fmt: skip


class Counting(TorchDispatchMode):
    """Operators that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        self.count += not name.startswith(FREE)
        return func(*args, **(kwargs or {}))


def operators(kind: str) -> tuple[int, int]:
    """Of transformers' models of a kind for one further token: of a layer, and of the rest."""
    found = [counted(kind, layers) for layers in (1, 2)]
    return found[1] - found[0], 2 * found[0] - found[1]


def counted(kind: str, layers: int) -> int:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"n_layer": layers, "n_embd": 32, "n_head": 2, "n_positions": 16}
    if kind == "llama":
        sizes = {
            "num_hidden_layers": layers, "hidden_size": 32, "num_attention_heads": 2,
            "intermediate_size": 64,
        }  # fmt: skip
    config = AutoConfig.for_model(kind, vocab_size=64, bos_token_id=0, eos_token_id=1, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        cache = model(torch.zeros(1, 4, dtype=torch.long), use_cache=True)["past_key_values"]
        with Counting() as counting:
            model(torch.zeros(1, 1, dtype=torch.long), past_key_values=cache, use_cache=True)
    return counting.count


def seconds(name: str, device: str, precision: str) -> float:
    """Of a token, the mean over TOKENS of them, where nothing waits for a host."""
    layers, hidden, heads = MODELS[name]
    shape = Shape(layers, hidden, heads, VOCAB, positions=TOKENS)
    price = Served(shape, parse_spec(device).groups[0], 1, precision, 0.0).price()
    return price.blocks(1) + price.head(1) + TOKENS / 2 * price.load


def main() -> None:
    llama, gpt = operators("llama"), operators("gpt2")
    launched = SLOW / (SLOW_LAYERS * llama[0] + llama[1])
    gains = {}
    for name, (layers, _, _) in MODELS.items():
        there = seconds(name, "GDDR6-PIM", "bf16")
        host = (layers * gpt[0] + gpt[1]) * launched
        gpu = max(seconds(name, "T4", "fp16"), host)
        gains[name] = gpu / there
        print(
            f"  {name:12}{there * 1e3:6.3f} ms in memory, {gpu * 1e3:6.2f} ms on a T4:"
            f" {gains[name]:.0f} times"
        )
    other = f"a host that takes {launched * 1e6:.0f} us for an operator, not the paper's"
    said = ", ".join(f"{name} {gain:.0f}" for name, gain in gains.items())
    wide = [gains[f"GPT3-{size}"] for size in ("small", "medium", "large", "XL")]
    conclude(
        'Wu et al., "PIM-GPT", 2024',
        "41 to 137 times a GPU's speed of decoding on eight GPT models",
        f"times a T4's: {said}",
        f"{TOKENS} tokens each; bandwidth and multipliers of declared banks; the GPU's time is its"
        " host's for transformers, as it was measured beside an H100 here; the paper's figure of"
        " each model was not in reach",
        Figure(
            "gain on the smallest model", gains["GPT2-small"], HIGH, how="simulated", other=other
        ),
        Figure("gain on the largest model", gains["GPT3-XL"], LOW, how="simulated", other=other),
        holds={"gains fall as layers grow": wide == sorted(wide, reverse=True)},
    )


if __name__ == "__main__":
    main()
