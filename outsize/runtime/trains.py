"""Trains: what every job gives, whatever it does in a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from outsize.memory import Meter
from outsize.memory.store import Store
from outsize.plan import Plan
from outsize.runtime.flow import Flow
from outsize.runtime.generating import TokenSteps
from outsize.runtime.report import Report
from outsize.runtime.storage.states import Stated
from outsize.schedule.layout import Placement


class Rated(Protocol):
    """An optimizer, as far as who asks for steps must know it."""

    @property
    def lr(self) -> float: ...


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
