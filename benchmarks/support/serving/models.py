"""Models that are served by benchmarks: random weights, whose greedy tokens are all text.

Of the head's rows only those of ASCII can win, so that every token is a character of its own, each
event of a stream is a token, and no text ends before its length.
"""

from __future__ import annotations

from pathlib import Path

import torch

from outsize.checkpoint import hub
from outsize.models.build import build
from outsize.models.families import parse

ASCII = 128
VOCAB = 8192
# hidden, layers, heads, MLP
SHAPES = {
    "tiny": (64, 2, 4, 192), "6m": (256, 4, 4, 768), "25m": (512, 8, 8, 1408),
    "125m": (768, 12, 12, 2048),
}  # fmt: skip


def made(shape: str, folder: Path, positions: int = 4096) -> Path:
    """A Llama shape as a Hugging Face directory, float32."""
    if (folder / shape).is_dir():
        return folder / shape
    hidden, layers, heads, inner = SHAPES[shape]
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB,
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads, "intermediate_size": inner, "hidden_act": "silu",
        "max_position_embeddings": positions, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    model = build(parse(config), seed=0, dtype=torch.float32)
    head = model.epilogue.head
    assert head is not None, "it is not tied"
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # so that tokens depend on what is before them
        chosen = head.weight[ord(" ") : ASCII - 1].clone()
        head.weight.copy_(0.5 * chosen[torch.arange(len(head.weight)) % len(chosen)])
        head.weight[ord(" ") : ASCII - 1] = chosen
    hub.save(model, folder / shape)
    return folder / shape
