"""A small decoder trained on text, wired otherwise and trained on: losses, for claims.

The text is the source of Python's standard library, byte by byte; a tenth of it is held out.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from outsize.models.build import build
from outsize.models.decoder import Decoder
from outsize.models.families import parse

CONFIG = {
    "model_type": "llama", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 176,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
FILES = ("ast", "tarfile", "inspect", "doctest", "difflib", "argparse", "pdb")
ROWS, LENGTH, LR = 8, 64, 3e-3
TRAINED, MORE = 150, 75  # steps before the wiring changes, and after


@dataclass(frozen=True)
class Losses:
    """On text that was held out. before: of the plain model; at_once: wired otherwise; after: that
    one trained on; plain: the plain one trained on as long; scratch: wired so from the start."""

    before: float
    at_once: float
    after: float
    plain: float
    scratch: float

    def __str__(self) -> str:
        return (
            f"loss {self.before:.3f}, wired otherwise {self.at_once:.3f}, after {MORE} steps"
            f" {self.after:.3f} (plain model {self.plain:.3f}); from scratch {self.scratch:.3f}"
        )


def losses(rewire: Callable[[Decoder], Decoder], whole: Callable[[Decoder], Decoder]) -> Losses:
    """rewire: what is done to the trained model; whole: to one that has seen nothing."""
    train, held = _text()
    torch.set_num_threads(1)
    model = build(parse(CONFIG), seed=3)
    _train(model, train, 0, TRAINED)
    before = _loss(model, held)
    twin = build(parse(CONFIG), seed=3)
    twin.load_state_dict(model.state_dict())
    wired = rewire(twin)
    at_once = _loss(wired, held)
    for one in (model, wired):
        _train(one, train, TRAINED, TRAINED + MORE)
    scratch = whole(build(parse(CONFIG), seed=3))
    _train(scratch, train, 0, TRAINED + MORE)
    return Losses(before, at_once, *(_loss(m, held) for m in (wired, model, scratch)))


def _text() -> tuple[torch.Tensor, torch.Tensor]:
    library = Path(sysconfig.get_path("stdlib"))
    bytes_ = b"".join((library / f"{name}.py").read_bytes() for name in FILES)
    text = torch.tensor(list(bytes_)).clamp_(max=127)
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def _rows(text: torch.Tensor, step: int, rows: int = ROWS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text) - LENGTH - 1, (rows,), generator=generator)
    return torch.stack([text[s : s + LENGTH + 1] for s in starts.tolist()])


def _mean(model: Decoder, rows: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def _train(model: Decoder, text: torch.Tensor, first: int, last: int) -> None:
    """The same rows whatever the model; the rate falls linearly over all steps."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    for step in range(first, last):
        done = step / (TRAINED + MORE)
        warm = min(1.0, (step - first + 1) / 20)
        optimizer.param_groups[0]["lr"] = LR * (1 - 0.9 * done) * warm
        optimizer.zero_grad()
        _mean(model, _rows(text, step)).backward()
        optimizer.step()


@torch.no_grad()
def _loss(model: Decoder, text: torch.Tensor) -> float:
    return float(_mean(model, _rows(text, -1 & 0xFFFF, 128)))
