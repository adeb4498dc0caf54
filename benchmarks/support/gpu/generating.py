"""Tokens/s of one sequence, with the weights on the device and larger than what it may hold."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support.gpu.place import Place
from support.gpu.shapes import config_of, ids_of, native_draw, parameters
from support.gpu.training import llama_of
from torch import Tensor

from outsize.api import engine, generate, load
from outsize.checkpoint import hub
from outsize.models.build import build, materialise, segments, shells
from outsize.serve.model import Model


def written(place: Place, shape: str) -> dict[str, Any]:
    """A model in bfloat16 as a Hugging Face directory, for the cases behind this one."""
    folder = folder_of(place, shape)
    model = build(config_of(shape), None, torch.bfloat16)
    draw = native_draw(model.config, place.device)
    begin = time.perf_counter()
    for segment, _ in segments(model):
        materialise(model, segment, partial(made, draw, "cpu"))
    hub.save(model, folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    return {"bytes": size, "seconds": time.perf_counter() - begin}


def folder_of(place: Place, shape: str) -> Path:
    return Path(place.folder, f"model-{shape}")


def prompt_of(shape: str, length: int) -> list[int]:
    return ids_of(1, length, config_of(shape).vocab, 0)[0].tolist()


def opened(place: Place, shape: str, share: float | None) -> Model:
    """The model of the files that were written; where none were, with its values drawn here."""
    folder = folder_of(place, shape)
    if not folder.is_dir():
        config, device = config_of(shape), place.device
        model = shells(config, torch.bfloat16, device)
        draw = native_draw(config, device)
        for segment, _ in segments(model):
            materialise(model, segment, partial(made, draw, device))
        return Model(model)
    memory = None if share is None else int(share * bytes_of(place, shape))
    return load(folder, device=place.device, memory=memory, disk=memory and place.folder)


def made(draw: Any, device: torch.device | str, name: str, parameter: Tensor) -> Tensor:
    """The values of a parameter, on a device."""
    out = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    draw(name, out)
    return out


def bytes_of(place: Place, shape: str) -> int:
    """Of all weights."""
    return 2 * parameters(shape)


def ours(
    place: Place, shape: str, prompt: int, tokens: int, share: float | None = None
) -> dict[str, Any]:
    """Outsize, greedy. share: of the bytes of the weights, what the device may hold; None: all are
    there."""
    ids, size = prompt_of(shape, prompt), bytes_of(place, shape)
    with opened(place, shape, share) as model:
        found = _timed(place, tokens, lambda count: list(generate(model, ids, count)))
        said = "" if model.home is None else str(model.home)
    budget = None if share is None else int(share * size)
    return {**found, "weights": size, "budget": budget, "plan": said, **read(place, found, size)}


def together(place: Place, shape: str, prompt: int, tokens: int, requests: int) -> dict[str, Any]:
    """Outsize's engine, so many requests at once; tokens/s of all."""
    ids, size = prompt_of(shape, prompt), bytes_of(place, shape)
    prompts = [[(i + n) % config_of(shape).vocab for i in ids] for n in range(requests)]
    model = opened(place, shape, None)
    room = prompt + tokens + 2
    with engine(model, context=room, requests=requests) as served:

        def run(count: int) -> list[int]:
            return list(served.generate(prompts, count)[0])

        found = _timed(place, tokens, run, requests)
    return {**found, "weights": size, **read(place, found, size, requests)}


def read(place: Place, found: dict[str, Any], size: int, requests: int = 1) -> dict[str, Any]:
    """The part of the memory's bytes/s that reading all weights once a step comes to."""
    (device,) = place.hardware().devices
    steps = found["tokens/s"] and found["tokens/s"] / requests
    return {"of the bandwidth": steps and steps * size / device.bandwidth.value}


def theirs(place: Place, shape: str, prompt: int, tokens: int, requests: int = 1) -> dict[str, Any]:
    """transformers' own generate, greedy, with its cache."""
    from transformers import AutoModelForCausalLM

    folder, ids = folder_of(place, shape), prompt_of(shape, prompt)
    if folder.is_dir():
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        model = model.to(place.device).eval()
    else:
        model = llama_of(shape, place, torch.bfloat16).eval()
    vocab = config_of(shape).vocab
    given = torch.tensor(
        [[(i + n) % vocab for i in ids] for n in range(requests)], device=place.device
    )

    @torch.no_grad()
    def run(count: int) -> list[int]:
        made = model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=count,
            min_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        return list(made[0, len(ids) :].tolist())

    found = _timed(place, tokens, run, requests)
    return {**found, **read(place, found, bytes_of(place, shape), requests)}


def _timed(place: Place, tokens: int, run: Any, requests: int = 1) -> dict[str, Any]:
    """Tokens/s of all requests without their first token: the time of `tokens` + 1 less that of
    one, which has the prompt in it, the second time each. None where that is no time at all."""
    found = list[int]()
    place.forget_peak()

    def seconds(count: int) -> float:
        def request(_: int) -> float:
            found[:] = run(count)
            return 0.0

        return place.times(request, 2)[0][1]

    first = seconds(1)
    spent = seconds(tokens + 1) - first
    return {
        "tokens/s": requests * tokens / spent if spent > 0 else None,
        "first token": first,
        "peak": place.peak(),
        "tokens": found,
    }
