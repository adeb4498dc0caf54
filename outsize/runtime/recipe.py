"""How a job trains, and what one of its workers has for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from outsize import accelerator
from outsize.collectives import Collective, Lone, World
from outsize.memory import Meter
from outsize.memory.store import Store
from outsize.optim import Optimizer
from outsize.registry import TECHNIQUES


@runtime_checkable
class Rated(Protocol):
    """Settings of a technique that say how fast parameters are trained."""

    @property
    def rates(self) -> Mapping[str, float]:
        """Factors on the learning rate by patterns of names (outsize/models/patterns.py)."""


@dataclass(frozen=True)
class Group:
    """Parameters that share settings. lr: factor on the step's learning rate."""

    weight_decay: float
    lr: float = 1.0


@dataclass(frozen=True)
class Recipe:
    """How a model is trained, whatever its plan. clip: largest gradient norm. groups and group_of:
    settings by parameter name; where none are given matrices decay, vectors do not, and each has
    the factors on its learning rate that it declares (outsize/models/declared.py) and that `rates`
    has by patterns of names. techniques: settings, by name, of those that the plan's `approximate`
    names. seed: of what these draw."""

    optimizer: Optimizer
    clip: float | None = None
    groups: Sequence[Group] | None = None
    group_of: Mapping[str, int] | None = None
    techniques: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    rates: Mapping[str, float] = field(default_factory=dict)

    def of(self, name: str) -> Any:
        """The settings of a technique, its defaults where none are said."""
        return self.techniques.get(name) or TECHNIQUES.get(name).settings()


@dataclass(frozen=True)
class Here:
    """What one worker has for its job.

    world: the workers, this one among them; each makes a Job of the same plan and calls the same
    methods in the same order. ledger: counts bytes while the job works, and raises over its budget.
    stores: by name, the tiers below the device; the caller closes them. at: told what each thread
    is about to do, for who watches the workers (outsize/launch/heartbeat.py). line: as
    outsize.parallel.divide.divide has it. apart: batches are copied to the device, as they are to
    every one that has memory of its own (a rehearsal of one says so). lying: as Chunks has it, of
    what the store FILES reads.
    """

    world: World = field(default_factory=Lone)
    ledger: Meter | None = None
    stores: Mapping[str, Store] = field(default_factory=dict)
    at: Callable[[str], None] | None = None
    line: Collective | None = None
    apart: bool = False
    lying: Mapping[str, torch.dtype] = field(default_factory=dict)

    def copies(self, model: nn.Module) -> bool:
        """Whether microbatches are copied to the device of a model."""
        return self.apart or accelerator.apart(next(model.parameters()).device)


ALONE = Here()
