"""What `import outsize` offers to load, save and generate."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from outsize.checkpoint import adapters, hub
from outsize.collectives.mesh import Mesh, parse_mesh
from outsize.data.tokenizer import Tokenizer, open_tokenizer
from outsize.decode.generate import PREFILL_TOKENS, TokenStep, check_request, drawing
from outsize.decode.generate import generate as generate_tokens
from outsize.decode.samplers import Sampling
from outsize.decode.text import prompt_ids, stream_text
from outsize.errors import OutsizeError
from outsize.memory.sizes import parse_bytes
from outsize.models.decoder import Decoder
from outsize.runtime.tokens.player import TokenPlayer
from outsize.train.directory import model_directory

if TYPE_CHECKING:
    from outsize.runtime.tokens.streamed import Streamed
    from outsize.serve import Meshed

__all__ = ["adapt", "generate", "load", "merge", "save"]

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
    directory = model_directory(path)
    if mesh is not None:
        others = {"memory": memory, "disk": disk, "sparse": sparse or None}
        others["weights"] = None if weights == "required" else weights
        for name, value in others.items():
            if value is not None:
                raise OutsizeError(
                    f"{name} is {value!r} with mesh, where each worker reads its own part and keeps"
                    " it: leave one of them out"
                )
        from outsize.serve import Meshed

        axes = parse_mesh(mesh) if isinstance(mesh, str) else mesh
        return Meshed.joined(directory, axes, dtype, device)
    if memory is None:
        if disk is not None or sparse:
            raise OutsizeError("disk and sparse go with memory; pass memory='2GiB' or leave them")
        if weights == "required":
            return adapters.load(directory, dtype, device)
        return hub.load(directory, dtype, device, weights, seed)
    if weights != "required":
        raise OutsizeError(
            f"weights = {weights!r} with memory; expected 'required': values are read from files"
        )
    from outsize.runtime.tokens.streamed import Streamed

    return Streamed(directory, parse_bytes(memory), dtype, device, disk, sparse)


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
) -> str | list[int]:
    """What follows a prompt: text for a text, token ids for token ids.

    temperature 0 takes the likeliest token; above it, tokens are drawn, from the top_k likeliest
    and the smallest set of probability top_p where given. A token depends on (seed, its index)
    only. stop: strings before which the text ends. tokenizer: a directory with tokenizer.json, or
    "bytes"; None takes that of the directory which the model was loaded from. on_text sees the
    text in pieces as it comes. The workers of a mesh all call this alike and have the same text.
    Raises OutsizeError for settings out of range, and for a budget that is too small.
    """
    _check_model(model)
    sampling = Sampling(temperature, top_k, top_p, seed)
    return go_on(model, prompt, max_tokens, sampling, stop, tokenizer, on_text)


@torch.no_grad()
def go_on(
    model: Decoder | Streamed | Meshed,
    prompt: str | Sequence[int],
    max_tokens: int,
    sampling: Sampling,
    stop: Collection[str] = (),
    tokenizer: str | Path | Tokenizer | None = None,
    on_text: Callable[[str], None] | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> str | list[int]:
    """`generate` with its draws as one thing. on_ready: called before the first token, with a line
    about what a model within a memory budget keeps and reads, or where one on several workers lies,
    "" for others."""
    if isinstance(prompt, str):
        text = tokenizer_of(model, tokenizer)
        ids: Sequence[int] = prompt_ids(text, prompt)
    else:
        ids = _ids(prompt)
    decoder, player, at_once = _player(model, ids, max_tokens, sampling.temperature > 0)
    if on_ready is not None:
        on_ready(_outlook(model))
    if not isinstance(prompt, str):
        return generate_tokens(
            decoder, ids, max_tokens, sampling, step=player, prefill_tokens=at_once
        )
    pieces = []
    for piece in stream_text(
        decoder, text, ids, max_tokens, sampling, stop, step=player, prefill_tokens=at_once
    ):
        pieces.append(piece)
        if on_text is not None:
            on_text(piece)
    return "".join(pieces)


def save(model: Decoder, path: str | Path, max_shard_bytes: int = hub.MAX_SHARD_BYTES) -> None:
    """Write a model that `load` gave as a Hugging Face directory, with checksums in outsize.json
    beside it; of a model with an adapter the adapter alone, as peft has it (`merge` makes a plain
    model of it). The directory appears complete or not at all.

    OutsizeError for one that exists and is not empty, for other modules, and where the system
    refuses.
    """
    if not isinstance(model, Decoder):
        raise OutsizeError(
            f"save: model is a {type(model).__name__}; expected a decoder of outsize.load. What"
            " outsize.prepare trains is written by job.save(path), other modules by torch.save"
        )
    if isinstance(max_shard_bytes, bool) or not isinstance(max_shard_bytes, int):
        raise OutsizeError(f"max_shard_bytes is {max_shard_bytes!r}; expected a number of bytes")
    adapters.save(model, path, max_shard_bytes)


def adapt(model: Decoder, adapter: Mapping[str, Mapping[str, object]], seed: int = 0) -> Decoder:
    """Freeze a model and put an adapter beside its weights, as a run's file says it: `prepare` then
    trains the adapter alone. Gives the same object.

    adapter: {"lora": {"rank": 16}}; `outsize keys adapt` lists what there is. seed: of the initial
    values. OutsizeError for unknown settings and for a model that cannot be adapted.
    """
    from outsize.models.build import adapt as adapted
    from outsize.train.model import adapter_of
    from outsize.train.resolve import Resolved, apply_values

    _check_decoder(model, "adapt")
    found = adapter_of(apply_values(Resolved(), {"adapt": adapter}, "adapt").config)
    if found is None:
        raise OutsizeError(f"adapt: {adapter!r} names no adapter; expected {{'lora': {{}}}}")
    return adapted(model, found, seed)


def merge(model: Decoder) -> Decoder:
    """The plain model that computes what a model with an adapter does: the same object, its weights
    changed. It generates at the cost of the plain model, and `save` writes all of it."""
    _check_decoder(model, "merge")
    return adapters.merge(model)


def _check_decoder(model: object, what: str) -> None:
    if not isinstance(model, Decoder):
        raise OutsizeError(
            f"{what}: model is a {type(model).__name__}; expected a decoder of outsize.load,"
            " without memory or mesh"
        )


def _check_model(model: object) -> None:
    """OutsizeError for what `load` does not give."""
    if isinstance(model, Decoder):
        return
    from outsize.runtime.tokens.streamed import Streamed
    from outsize.serve import Meshed

    if not isinstance(model, (Streamed, Meshed)):
        raise OutsizeError(
            f"model is a {type(model).__name__}; expected what outsize.load(path) gives"
        )


def _ids(prompt: Sequence[int] | Tensor) -> list[int]:
    """The token ids of a prompt that is no text."""
    given = prompt.tolist() if isinstance(prompt, Tensor) else prompt
    whole = isinstance(given, Sequence) and all(
        isinstance(i, Integral) and not isinstance(i, bool) for i in given
    )
    if not whole:
        raise OutsizeError(
            f"prompt is {_short(prompt)}; expected a text, or token ids as a list of whole numbers"
        )
    return [int(token) for token in given]


def _short(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


def _outlook(model: Decoder | Streamed | Meshed) -> str:
    """What is said of a model before its first token."""
    if isinstance(model, Decoder):
        return ""
    from outsize.serve import Meshed

    return str(model) if isinstance(model, Meshed) else str(model.outlook)


def _player(
    model: Decoder | Streamed | Meshed, ids: Sequence[int], new: int, drawn: bool
) -> tuple[Decoder, TokenStep, int]:
    """The decoder, what plays its steps, and how many tokens of a prompt are fed at once."""
    if isinstance(model, Decoder):
        return model, drawing(TokenPlayer(model)), PREFILL_TOKENS
    from outsize.runtime.tokens.fit import Request
    from outsize.serve import Meshed

    if isinstance(model, Meshed):
        return model.decoder, model.spread.steps, PREFILL_TOKENS
    check_request(model.decoder, ids, new)
    reading = model.ready(Request(len(ids), new, drawn))
    assert model.outlook is not None
    return model.decoder, drawing(reading), model.outlook.fit.slice


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
