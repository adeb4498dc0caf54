"""Weights that somebody changes between two steps: clamps, averages, loads from a file, or gives
other memory.

Training continues from what the parameters show then. Where it continues from a master copy, that
takes over what has changed; where the parameters are no weights now, a change would be lost. Other
parameters than those of the first step, as of a new head, are no part of the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from outsize.errors import OutsizeError
from outsize.memory import Chunk
from outsize.runtime import Job
from outsize.runtime.storage.apart import apart
from outsize.schedule.kept import MASTER, PARAMETERS
from outsize.torch_private import changes
from outsize.train.prepared.elsewhere import PIECE, tell, told


class Changes:
    """Of one job's parameters, since it had them last."""

    def __init__(self, model: nn.Module, states: Callable[[Job], None]) -> None:
        """states: has a job go on from those that the optimizer shows."""
        self._model, self._states = model, states
        self._job: Job | None = None
        self._seen: dict[str, tuple[int, int]] = {}
        self._names: dict[int, str] = {}

    def note(self, job: Job) -> None:
        """The job has them as they are now."""
        self._seen = {name: _now(parameter) for name, parameter in job.owners.items()}
        for parameter in job.owners.values():
            tell(parameter)
        if self._job is not job:
            self._job, self._names = job, _named(self._model)

    def follow(self, job: Job) -> Job:
        """The job, going on from those that have been changed. OutsizeError where it cannot."""
        self._states(job)
        seen = self._seen
        if self._job is job and (now := _named(self._model)) != self._names:
            raise _others(self._names, now)
        owners = job.owners.items()
        names = {n for n, p in owners if seen.get(n) not in (None, _now(p)) or told(p)}
        if names:
            _take(job, names)
            self.note(job)
        return job


def _named(model: nn.Module) -> dict[int, str]:
    """Names of parameters, by identity."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _others(before: dict[int, str], now: dict[int, str]) -> OutsizeError:
    new = [name for key, name in now.items() if before.get(key) != name]
    names = new or [name for key, name in before.items() if key not in now]
    what = "is another one than" if names[0] in before.values() else "was not there"
    what = what if new else "is no longer there, as"
    return OutsizeError(
        f"parameter {names[0]!r} {what} when the job was made, and the job would not train it;"
        " call job.close(), then outsize.prepare anew, with an optimizer over the model's"
        " parameters; load_state_dict without assign=True keeps them"
    )


def _now(parameter: Tensor) -> tuple[int, int]:
    """How often it has been changed in place, and which memory it has."""
    return changes(parameter), parameter.data_ptr()


@torch.no_grad()
def _take(job: Job, names: set[str]) -> None:
    chunks = job.placement.chunks
    for index, chunk in enumerate(job.chunks):
        first, last = chunks.extent(index, MASTER)
        spans = list[tuple[int, int]]()
        for slot in (slot for slot in chunk.table.slots if slot.name in names):
            if chunks.passes(index, PARAMETERS) or any(apart(job.optimizer)):
                raise OutsizeError(
                    f"parameter {slot.name!r} has been changed between two steps, which training"
                    " would not see: its weights rest elsewhere; change what job.state_dict()"
                    " gives, and hand it to job.load_state_dict"
                )
            parameter, own = job.owners[slot.name], slot.of(chunk.parameters)
            if parameter.dtype != own.dtype or parameter.device != own.device:
                raise OutsizeError(
                    f"parameter {slot.name!r} is of {parameter.dtype} on {parameter.device} now,"
                    f" and the job has it in {own.dtype} on {own.device}: convert the model before"
                    " outsize.prepare"
                )
            if parameter.data_ptr() != own.data_ptr():
                own.copy_(parameter)
                parameter.data = own
            begin, end = max(slot.offset, first), min(slot.offset + slot.numel, last)
            if begin < end:
                spans.append((begin, end))
        if spans and mastered(job, index):
            master = job.weight_pool.mine(index, MASTER)
            for begin, end in spans:
                _round_back(master[begin - first : end - first], chunk.parameters[begin:end])
            job.weight_pool.write(index, MASTER, master)


def _round_back(master: Tensor, shown: Tensor) -> None:
    """The master copy of what is shown: elements whose rounding it shows still keep their own."""
    for own, seen in zip(master.split(PIECE), shown.split(PIECE), strict=True):
        seen = seen.to(own.device)
        torch.where(own.to(seen.dtype) == seen, own, seen.to(own.dtype), out=own)


def mastered(job: Job, chunk: int) -> bool:
    """Whether a chunk's parameters are roundings of a master copy."""
    return any(what == MASTER for what, _ in job.placement.chunks.held(chunk))


def watched(job: Job) -> dict[str, nn.Parameter]:
    """Parameters by name that are here, and are not what training goes on from."""
    passes, other = job.placement.chunks.passes, any(apart(job.optimizer))
    here = (
        slot.name
        for index, chunk in enumerate(job.chunks)
        if (other or mastered(job, index)) and not passes(index, PARAMETERS)
        for slot in chunk.table.slots
    )
    return {name: job.owners[name] for name in here}


def absent(job: Job) -> dict[str, nn.Parameter]:
    """Parameters by name that show no values between two steps: of chunks that are away, and of
    stages on other workers."""
    here = {slot.name for chunk in job.chunks for slot in chunk.table.slots}
    here -= {slot.name for chunk in away(job) for slot in chunk.table.slots}
    return {name: parameter for name, parameter in job.owners.items() if name not in here}


def away(job: Job) -> Iterator[Chunk]:
    """Chunks whose parameters are here at times only, since they rest on a tier or in shares on
    several workers: what they show between two steps is not theirs."""
    chunks = job.placement.chunks
    return (one for index, one in enumerate(job.chunks) if chunks.passes(index, PARAMETERS))
