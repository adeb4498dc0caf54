"""What a model's directory hands to other programs: the dtype that its config.json says, and the
logits that the class of `transformers` which it names gives, where that is installed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from outsize.checkpoint.adapters import ADAPTER_CONFIG
from outsize.checkpoint.hub import describe
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder
from outsize.verify.naive import logits_of

NARROW = 1e-4  # norms and rotary tables of transformers are float32, whatever the model is
KNOWN = frozenset({"attention", "latent attention"})
OPERATORS = "eager"  # one after the other, in the dtype of the model


@dataclass(frozen=True)
class Handed:
    """said: the dtype of config.json, "" where it names none; stored: that of most bytes; logits:
    the largest difference from those of transformers, as a part of the largest; left: why they
    were not compared."""

    said: str
    stored: str
    logits: float | None = None
    left: str = ""

    @property
    def holds(self) -> bool:
        return self.said in ("", self.stored) and not (self.logits or 0.0) > NARROW


def handed(directory: Path, config: DecoderConfig, plain: Decoder, ids: tuple[int, ...]) -> Handed:
    """What another program has of the directory of a model. plain: the model in float64; ids: that
    both read."""
    if (directory / ADAPTER_CONFIG).is_file():
        return Handed("", "", left="an adapter is peft's to read")
    said = str(config.source.get("dtype", config.source.get("torch_dtype")) or "")
    found, count = describe(directory, config), Counter[torch.dtype]()
    for entry in found.stored:
        for name in entry.theirs:
            one = found.entry(name)[1]
            count[one.dtype] += one.stop - one.start
    stored = str(count.most_common(1)[0][0]).removeprefix("torch.")
    own = {layer.kind for layer in config.layers} - KNOWN
    if config.rewired or own:
        unknown = config.rewired or min(own)
        return Handed(said, stored, left=f"{unknown} is nothing that transformers knows")
    if find_spec("transformers") is None:
        return Handed(said, stored, left="transformers is not installed")
    mine_TV, theirs_TV = _mine(plain, ids), _theirs(directory, ids)
    apart = float((mine_TV - theirs_TV).abs().max() / mine_TV.abs().max())
    return Handed(said, stored, apart)


@torch.no_grad()
def _mine(plain: Decoder, ids: tuple[int, ...]) -> Tensor:
    ids_T = torch.tensor(ids)
    return logits_of(plain, ids_T, torch.arange(len(ids)), (0, len(ids)))


@torch.no_grad()
def _theirs(directory: Path, ids: tuple[int, ...]) -> Tensor:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        str(directory),
        dtype=torch.float64,
        local_files_only=True,
        attn_implementation=OPERATORS,
        experts_implementation=OPERATORS,
    )
    model.train(False)
    logits_TV: Tensor = model(torch.tensor(ids).unsqueeze(0)).logits[0]
    return logits_TV
