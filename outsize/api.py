"""What `import outsize` offers: load, save, generate, prepare."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Literal

import torch

from outsize.checkpoint import hub
from outsize.checkpoint.hub import save
from outsize.data import Tokenizer, open_tokenizer
from outsize.decode.generate import generate as generate_tokens
from outsize.decode.samplers import Sampling
from outsize.decode.text import stream_text
from outsize.errors import OutsizeError
from outsize.models.decoder import Decoder
from outsize.runtime.tokens import TokenPlayer
from outsize.train.directory import model_directory
from outsize.train.prepare import prepare

__all__ = ["generate", "load", "prepare", "save"]

BYTES_AND_SPECIALS = range(257, 321)  # vocabularies of models over bytes, rounded up


def load(
    path: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    weights: Literal["required", "random"] = "required",
    seed: int = 0,
) -> Decoder:
    """The model of a run, of one of its checkpoints, or of a Hugging Face decoder directory:
    `model(input_ids) -> logits`.

    dtype None keeps that of the files. weights="random" takes the config.json alone and draws
    initial values from `seed`. Memory while loading is the model and one block. Raises OutsizeError
    naming file and tensor where something is unknown, missing or damaged.
    """
    return hub.load(model_directory(Path(path)), dtype, device, weights, seed)


@torch.no_grad()
def generate(
    model: Decoder,
    prompt: str | Sequence[int],
    max_tokens: int = 128,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Collection[str] = (),
    tokenizer: str | Path | Tokenizer | None = None,
    on_text: Callable[[str], None] | None = None,
) -> str | list[int]:
    """What follows a prompt: text for a text, token ids for token ids.

    temperature 0 takes the likeliest token; above it, tokens are drawn, from the top_k likeliest
    and the smallest set of probability top_p where given. A token depends on (seed, its index)
    only. stop: strings before which the text ends. tokenizer: a directory with tokenizer.json, or
    "bytes"; None takes that of the directory which the model was loaded from. on_text sees the
    text in pieces as it comes. Raises OutsizeError for settings out of range.
    """
    sampling = Sampling(temperature, top_k, top_p, seed)
    player = TokenPlayer(model)
    if not isinstance(prompt, str):
        return generate_tokens(model, prompt, max_tokens, sampling, forward=player)
    pieces = []
    for piece in stream_text(
        model, tokenizer_of(model, tokenizer), prompt, max_tokens, sampling, stop, forward=player
    ):
        pieces.append(piece)
        if on_text is not None:
            on_text(piece)
    return "".join(pieces)


def tokenizer_of(model: Decoder, named: str | Path | Tokenizer | None = None) -> Tokenizer:
    """The tokenizer that a model goes with: the one named, its directory's, or bytes."""
    if named is not None and not isinstance(named, (str, Path)):
        return named
    if named is not None:
        return open_tokenizer(str(named))
    if model.origin is not None and (model.origin / "tokenizer.json").is_file():
        return open_tokenizer(str(model.origin))
    if model.config.vocab in BYTES_AND_SPECIALS:
        return open_tokenizer("bytes")
    raise OutsizeError(
        f"no tokenizer is known for this model of {model.config.vocab} ids; pass"
        " tokenizer=DIRECTORY with a tokenizer.json, or a prompt of token ids"
    )
