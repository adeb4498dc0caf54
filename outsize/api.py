"""What `import outsize` offers: load, save, generate, prepare."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Literal, overload

import torch

from outsize.checkpoint import hub
from outsize.checkpoint.hub import save
from outsize.collectives import Mesh, parse_mesh
from outsize.data import Tokenizer, open_tokenizer
from outsize.decode.generate import PREFILL_TOKENS, Forward, check_request
from outsize.decode.generate import generate as generate_tokens
from outsize.decode.samplers import Sampler, Sampling
from outsize.decode.text import prompt_ids, stream_text
from outsize.errors import OutsizeError
from outsize.memory import parse_bytes
from outsize.models.decoder import Decoder
from outsize.runtime.fit import Request
from outsize.runtime.streamed import Streamed
from outsize.runtime.tokens import TokenPlayer
from outsize.serve import Meshed
from outsize.train.directory import model_directory
from outsize.train.prepare import prepare

__all__ = ["generate", "load", "prepare", "save"]

BYTES_AND_SPECIALS = range(257, 321)  # vocabularies of models over bytes, rounded up


@overload
def load(
    path: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    weights: Literal["required", "random"] = "required",
    seed: int = 0,
    *,
    memory: None = None,
    disk: str | Path | None = None,
    sparse: bool = False,
    mesh: None = None,
) -> Decoder: ...
@overload
def load(
    path: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    weights: Literal["required", "random"] = "required",
    seed: int = 0,
    *,
    memory: str | int,
    disk: str | Path | None = None,
    sparse: bool = False,
    mesh: None = None,
) -> Streamed: ...
@overload
def load(
    path: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    weights: Literal["required", "random"] = "required",
    seed: int = 0,
    *,
    memory: None = None,
    disk: None = None,
    sparse: bool = False,
    mesh: str | Mesh,
) -> Meshed: ...
def load(
    path: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    weights: Literal["required", "random"] = "required",
    seed: int = 0,
    *,
    memory: str | int | None = None,
    disk: str | Path | None = None,
    sparse: bool = False,
    mesh: str | Mesh | None = None,
) -> Decoder | Streamed | Meshed:
    """The model of a run, of one of its checkpoints, or of a Hugging Face decoder directory:
    `model(input_ids) -> logits`.

    dtype None keeps that of the files. weights="random" takes the config.json alone and draws
    initial values from `seed`. Memory while loading is the model and one block. Raises OutsizeError
    naming file and tensor where something is unknown, missing or damaged.

    memory ("2GiB"): most bytes of tensors on the device. The model may be larger: its weights stay
    in its files and are read as they are needed, and `generate` gives the same tokens. disk: the
    folder for weights that must be converted first (transposed ones, another dtype), the system's
    for temporary files by default; sparse: keep those of a pruned model there as bitmap images.

    mesh ("pipeline=2,tensor=2"), under torchrun: every worker calls this and has its own part of
    the weights alone; `generate`, which all call alike, gives the same tokens.
    """
    directory = model_directory(Path(path))
    if mesh is not None:
        others = {"memory": memory, "disk": disk, "sparse": sparse or None}
        others["weights"] = None if weights == "required" else weights
        for name, value in others.items():
            if value is not None:
                raise OutsizeError(
                    f"{name} is {value!r} with mesh, where each worker reads its own part and keeps"
                    " it: leave one of them out"
                )
        axes = parse_mesh(mesh) if isinstance(mesh, str) else mesh
        return Meshed.joined(directory, axes, dtype, device)
    if memory is None:
        if disk is not None or sparse:
            raise OutsizeError("disk and sparse go with memory; pass memory='2GiB' or leave them")
        return hub.load(directory, dtype, device, weights, seed)
    if weights != "required":
        raise OutsizeError(
            f"weights = {weights!r} with memory; expected 'required': values are read from files"
        )
    return Streamed(directory, parse_bytes(memory), dtype, device, disk, sparse)


@torch.no_grad()
def generate(
    model: Decoder | Streamed | Meshed,
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
    on_ready: Callable[[str], None] | None = None,
) -> str | list[int]:
    """What follows a prompt: text for a text, token ids for token ids.

    temperature 0 takes the likeliest token; above it, tokens are drawn, from the top_k likeliest
    and the smallest set of probability top_p where given. A token depends on (seed, its index)
    only. stop: strings before which the text ends. tokenizer: a directory with tokenizer.json, or
    "bytes"; None takes that of the directory which the model was loaded from. on_text sees the
    text in pieces as it comes; on_ready, before the first token, a line about what a model within
    a memory budget keeps and reads, or where one on several workers lies, "" for others. The
    workers of a mesh all call this alike and have the same text. Raises OutsizeError for settings
    out of range, and for a budget that is too small.
    """
    sampling = Sampling(temperature, top_k, top_p, seed)
    if isinstance(prompt, str):
        text = tokenizer_of(model, tokenizer)
        ids: Sequence[int] = prompt_ids(text, prompt)
    else:
        ids = prompt
    decoder, player, at_once = _player(model, ids, max_tokens, temperature > 0)
    draw: Sampler = model.relay.drawing(sampling) if isinstance(model, Meshed) else sampling
    if on_ready is not None:
        on_ready(_outlook(model))
    if not isinstance(prompt, str):
        return generate_tokens(
            decoder, ids, max_tokens, draw, forward=player, prefill_tokens=at_once
        )
    pieces = []
    for piece in stream_text(
        decoder, text, prompt, max_tokens, draw, stop, forward=player, prefill_tokens=at_once
    ):
        pieces.append(piece)
        if on_text is not None:
            on_text(piece)
    return "".join(pieces)


def _outlook(model: Decoder | Streamed | Meshed) -> str:
    """What is said of a model before its first token."""
    if isinstance(model, Meshed):
        return str(model)
    return str(model.outlook) if isinstance(model, Streamed) else ""


def _player(
    model: Decoder | Streamed | Meshed, ids: Sequence[int], new: int, drawn: bool
) -> tuple[Decoder, Forward, int]:
    """The decoder, what plays its steps, and how many tokens of a prompt are fed at once."""
    if isinstance(model, Meshed):
        return model.decoder, model.relay, PREFILL_TOKENS
    if not isinstance(model, Streamed):
        return model, TokenPlayer(model), PREFILL_TOKENS
    check_request(model.decoder, ids, new)
    reading = model.ready(Request(len(ids), new, drawn))
    assert model.outlook is not None
    return model.decoder, reading, model.outlook.fit.slice


def tokenizer_of(
    model: Decoder | Streamed | Meshed, named: str | Path | Tokenizer | None = None
) -> Tokenizer:
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
