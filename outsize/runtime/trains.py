"""Trains: what every job gives, whatever it does in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from outsize.memory import Meter
from outsize.memory.store import Store
from outsize.plan import Plan
from outsize.runtime.flow import Flow
from outsize.runtime.generating import TokenSteps
from outsize.runtime.report import Report
from outsize.runtime.storage.states import Fill
from outsize.schedule.layout import Placement


class Rated(Protocol):
    """An optimizer, as far as who asks for steps must know it."""

    @property
    def lr(self) -> float: ...


class Stated(Protocol):
    """Weights and optimizer states by name, to be saved and restored."""

    @property
    def weights_dtype(self) -> torch.dtype: ...

    def weights(self) -> Iterator[tuple[str, Tensor]]: ...

    def optimizer_state(self) -> Iterator[tuple[str, Tensor]]: ...

    def state_names(self) -> Iterator[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def form(self, name: str, state: str) -> tuple[tuple[int, ...], torch.dtype]: ...

    def weight_reader(self) -> Callable[[str], Tensor]: ...

    def reader(self) -> Callable[[str, str | None], Tensor]: ...

    def load(self, value: Fill | None, state: Fill) -> None: ...

    def update_counts(self) -> dict[str, int]: ...

    def restore_counts(self, counts: Mapping[str, int]) -> None: ...


class Trains(Stated, Protocol):
    """A model under training: a Job, or one whose steps are approximate. ledger: may come and go
    between steps. owners: the parameters by name."""

    report: Report

    @property
    def ledger(self) -> Meter | None: ...

    @ledger.setter
    def ledger(self, ledger: Meter | None) -> None: ...

    @property
    def flow(self) -> Flow: ...

    @property
    def plan(self) -> Plan: ...

    @property
    def optimizer(self) -> Rated: ...

    @property
    def placement(self) -> Placement: ...

    @property
    def stores(self) -> Mapping[str, Store]: ...

    @property
    def owners(self) -> Mapping[str, nn.Parameter]: ...

    @property
    def tokens(self) -> TokenSteps: ...

    def step(self, batch: Any, lr: float | None = None) -> Tensor: ...

    def evaluate(self, batch: Any, rows: int) -> tuple[float, float]: ...

    def close(self) -> None: ...
