"""Tokens/s of one sequence, with the weights on the device and larger than what it may hold."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from support.gpu.place import Place
from support.gpu.shapes import config_of, ids_of, native_draw
from torch import Tensor

from outsize.api import generate, load
from outsize.checkpoint import hub
from outsize.models.build import build, materialise, segments


def written(place: Place, shape: str) -> dict[str, Any]:
    """A model in bfloat16 as a Hugging Face directory, for the cases behind this one."""
    folder = folder_of(place, shape)
    model = build(config_of(shape), None, torch.bfloat16)
    draw = native_draw(model.config, place.device)

    def made(name: str, parameter: Tensor) -> Tensor:
        out = torch.empty(parameter.shape, dtype=parameter.dtype)
        draw(name, out)
        return out

    begin = time.perf_counter()
    for segment, _ in segments(model):
        materialise(model, segment, made)
    hub.save(model, folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    return {"bytes": size, "seconds": time.perf_counter() - begin}


def folder_of(place: Place, shape: str) -> Path:
    return Path(place.folder, f"model-{shape}")


def prompt_of(shape: str, length: int) -> list[int]:
    return ids_of(1, length, config_of(shape).vocab, 0)[0].tolist()


def ours(
    place: Place, shape: str, prompt: int, tokens: int, share: float | None = None
) -> dict[str, Any]:
    """Outsize, greedy. share: of the bytes of the weights, what the device may hold; None: all are
    there."""
    folder = folder_of(place, shape)
    bytes_of = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    memory = None if share is None else int(share * bytes_of)
    ids = prompt_of(shape, prompt)
    model = load(folder, device=place.device, memory=memory, disk=memory and place.folder)
    with model:
        found = _timed(place, tokens, lambda count: list(generate(model, ids, count)))
        said = "" if model.home is None else str(model.home)
    return {**found, "weights": bytes_of, "budget": memory, "plan": said}


def theirs(place: Place, shape: str, prompt: int, tokens: int) -> dict[str, Any]:
    """transformers' own generate, greedy, with its cache."""
    from transformers import AutoModelForCausalLM

    folder, ids = folder_of(place, shape), prompt_of(shape, prompt)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = model.to(place.device).eval()
    given = torch.tensor([ids], device=place.device)

    @torch.no_grad()
    def run(count: int) -> list[int]:
        made = model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=count,
            min_new_tokens=count, do_sample=False, pad_token_id=0,
        )  # fmt: skip
        return list(made[0, len(ids) :].tolist())

    return _timed(place, tokens, run)


def _timed(place: Place, tokens: int, run: Any) -> dict[str, Any]:
    """Tokens/s of all but the first token: the time of `tokens` + 1 less that of one, which has
    the prompt in it, the second time each. None where that is no time at all."""
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
        "tokens/s": tokens / spent if spent > 0 else None,
        "first token": first,
        "peak": place.peak(),
        "tokens": found,
    }
