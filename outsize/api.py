"""What `import outsize` offers to load, save and generate."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from outsize import accelerator
from outsize.checkpoint import adapters, hub
from outsize.checkpoint.adapters import ADAPTER_CONFIG, model_directory
from outsize.collectives.mesh import Mesh, parse_mesh
from outsize.data.tokenizer import Tokenizer
from outsize.decode.samplers import Sampling
from outsize.errors import OutsizeError
from outsize.memory.sizes import parse_bytes
from outsize.models.coding import asked
from outsize.models.decoder import Decoder
from outsize.serve.model import Model, tokenizer_of

if TYPE_CHECKING:
    from outsize.models.adapter import Adapter
    from outsize.serve.texts import TextEngine

__all__ = ["Model", "adapt", "engine", "generate", "load", "merge", "remove_adapter", "save"]

M = TypeVar("M", bound=nn.Module)


def load(
    path: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    weights: str = "required",
    seed: int = 0,
    *,
    memory: str | int | None = None,
    disk: str | Path | None = None,
    sparse: bool = False,
    mesh: str | Mesh | None = None,
) -> Model:
    """The model of a run, of one of its checkpoints, or of a Hugging Face decoder directory, an
    nn.Module: `model(input_ids) -> logits`, `model.generate(prompt)`.

    dtype None keeps that of the files. device: "auto", "cpu" (None, too) or an accelerator's kind,
    with an index or without. weights="random" takes the config.json alone and draws
    initial values from `seed`; "int4" or another of `outsize keys weights` (int4:32: with groups of
    32) has the blocks' matrices as codes of so few bits, quantised while they are read, and with
    "+head" behind it the head as codes of 8, with "+a8" what codes are multiplied by rounded to 8
    bits, with "+outliers" but for those of magnitude 6 or more; "plain" as they are, of a run whose
    base is held so.
    Memory while loading is the model and one block. Raises OutsizeError naming file and tensor for
    what is unknown, missing or damaged.

    memory ("2GiB"): most bytes of tensors on the device. The model may be larger: its weights stay
    in its files and are read as they are needed, with the same logits and tokens. disk: the
    folder for weights that must be converted first (transposed ones, another dtype), the system's
    for temporary files by default; sparse: keep those of a pruned model there as bitmap images.

    mesh ("pipeline=2,tensor=2"), under torchrun: every worker calls this and has its own part of
    the weights alone, with memory within a budget of its own; what all call alike gives the same
    logits and tokens.
    """
    directory, device = model_directory(path), accelerator.named(device)
    if memory is None and (disk is not None or sparse):
        raise OutsizeError("disk and sparse go with memory; pass memory='2GiB' or leave them")
    if weights == "random" and (memory, mesh) != (None, None):
        other = "mesh" if memory is None else "memory"
        raise OutsizeError(
            f"weights = {weights!r} with {other}; expected 'required': values are read from files"
        )
    held = None if weights in ("required", "random") else weights
    if mesh is None and memory is None:
        if weights == "random":
            return Model(hub.load(directory, dtype, device, "random", seed))
        config = asked(adapters.read_config(directory), held, "weights")
        return Model(adapters.load(directory, dtype, device, config))
    from outsize.serve.files import Limits
    from outsize.serve.load import opened

    limits = None if memory is None else Limits(parse_bytes(memory), disk, sparse)
    axes = parse_mesh(mesh) if isinstance(mesh, str) else mesh or Mesh()
    return opened(directory, axes, limits, dtype, device, held)


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
    text in pieces as it comes. The workers of a mesh all call this alike and have the same text.
    Raises OutsizeError for settings out of range, and for a budget that is too small.
    """
    if not isinstance(model, Decoder):
        raise OutsizeError(
            f"model is a {type(model).__name__}; expected what outsize.load(path) gives"
        )
    able = model if isinstance(model, Model) else Model(model)
    sampling = Sampling(temperature, top_k, top_p, seed)
    return able.generate(prompt, max_tokens, sampling, stop, tokenizer, on_text)


def engine(
    path: str | Path | Model,
    *,
    memory: str | int | None = None,
    context: int | None = None,
    requests: int = 16,
    weights: str = "required",
    dtype: torch.dtype | None = None,
    tokenizer: str | Path | Tokenizer | None = None,
    policy: str = "mixed",
    draft: str | None = None,
    cache: str = "as-stored",
) -> TextEngine:
    """A model that many ask at once: `with outsize.engine(path) as engine: engine.generate([...])`.

    What each gets is bit for bit what it would get alone, in float32 and bfloat16 on a CPU. memory:
    most bytes of tensors; weights beyond it stay in their files, and are read once a step whatever
    the step feeds; context: tokens of a request; requests: that go at once; weights, dtype: as of
    `load`; policy: what a step feeds (mixed, prompt-first, first-come, decode-maximal, fixed,
    feedback, fair, deadline), behind a colon with what is promised, as
    "deadline:ttft=500ms,tpot=50ms": steps are no longer than tpot, and who would wait longer than
    ttft is refused; draft: lookup, which has a step look at several tokens where the text repeats
    itself, without another result; cache: keys and values as stored, or rounded to bf16, int8 or
    int4; contiguous, or +contiguous behind one of these: each request's one behind another, not in
    pages. OutsizeError where the memory is too small, with what is missing.

    path may be what `load` gives, which is closed with the engine: on another device; on a mesh,
    `outsize.engine(outsize.load(path, mesh="tensor=2"))`, all workers make one, and the one that
    `engine.leads` is asked.
    """
    from outsize.models.packing import pack
    from outsize.serve.changed import watched
    from outsize.serve.policies import parse_policy
    from outsize.serve.room import Wanted
    from outsize.serve.texts import TextEngine

    name, slo = parse_policy(policy)
    wanted = Wanted(context, requests, drafts=draft is not None, slo=slo, cache=cache)
    if not isinstance(path, Model):
        model = load(path, dtype, weights=weights, memory=memory)
        pack(model)
    elif (memory, weights, dtype) == (None, "required", None):
        model = path
    else:
        raise OutsizeError("engine: memory, weights and dtype of a model are load's")
    try:
        try:
            text = tokenizer_of(model, tokenizer)
        except OutsizeError:
            if tokenizer is not None:
                raise
            text = None  # prompts of token ids need none
        return TextEngine(
            model, text, wanted, name, draft, watched(model) if model is path else None
        )
    except BaseException:
        model.close()
        raise


def save(
    model: nn.Module,
    path: str | Path,
    max_shard_bytes: int = hub.MAX_SHARD_BYTES,
    *,
    adapter_only: bool = False,
) -> None:
    """Write a model that `load` gave as a Hugging Face directory, with checksums in outsize.json
    beside it; of a model with an adapter the adapter alone, as peft has it (`merge` makes a plain
    model of it). The directory appears complete or not at all.

    adapter_only: what any module has of `adapt`, and nothing else. OutsizeError for a directory
    that exists and is not empty, for other modules, and where the system refuses.
    """
    if adapter_only and isinstance(model, Decoder) and model.config.adapter is None:
        raise OutsizeError("save: the model has no adapter; expected one of outsize.adapt")
    if adapter_only and not isinstance(model, Decoder):
        from outsize.checkpoint import plugged

        plugged.save(model, path)
        return
    if not isinstance(model, Decoder):
        raise OutsizeError(
            f"save: model is a {type(model).__name__}; expected a decoder of outsize.load. What"
            " outsize.prepare trains is written by job.save(path), other modules by torch.save,"
            " what outsize.adapt put into them with adapter_only=True"
        )
    if isinstance(max_shard_bytes, bool) or not isinstance(max_shard_bytes, int):
        raise OutsizeError(f"max_shard_bytes is {max_shard_bytes!r}; expected a number of bytes")
    adapters.save(model, path, max_shard_bytes)


def adapt(
    model: M,
    adapter: str | Path | Mapping[str, Mapping[str, object]],
    seed: int = 0,
    **settings: object,
) -> M:
    """Freeze a model and put an adapter beside its weights, which `prepare` then trains alone.
    Gives the same object. Any module will do: its linear layers (targets=["*.q_proj"]) and branches
    (behind=["*.mlp"]) are named by their paths where a decoder of `load` has parts of its blocks
    (targets=["attention"]).

    adapter: "dora", its settings by name (rank=16), or as a run's file says it, {"dora": {"rank":
    16}}; `outsize keys adapt` lists what there is. Or a directory of a trained one, as `save` and
    peft write it. seed: of the initial values. OutsizeError for unknown settings and for a model
    that cannot be adapted.
    """
    _check_module(model, "adapt")
    directory = Path(adapter) if isinstance(adapter, str | Path) else None
    if directory is not None and (directory / ADAPTER_CONFIG).is_file():
        _put(model, directory)
        return model
    if not isinstance(adapter, str) and settings:
        raise OutsizeError(
            f"adapt: {next(iter(settings))!r} is beside a mapping of settings; expected it in there"
        )
    if isinstance(adapter, Path):
        raise OutsizeError(f"adapt: {adapter} holds no {ADAPTER_CONFIG}; expected an adapter")
    found = _adapter({adapter: settings or True} if isinstance(adapter, str) else adapter)
    if isinstance(model, Decoder):
        from outsize.models.build import adapt as adapted

        hub.check_here(model)
        adapted(model, found, seed)
        return model
    from outsize.models.plugged import fits, plug

    if not fits(found):
        raise OutsizeError(
            f"adapt: {adapter!r} changes more than layers and branches, which a"
            f" {type(model).__name__} cannot have; expected a decoder of outsize.load"
        )
    plug(model, found, seed)
    return model


def _put(model: nn.Module, directory: Path) -> None:
    if isinstance(model, Decoder):
        adapters.put(model, directory)
        return
    from outsize.checkpoint import plugged

    plugged.load(model, directory)


def _adapter(said: Mapping[str, object]) -> Adapter:
    from outsize.train.model import adapter_of
    from outsize.train.resolve import Resolved, apply_values

    found = adapter_of(apply_values(Resolved(), {"adapt": said}, "adapt").config)
    if found is None:
        raise OutsizeError(
            f"adapt: {said!r} names no adapter; expected one that `outsize keys adapt` lists"
        )
    return found


def merge(model: M) -> M:
    """The plain model that computes what a model with an adapter does: the same object, its weights
    changed. It generates at the cost of the plain model, and `save` writes all of it."""
    if isinstance(model, Decoder):
        hub.check_here(model)
        adapters.merge(model)
        return model
    from outsize.models import plugged

    _check_adapted(model, "merge")
    plugged.merge(model)
    return model


def remove_adapter(model: M) -> M:
    """Take an adapter out of a model: the same object, every bit of it as it was before `adapt`."""
    if isinstance(model, Decoder):
        adapters.remove(model)
        return model
    from outsize.models import plugged

    _check_adapted(model, "remove_adapter")
    plugged.unplug(model)
    return model


def _check_adapted(model: nn.Module, what: str) -> None:
    from outsize.models.plugged import record_of

    _check_module(model, what)
    if record_of(model) is None:
        raise OutsizeError(
            f"{what}: the {type(model).__name__} has no adapter; expected one of outsize.adapt"
        )


def _check_module(model: object, what: str) -> None:
    if not isinstance(model, nn.Module):
        raise OutsizeError(f"{what}: model is a {type(model).__name__}; expected an nn.Module")
