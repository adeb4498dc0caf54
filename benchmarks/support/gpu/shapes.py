"""The models, steps and plans of the benchmark, and values of weights, the same for everybody.

Values are drawn on the device, from a seed that the name in Hugging Face's files gives, so that
billions take a second and no file is written.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outsize.models.build import build
from outsize.models.config import DecoderConfig
from outsize.models.families import parse
from outsize.models.names import layout
from outsize.models.presets import PRESETS
from outsize.plan import Precision

DEVIATION = 0.02
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(PRESETS["tiny"]),
    "25M": dict(PRESETS["25m"]),
    "350M": {
        **PRESETS["llama-1.1b"], "hidden_size": 1024, "intermediate_size": 2816, "head_dim": 64,
        "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
    },
    "1.1B": dict(PRESETS["llama-1.1b"]),
    "7B": dict(PRESETS["llama-7b"]),
    "8B": {
        **PRESETS["llama-7b"], "intermediate_size": 14336, "num_key_value_heads": 8,
        "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0,
    },
    "13B": {
        **PRESETS["llama-7b"], "hidden_size": 5120, "intermediate_size": 13824,
        "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 40,
    },
}  # fmt: skip


def config_of(name: str) -> DecoderConfig:
    return parse(SHAPES[name])


def parameters(name: str) -> int:
    """How many a model has."""
    return sum(p.numel() for p in build(config_of(name)).parameters())


def drawn(device: torch.device) -> Callable[[str, Tensor], None]:
    """Writes the values of a parameter, by its name in Hugging Face's files: uniform ones of the
    right deviation, ones for norms."""

    @torch.no_grad()
    def draw(name: str, out: Tensor) -> None:
        if name.endswith("norm.weight"):
            out.fill_(1)
            return
        generator = torch.Generator(device=device).manual_seed(zlib.crc32(name.encode()))
        bound = DEVIATION * 3**0.5
        values = torch.empty(out.shape, device=device)
        out.copy_(values.uniform_(-bound, bound, generator=generator))

    return draw


def native_draw(config: DecoderConfig, device: torch.device) -> Callable[[str, Tensor], None]:
    """The same by native names. Of families whose stored tensors are the native ones."""
    names = {entry.ours[0]: entry.theirs[0] for entry in layout(config)}
    draw = drawn(device)
    return lambda name, out: draw(names[name], out)


def ids_of(rows: int, sequence: int, vocabulary: int, step: int) -> Tensor:
    """(rows, sequence) int64 on the host: random, the same for everybody."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, vocabulary, (rows, sequence), generator=generator)


@dataclass(frozen=True)
class Work:
    """Of a step. warm: steps that do not count, before `steps` that do."""

    shape: str
    rows: int
    sequence: int
    warm: int
    steps: int

    @property
    def config(self) -> DecoderConfig:
        return config_of(self.shape)

    def ids(self, step: int) -> Tensor:
        return ids_of(self.rows, self.sequence, self.config.vocab, step)


# What each of the ten plans asks for. rows: a part of a step's in a microbatch; budget: a part of
# what the roomiest plan takes, with states on a tier.
PLANS: Mapping[str, Mapping[str, Any]] = {
    "as picked": {},
    "microbatches of a quarter": {"rows": 4},
    "blocks recomputed": {"recompute": ("block",)},
    "nothing recomputed": {"recompute": ()},
    "loss in chunks of 256": {"loss_chunk": 256},
    "tiles of 256 tokens": {"mlp_tile": 256},
    "layer by layer": {"rows": 4, "order": "layer"},
    "float32": {"precision": Precision()},
    "host memory, half the bytes": {"tier": "host", "budget": 0.5},
    "disk, half the bytes": {"tier": "disk", "budget": 0.5},
}
