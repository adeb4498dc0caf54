"""The state of a run in its checkpoints: saved under Hugging Face names, restored bit for bit.

A checkpoint is a Hugging Face directory (config, weights, tokenizer) with the optimizer's state
beside it. Training draws no random numbers of its own: initial values and the data's order follow
from (seed, name or sample), so the seed and the step are the whole random state.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outsize.checkpoint.manifest import JSON, as_json
from outsize.checkpoint.opened import Checkpoint
from outsize.checkpoint.store import Store
from outsize.data import Cursor
from outsize.errors import OutsizeError
from outsize.models.config import DecoderConfig
from outsize.models.names import Stored, layout
from outsize.runtime import Job
from outsize.train.config import MAY_CHANGE
from outsize.train.resolve import Resolved
from outsize.train.tokenizer_files import write_tokenizer

WEIGHTS, OPTIMIZER = "weights", "optimizer"
KIND = "outsize training run"


@dataclass(frozen=True)
class Place:
    """Where a run is: step updates done, of `steps`; tokens: targets trained on so far."""

    step: int
    steps: int
    tokens: int
    cursor: Cursor

    @property
    def finished(self) -> bool:
        return self.step >= self.steps


def save(store: Store, job: Job, config: DecoderConfig, resolved: Resolved, place: Place) -> Path:
    """Save the checkpoint of `place`; returns where. OutsizeError where the system refuses."""

    def files(directory: Path) -> None:
        source = dict(config.source)
        dtype = str(job.weights_dtype).removeprefix("torch.")
        keys = [key for key in ("dtype", "torch_dtype") if key in source] or ["torch_dtype"]
        text = json.dumps(source | dict.fromkeys(keys, dtype), indent=2)
        (directory / "config.json").write_text(text + "\n", encoding="utf-8")
        write_tokenizer(resolved.get("data.tokenizer"), directory)

    return store.save(place.step, _tensors(job, layout(config)), _meta(job, resolved, place), files)


def restore(checkpoint: Checkpoint, job: Job, config: DecoderConfig) -> Place:
    """Put a checkpoint's weights, optimizer state and counts into a job; returns where it was.

    OutsizeError, naming the tensor, for one of another model or optimizer.
    """
    _check_names(checkpoint, job, layout(config))
    entries = {name: entry for entry in layout(config) for name in entry.ours}
    last: dict[str, Tensor] = {}  # of the entry that was split last: its parameters come together

    def value(name: str) -> Tensor:
        if name not in last:
            entry = entries[name]
            theirs = tuple(checkpoint.tensor(WEIGHTS, other) for other in entry.theirs)
            last.clear()
            last.update(zip(entry.ours, entry.split(theirs), strict=True))
        return _fitting(checkpoint, name, job.owners[name], last[name])

    def state(name: str, out: Tensor) -> None:
        checkpoint.tensor(OPTIMIZER, name, out=out)

    job.load(value, state)
    job.restore_counts(_counts(checkpoint.meta.get("updates"), job.owners))
    return place_of(checkpoint)


def place_of(checkpoint: Checkpoint) -> Place:
    """Where the run of a checkpoint was. OutsizeError for what is no checkpoint of a run."""
    meta = checkpoint.meta
    numbers = [meta.get(name) for name in ("steps", "tokens")]
    if meta.get("kind") != KIND or not all(isinstance(n, int) for n in numbers):
        raise OutsizeError(f"{checkpoint.path} is not the checkpoint of a training run")
    steps, tokens = numbers
    assert isinstance(steps, int) and isinstance(tokens, int)
    return Place(checkpoint.step, steps, tokens, Cursor.from_json(meta.get("cursor")))


def same_run(checkpoint: Checkpoint, resolved: Resolved) -> None:
    """Refuse to go on with values that would give other numbers. Names the first that differs."""
    then = checkpoint.meta.get("config")
    if not isinstance(then, dict):
        raise OutsizeError(f"{checkpoint.path} is not the checkpoint of a training run")
    for name, now in _values(resolved).items():
        if name not in MAY_CHANGE and then.get(name) != now:
            raise OutsizeError(
                f"{name} is {now!r}, but the checkpoint {checkpoint.path} was trained with"
                f" {then.get(name)!r}: set it back, or start a new run in another directory"
            )


def _values(resolved: Resolved) -> dict[str, JSON]:
    return {name: as_json(resolved.get(name), name) for name, *_ in resolved.rows()}


def _meta(job: Job, resolved: Resolved, place: Place) -> Mapping[str, JSON]:
    return {
        "kind": KIND,
        "steps": place.steps,
        "tokens": place.tokens,
        "finished": place.finished,
        "cursor": dict(place.cursor.to_json()),
        "random": {"seed": resolved.get("train.seed"), "counter": place.step},
        "updates": dict(job.update_counts()),
        "config": _values(resolved),
        "torch": torch.__version__,
    }


def _tensors(job: Job, stored: tuple[Stored, ...]) -> Iterator[tuple[str, str, Tensor]]:
    """(group, name, tensor) in Hugging Face's names; copies exist for one entry at a time."""
    weights = job.weight_reader()
    for entry in stored:
        theirs = entry.merge(tuple(weights(name) for name in entry.ours))
        for name, tensor in zip(entry.theirs, theirs, strict=True):
            yield WEIGHTS, name, tensor
    for name, tensor in job.optimizer_state():
        yield OPTIMIZER, name, tensor


def _check_names(checkpoint: Checkpoint, job: Job, stored: tuple[Stored, ...]) -> None:
    """Everything is there, and nothing else, before anything is overwritten."""
    wanted = {
        WEIGHTS: {name for entry in stored for name in entry.theirs},
        OPTIMIZER: set(job.state_names()),
    }
    for group, names in wanted.items():
        found = set(checkpoint.names(group))
        for name in sorted(names ^ found):
            what = "lacks" if name in names else "has an unexpected"
            raise OutsizeError(
                f"checkpoint {checkpoint.path} {what} tensor {name!r} of its {group}; expected a"
                " checkpoint of the same model and optimizer"
            )


def _fitting(checkpoint: Checkpoint, name: str, owner: Tensor, found: Tensor) -> Tensor:
    if owner.shape != found.shape:
        raise OutsizeError(
            f"checkpoint {checkpoint.path}: {name} has shape {tuple(found.shape)}, expected"
            f" {tuple(owner.shape)}: it is of another model"
        )
    return found


def _counts(found: Any, weights: Mapping[str, object]) -> dict[str, int]:
    good = isinstance(found, dict) and all(
        name in weights and isinstance(count, int) for name, count in found.items()
    )
    if not good:
        raise OutsizeError("checkpoint: its counts of updates are not those of this model")
    return dict(found)
