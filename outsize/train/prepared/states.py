"""The states of a job that `prepare` gave: as a dictionary, in files, and where the optimizer of
torch.optim that was handed in shows its own.

A directory that `save` writes is laid out as a run's: outsize.load and `outsize generate` take that
of a native decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outsize.checkpoint import adapters
from outsize.checkpoint.contents import Named
from outsize.checkpoint.hub import copy_words
from outsize.checkpoint.opened import Checkpoint
from outsize.checkpoint.store import Store
from outsize.checkpoint.writing import Later
from outsize.collectives import Collective, along
from outsize.collectives.world import everyone
from outsize.errors import OutsizeError
from outsize.models.decoder import Decoder
from outsize.optim import taker
from outsize.runtime import Job
from outsize.runtime.job import Fill
from outsize.torch_private import changes
from outsize.train.state import (
    OPTIMIZER,
    WEIGHTS,
    beside,
    check_names,
    copied,
    give,
    make_all,
    notes_of,
    optimizer_tensors,
    restore_states,
    tensors_of,
    weights_of,
    write_model,
)

KIND, BUFFERS, STEP = "outsize job", "buffers", "step"
KEPT = 2  # checkpoints in a directory
_TORCHS = {"momentum": "momentum_buffer"}  # names of states in torch.optim, where they differ
State = Mapping[str, Any]


def state_dict(job: Job, model: nn.Module, steps: int) -> dict[str, Any]:
    """Copies of all states by name. The workers of a pipeline or tensor axis call it together."""
    states = copied(job)
    buffers = {name: later.make().clone() for name, later in _buffers(job, model)}
    return {"steps": steps, **states, BUFFERS: buffers}


def load_state_dict(job: Job, model: nn.Module, state: State) -> int:
    """Put the states of `state_dict` into a job; gives the steps made. OutsizeError, naming the
    first that is missing or not expected, before anything is changed."""
    wanted = {WEIGHTS: set(job.owners), OPTIMIZER: set(job.state_names())}
    for group, names in wanted.items():
        check_names("state", group, set(_group(state, group)), names)
    for name, own in job.owners.items():
        found = tuple(state[WEIGHTS][name].shape)
        if found != (shape := job.shape(name)):
            raise OutsizeError(f"weight {name!r} has shape {found}; expected {shape}: {own.dtype}")
    give(job, state)
    _load_buffers(model, lambda name, out: out.copy_(state[BUFFERS][name]), state[BUFFERS])
    return int(state["steps"])


def check_place(job: Job, steps: int, path: Path) -> None:
    """OutsizeError where the first worker cannot write a checkpoint of so many steps."""
    if not job.world.rank:
        with Store(path, KEPT) as store:
            store.ready(steps)


def save(job: Job, model: nn.Module, steps: int, path: Path) -> Path:
    """Write a checkpoint of so many steps below `path`; gives its directory, on all workers when
    it is there. The first of several writes; the others give it what they have."""
    tensors, notes = _tensors(job, model), notes_of(job)
    if job.world.rank:
        make_all(tensors)
        everyone(job.world).barrier()
        return Store(path).path(steps)

    def files(directory: Path) -> None:
        if isinstance(model, Decoder):
            write_model(directory, job, model.config, adapters.base_of(model))
            copy_words(model.words, directory)

    with Store(path, KEPT) as store:
        written = store.save(steps, tensors, {"kind": KIND, "steps": steps, **notes}, files)
    if job.world.mesh.size > 1:
        everyone(job.world).barrier()
    return written


def load(job: Job, model: nn.Module, path: Path) -> int:
    """Put the last checkpoint of `save` into a job; gives the steps made."""
    found = Store(path).load()  # without its lock, which one worker alone could hold
    if found.meta.get("kind") != KIND:
        raise OutsizeError(f"{path} is not what job.save writes; expected its directory")
    restore_states(found, job, _weights(found, job, model))
    _load_buffers(model, partial(found.tensor, BUFFERS), set(found.names(BUFFERS)))
    return found.step


def moved(job: Job, steps: int) -> Callable[[Job], int]:
    """What puts the states of a job into another of the same model that trains other parameters,
    and gives the steps made: those that are new there begin as the optimizer's do. Until then they
    are copied to the host's memory."""
    kept, both = copied(job, "cpu"), (taker(job.optimizer, main) for main in (False, True))
    first = {spec.name: torch.tensor(spec.initial) for one in both for spec in one.states}

    def into(made: Job) -> int:
        begun = {name: first[name.rpartition(".")[2]] for name in made.state_names()}
        give(made, {**kept, OPTIMIZER: {**begun, **kept[OPTIMIZER]}})
        return steps

    return into


@dataclass(frozen=True)
class Shown:
    """A state where an optimizer of torch.optim has it. version: how often it had been changed;
    None of a view, whose changes are the job's."""

    owner: str
    parameter: nn.Parameter
    home: dict[str, Tensor]
    key: str
    value: Tensor
    version: int | None

    def same(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is there as it was put there."""
        there = optimizer.state.get(self.parameter) is self.home
        same = there and self.home.get(self.key) is self.value
        return same and self.version in (None, changes(self.value))


def shown(job: Job, optimizer: torch.optim.Optimizer, steps: Tensor, views: bool) -> list[Shown]:
    """Put the states of a job where an optimizer of torch.optim has its own: views where they lie
    whole on the device, else copies. steps: what all share that were updated in every step."""
    counts, made, found = job.update_counts(), float(steps), list[Shown]()
    for name, tensor in job.optimizer_state():
        owner, _, state = name.rpartition(".")
        home = optimizer.state[job.owners[owner]]
        put = {_TORCHS.get(state, state): tensor}
        count = counts.get(owner, 0)
        if isinstance(optimizer, torch.optim.Adam):  # AdamW is one
            put[STEP] = steps if count == made else torch.tensor(float(count))
        home.update(put)
        for key, value in put.items():
            own = value is steps or (views and value is tensor)
            version = None if own else changes(value)
            found.append(Shown(owner, job.owners[owner], home, key, value, version))
    return found


def counted_again(job: Job, kept: Iterable[Shown]) -> None:
    """Put counts of updates that nobody has edited where the optimizer has them: those that were
    shown may be of an earlier step."""
    counts = job.update_counts()
    for one in kept:
        one.home[one.key] = torch.tensor(float(counts.get(one.owner, 0)))


def taken(job: Job, optimizer: torch.optim.Optimizer) -> int:
    """Go on from the states that an optimizer of torch.optim has already; gives the steps made."""
    counts: dict[str, int] = {}

    def fill(name: str, out: Tensor) -> None:
        owner, _, state = name.rpartition(".")
        mine = optimizer.state.get(job.owners[owner], {})
        value = mine.get(_TORCHS.get(state, state))
        if value is None:
            out.zero_()
            return
        out.copy_(value)
        counts[owner] = int(mine.get("step", 1))

    job.load(None, fill)
    job.restore_counts(counts)
    return max(counts.values(), default=0)


def _tensors(job: Job, model: nn.Module) -> Iterator[Named]:
    """(group, name, tensor): of native decoders under Hugging Face's names, of other modules under
    their own."""
    if isinstance(model, Decoder):
        yield from tensors_of(job, model.config)
        return
    read = job.reader()
    for name in job.owners:
        yield WEIGHTS, name, Later(job.weights_dtype, job.shape(name), partial(read, name, None))
    yield from optimizer_tensors(job, read)
    for name, later in _buffers(job, model):
        yield BUFFERS, name, later


def _buffers(job: Job, model: nn.Module) -> Iterator[tuple[str, Later]]:
    """A module's buffers by name. On a pipeline those of a block are its worker's, which alone has
    moved them; the other workers have them as they began."""
    line = along(job.world, "pipeline")
    for name, buffer in model.named_buffers():
        whose = _turn_of(job, name) if line.size > 1 else 0
        yield name, Later(buffer.dtype, tuple(buffer.shape), partial(_from, line, buffer, whose))


def _from(line: Collective, buffer: Tensor, whose: int) -> Tensor:
    """What a worker of the pipeline has of a buffer."""
    return buffer if line.size == 1 else line.broadcast(buffer.detach().clone(), whose)


def _turn_of(job: Job, name: str) -> int:
    """The place on the pipeline of who moves a buffer: of the parameters next to it, with which its
    path has most in common; the first worker of a module without any."""
    chunks, path = job.placement.chunks, name.split(".")
    shared, whose = 0, 0
    for table in chunks.every:
        for slot in table.slots:
            alike = zip(path[:-1], slot.name.split(".")[:-1], strict=False)
            count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], alike))
            if count > shared:
                shared, whose = count, chunks.holders(table)[0]
    return whose


def _weights(found: Checkpoint, job: Job, model: nn.Module) -> Fill:
    if isinstance(model, Decoder) and model.config.adapter is not None:
        base = adapters.base_of(model)
        if base is None:
            raise OutsizeError(
                "job.load: the model has an adapter and was not loaded from a directory, so the"
                " weights that it leaves as they are lie nowhere; save it and load it before"
            )
        return beside(model.config, base, weights_of(found, model.config))
    if isinstance(model, Decoder):
        return weights_of(found, model.config)
    check_names(f"checkpoint {found.path}", WEIGHTS, found.names(WEIGHTS), set(job.owners))
    return partial(found.tensor, WEIGHTS)


def _load_buffers(model: nn.Module, fill: Callable[[str, Tensor], object], names: object) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if isinstance(names, (set, Mapping)) and name in names:
                fill(name, buffer)


def _group(state: State, group: str) -> Mapping[str, Tensor]:
    found = state.get(group) if isinstance(state, Mapping) else None
    if not isinstance(found, Mapping):
        raise OutsizeError(f"state has no {group!r}; expected what job.state_dict() gives")
    return found
