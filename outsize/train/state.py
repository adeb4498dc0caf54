"""The state of a run in its checkpoints: saved under Hugging Face names, restored bit for bit.

A checkpoint is a Hugging Face directory (config, weights, tokenizer) with the optimizer's state
beside it. Training draws no random numbers of its own: initial values and the data's order follow
from (seed, name or sample), so the seed and the step are the whole random state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outsize.checkpoint.adapters import ADAPTER_CONFIG, to_json
from outsize.checkpoint.adapters import GROUP as ADAPTER
from outsize.checkpoint.bases import BASE
from outsize.checkpoint.contents import Named, merged
from outsize.checkpoint.hub import write_config
from outsize.checkpoint.manifest import JSON, as_json
from outsize.checkpoint.opened import Checkpoint
from outsize.checkpoint.store import Store
from outsize.checkpoint.writing import Later, write_json
from outsize.data import Cursor
from outsize.errors import OutsizeError, nearest
from outsize.models.build import initial_draw, rest
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder
from outsize.models.names import Stored, adapter_layout, layout
from outsize.runtime.job import Fill, Job
from outsize.texts import write_text
from outsize.train.config import MOVED, RENAMED, RunConfig, may_change, restated
from outsize.train.derive import warmup_now
from outsize.train.first_values import filling, hub_fill, reading
from outsize.train.recipe import files_of
from outsize.train.resolve import Resolved
from outsize.train.tokenizer_files import write_tokenizer

WEIGHTS, OPTIMIZER, UPDATES, NOTES = "weights", "optimizer", "updates", "notes"
KIND = "outsize training run"
Read = Callable[[str, str | None], Tensor]  # by a parameter's name and that of a state of it


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


def save(
    store: Store,
    job: Job,
    config: DecoderConfig,
    resolved: Resolved,
    place: Place,
    base: str | None = None,
) -> Path:
    """Save the checkpoint of `place`; returns where. base: the fingerprint of what an adapter is
    beside. OutsizeError where the system refuses."""

    def files(directory: Path) -> None:
        write_model(directory, job, config, Path(resolved.get("model.name")).expanduser())
        write_tokenizer(resolved.get("data.tokenizer"), directory)
        for name, text in files_of(resolved.config).items():
            write_text(text, directory / name)

    meta = dict(_meta(job, resolved, place))
    if base is not None:
        meta[BASE] = base
    return store.save(place.step, tensors_of(job, config), meta, files)


def write_model(directory: Path, job: Job, config: DecoderConfig, base: Path | None) -> None:
    """The configs beside a decoder's weights. base: the directory of what an adapter leaves."""
    write_config(directory, config, job.weights_dtype)
    if config.adapter is not None:
        write_json(directory / ADAPTER_CONFIG, to_json(config, base))


def trained(config: DecoderConfig) -> tuple[str, tuple[Stored, ...]]:
    """What a run trains, as it rests in files: all of the model, or an adapter beside it; and the
    group of its tensors in a checkpoint."""
    if config.adapter is None:
        return WEIGHTS, layout(config)
    return ADAPTER, adapter_layout(config)


def join_saving(job: Job, config: DecoderConfig) -> None:
    """What the other workers do while the first saves: each has parts of what it writes."""
    job.update_counts()
    make_all(tensors_of(job, config))


def make_all(tensors: Iterable[Named]) -> None:
    """Give the worker that writes tensors what this one has of them."""
    for _, _, tensor in tensors:
        if isinstance(tensor, Later):
            tensor.make()


def restore(checkpoint: Checkpoint, job: Job) -> Place:
    """Put a checkpoint's optimizer state and counts into a job that was filled with its weights
    (`weights_of`); returns where it was. OutsizeError as of `restore_states`."""
    restore_states(checkpoint, job, None)
    return place_of(checkpoint)


def restore_states(checkpoint: Checkpoint, job: Job, weights: Fill | None) -> None:
    """Put a checkpoint's optimizer states and counts into a job, and the weights that `weights`
    writes; None: they stay. OutsizeError, naming the tensor, for one of another optimizer."""
    where = f"checkpoint {checkpoint.path}"
    job.method.recall(checkpoint.meta)  # which may train other parameters then
    check_names(where, OPTIMIZER, checkpoint.names(OPTIMIZER), set(job.state_names()))
    job.load(weights, partial(checkpoint.tensor, OPTIMIZER))
    job.restore_counts(_counts(checkpoint.meta.get(UPDATES), job.owners))


def copied(job: Job, device: str | None = None) -> dict[str, Any]:
    """Copies of a job's weights and optimizer states by name, where they are or on a device, with
    the counts of updates and the notes of its method. Every worker calls it."""

    def copies(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        return {name: tensor.to(device or tensor.device, copy=True) for name, tensor in tensors}

    states = {WEIGHTS: copies(job.weights()), OPTIMIZER: copies(job.optimizer_state())}
    return {**states, UPDATES: dict(job.update_counts()), NOTES: job.method.notes()}


def give(job: Job, states: Mapping[str, Any]) -> None:
    """Put what `copied` gave into a job of the same model and optimizer."""
    job.method.recall(states.get(NOTES, {}))

    def fill(group: str, name: str, out: Tensor) -> None:
        out.copy_(states[group][name])

    job.load(partial(fill, WEIGHTS), partial(fill, OPTIMIZER))
    job.restore_counts(dict(states[UPDATES]))


def weights_of(checkpoint: Checkpoint, config: DecoderConfig) -> Fill:
    """Writes a checkpoint's weights into tensors, by parameter name, for a job to be filled with.

    OutsizeError, naming the tensor, where the checkpoint is of another model.
    """
    group, stored = trained(config)
    names = {name for entry in stored for name in entry.theirs}
    check_names(f"checkpoint {checkpoint.path}", group, checkpoint.names(group), names)
    return filling(stored, partial(checkpoint.tensor, group))


def place_of(checkpoint: Checkpoint) -> Place:
    """Where the run of a checkpoint was. OutsizeError for what is no checkpoint of a run."""
    meta = checkpoint.meta
    numbers = [meta.get(name) for name in ("steps", "tokens")]
    if meta.get("kind") != KIND or not all(isinstance(n, int) for n in numbers):
        raise OutsizeError(f"{checkpoint.path} is not the checkpoint of a training run")
    steps, tokens = numbers
    assert isinstance(steps, int) and isinstance(tokens, int)
    return Place(checkpoint.step, steps, tokens, Cursor.from_json(meta.get("cursor")))


def same_run(checkpoint: Checkpoint, resolved: Resolved) -> dict[str, tuple[Any, Any]]:
    """What a run goes on with otherwise though it changes numbers, by key, with what it was and is.
    OutsizeError, naming the first, for what cannot change."""
    then = checkpoint.meta.get("config")
    if not isinstance(then, dict):
        raise OutsizeError(f"{checkpoint.path} is not the checkpoint of a training run")
    steps, changed = resolved.get("train.steps"), dict[str, tuple[Any, Any]]()
    then = {RENAMED.get(name, MOVED.get(name, name)): value for name, value in then.items()}
    for name, now in _values(resolved).items():
        derived = name == "learning_rate.warmup" and now == warmup_now(then, steps)
        if may_change(name) or then.get(name) == now or derived:
            continue
        if not restated(name):
            raise OutsizeError(
                f"{name} is {now!r}, but the checkpoint {checkpoint.path} was trained with"
                f" {then.get(name)!r}: set it back, or start a new run in another directory"
            )
        changed[name] = (then.get(name), now)
    return changed


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
        "config": _values(resolved),
        "torch": torch.__version__,
        **notes_of(job),
    }


def notes_of(job: Job) -> dict[str, JSON]:
    """What a checkpoint keeps of a job beside tensors."""
    notes: dict[str, JSON] = {n: dict(values) for n, values in job.method.notes().items()}
    return {UPDATES: dict(job.update_counts()), **notes}


def tensors_of(job: Job, config: DecoderConfig) -> Iterator[Named]:
    """(group, name, tensor) in Hugging Face's names, each made when it is written: of what rests
    below the device there is one state of one chunk at a time, and one merged entry. What is not
    trained has no master copy, and is written as wide as what is."""
    read = job.reader()
    group, stored = trained(config)

    def weight(name: str) -> Tensor:
        return read(name, None).to(rest(name, job.weights_dtype))

    for name, later in merged(stored, partial(_shape_of, job), weight):
        yield group, name, later
    yield from optimizer_tensors(job, read)


def optimizer_tensors(job: Job, read: Read) -> Iterator[Named]:
    """(group, name, tensor) of a job's optimizer states, read by parameter and state."""
    for name in job.state_names():
        owner, _, state = name.rpartition(".")
        shape, dtype = job.form(owner, state)
        yield OPTIMIZER, name, Later(dtype, shape, partial(read, owner, state))


def _shape_of(job: Job, name: str) -> Tensor:
    """A weight without its values."""
    dtype = rest(name, job.weights_dtype)
    return torch.empty(job.shape(name), dtype=dtype, device="meta")


def check_names(where: str, group: str, found: Collection[str], wanted: Collection[str]) -> None:
    """Everything is there, and nothing else, before anything is overwritten."""
    for name in sorted({*found} ^ {*wanted}):
        what = "lacks" if name in wanted else "has an unexpected"
        hint = nearest(name, tuple(wanted)) if name in found else ""
        raise OutsizeError(
            f"{where} {what} tensor {name!r} of its {group}{hint}; expected that of the same model"
            " and optimizer"
        )


def _counts(found: Any, weights: Mapping[str, object]) -> dict[str, int]:
    good = isinstance(found, dict) and all(
        name in weights and isinstance(count, int) for name, count in found.items()
    )
    if not good:
        raise OutsizeError("checkpoint: its counts of updates are not those of this model")
    return dict(found)


def first_values(model: Decoder, keys: RunConfig, found: Checkpoint | None) -> Fill:
    """Writes them by parameter name. model: before it is cut. found: the checkpoint that the run
    goes on from. What an adapter leaves as it is comes from the model's directory always."""
    config, directory = model.config, Path(keys.model.name).expanduser()
    drawn = keys.model.weights == "random"
    if config.adapter is None:
        if found is not None:
            return weights_of(found, config)
        return initial_draw(model, keys.train.seed) if drawn else hub_fill(directory, config)
    if found is not None:
        return beside(config, directory, weights_of(found, config))
    return beside(
        config, directory, initial_draw(model, keys.train.seed, reading(directory, config))
    )


def beside(config: DecoderConfig, directory: Path, trained: Fill) -> Fill:
    """Writes the values of a model with an adapter: those that `trained` has, and of the rest those
    of the model's directory."""
    frozen = hub_fill(directory, config)
    own = {name for entry in adapter_layout(config) for name in entry.ours}

    def fill(name: str, out: Tensor) -> None:
        (trained if name in own else frozen)(name, out)

    return fill
