"""Together: the states of several jobs as those of one, where each trains a part of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from outsize.runtime.storage.states import Fill, Stated

VALUE = "value"  # what the weights of parameters that are no part of the model are called


@dataclass(frozen=True)
class Part:
    """A job's states. names: what its parameters are called in the whole, by its own names."""

    states: Stated
    names: Mapping[str, str]


@dataclass(frozen=True)
class Together:
    """The parts' states. extra: names of parameters that are no part of the model, whose weights
    are states of the training. dtype: what those are saved in. wider: by name, tensors that
    training continues from in place of such a weight."""

    parts: Sequence[Part]
    extra: frozenset[str]
    dtype: torch.dtype
    wider: Mapping[str, Tensor]

    @property
    def weights_dtype(self) -> torch.dtype:
        return self.parts[0].states.weights_dtype

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter of the model by name; see Job.weights."""
        for part in self.parts:
            for local, weight in part.states.weights():
                if part.names[local] not in self.extra:
                    yield part.names[local], weight

    def optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        """Optimizer states by "parameter.state", and what is no part of the model."""
        read = self.reader()
        for name in self.state_names():
            owner, _, state = name.rpartition(".")
            yield name, read(owner, state)

    def state_names(self) -> Iterator[str]:
        for part in self.parts:
            for local in part.states.state_names():
                owner, _, state = local.rpartition(".")
                yield f"{part.names[owner]}.{state}"
        yield from (f"{name}.{VALUE}" for name in self._names() if name in self.extra)

    def shape(self, name: str) -> tuple[int, ...]:
        states, local = self._of(name)
        return states.shape(local)

    def form(self, name: str, state: str) -> tuple[tuple[int, ...], torch.dtype]:
        if state == VALUE:
            return self.shape(name), self.dtype
        states, local = self._of(name)
        return states.form(local, state)

    def weight_reader(self) -> Callable[[str], Tensor]:
        read = self.reader()
        return lambda name: read(name, None)

    def reader(self) -> Callable[[str, str | None], Tensor]:
        """Gives the named state of a parameter, or (None) its weight."""
        where = {
            name: (read, local)
            for part in self.parts
            for read in [part.states.reader()]
            for local, name in part.names.items()
        }

        def read(name: str, state: str | None) -> Tensor:
            of, local = where[name]
            if state != VALUE:
                return of(local, state)
            return (self.wider[name] if name in self.wider else of(local, None)).to(self.dtype)

        return read

    @torch.no_grad()
    def load(self, value: Fill | None, state: Fill) -> None:
        """Replace every weight of the model (value None: they stay) and every state."""

        def weight(
            part: Part, kept: Callable[[str], Tensor] | None, local: str, out: Tensor
        ) -> None:
            name = part.names[local]
            if name in self.extra:
                state(f"{name}.{VALUE}", out)
            elif value is not None:
                value(name, out)
            elif kept is not None:
                out.copy_(kept(local))

        def other(part: Part, local: str, out: Tensor) -> None:
            owner, _, what = local.rpartition(".")
            state(f"{part.names[owner]}.{what}", out)

        for part in self.parts:
            kept = part.states.weight_reader() if value is None else None
            part.states.load(partial(weight, part, kept), partial(other, part))
        for name, tensor in self.wider.items():
            state(f"{name}.{VALUE}", tensor)

    def update_counts(self) -> dict[str, int]:
        return {
            part.names[local]: count
            for part in self.parts
            for local, count in part.states.update_counts().items()
        }

    def restore_counts(self, counts: Mapping[str, int]) -> None:
        for part in self.parts:
            mine = {local: counts[n] for local, n in part.names.items() if n in counts}
            part.states.restore_counts(mine)

    def _names(self) -> Iterator[str]:
        for part in self.parts:
            yield from part.names.values()

    def _of(self, name: str) -> tuple[Stated, str]:
        """Whose a parameter is, and what it is called there."""
        return next(
            (part.states, local)
            for part in self.parts
            for local, own in part.names.items()
            if own == name
        )
