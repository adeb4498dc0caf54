"""What the host does for a step of serving beside what the model computes: it composes the step,
plays it, and hands tokens on. Timed by steps of a model of nearly nothing, which the engine takes.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from outsize.decode.generate import GREEDY
from outsize.models.build import build
from outsize.models.coding import asked
from outsize.models.families import parse
from outsize.serve.asks import Ask, Room
from outsize.serve.engine import Engine
from outsize.serve.model import Model
from outsize.serve.policies import POLICIES
from outsize.serve.probed import computing, drawing, quickest

_MANY = 33  # requests
_ROUNDS = 3
_STEPS = 16  # more than are timed
_ROUNDED = "int8:32+head+a8"
_NEARLY_NOTHING = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "intermediate_size": 64, "vocab_size": 64,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip


class Host(NamedTuple):
    """Seconds: of a step, whatever it feeds, and for each request that draws, beside the draw."""

    step: float
    each: float


@cache
@torch.no_grad()
def around(dtype: torch.dtype, device: torch.device, rounded: bool = False) -> Host:
    """rounded: by products that a model whose rows all are rounded has compiled."""
    config = asked(parse(_NEARLY_NOTHING), _ROUNDED if rounded else None)
    model = Model(build(config, 0, dtype=dtype).to(device))
    price = computing(model, range(3), _MANY, 64)
    one, many = (_seconds(model, count) - price.step(count, count, 0.0) for count in (1, _MANY))
    each = max(0.0, many - one) / (_MANY - 1)
    return Host(max(0.0, one - each), max(0.0, each - drawing(model)))


def _seconds(model: Model, count: int) -> float:
    room = Room(_MANY, 64, _MANY, 2 * _MANY, 2 * _MANY, 64)
    engine = Engine(model, room, POLICIES.get("mixed"))
    for _ in range(count):
        engine.submit(Ask((1, 2), _STEPS, GREEDY), lambda event: None)
    engine.step()  # of the prompts
    device = model.prologue.tokens.weight.device
    spent = min(quickest(engine.step, device) for _ in range(_ROUNDS))
    engine.close()
    return spent
