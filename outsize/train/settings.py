"""What `prepare` was told, once it is checked, and what of it the planner is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from outsize.collectives import Mesh
from outsize.data import Batch
from outsize.errors import OutsizeError, counted
from outsize.kernels.entropy import Loss as ByTarget
from outsize.memory import format_bytes
from outsize.memory.tiers import TierSpec
from outsize.models.decoder import Decoder
from outsize.optim import Optimizer, taker
from outsize.plan import Pipelined, Plan, Precision, Sharding
from outsize.plan.plan import BYTES
from outsize.search import PlanRequest
from outsize.train.batches import rows_of
from outsize.train.given import check_batch

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Settings:
    """What `prepare` was told. See there."""

    loss: Loss | None
    count: Callable[[Any], float] | None
    blocks: tuple[tuple[str, nn.Module], ...]
    microbatches: int
    clip: float | None
    recompute: tuple[str, ...] | None
    budget: int | None
    precision: Precision
    tiers: tuple[TierSpec, ...] = ()
    mesh: Mesh = field(default_factory=Mesh)
    shards: Sharding = field(default_factory=Sharding)
    sequence_parallel: bool = False
    pipeline: Pipelined = field(default_factory=Pipelined)
    named: bool = False  # blocks: by the user, not found
    plan: Plan | None = None  # the user's
    by_target: ByTarget | None = None

    @property
    def whole(self) -> bool:
        """Whether the module may be computed without cutting it into blocks."""
        return bool(self.blocks) and not (self.named or self.parted or self.tiers or self.plan)

    @property
    def parted(self) -> bool:
        """Whether a worker has parts of the model alone."""
        return self.mesh.tensor > 1 or self.mesh.pipeline > 1


def rows_in(batch: Any) -> int:
    """Rows of a batch of either kind."""
    return batch.ids_BS.shape[0] if isinstance(batch, Batch) else rows_of(batch)


def request_of(
    model: nn.Module, optimizer: Optimizer, settings: Settings, batch: Any
) -> PlanRequest:
    """What is asked of the planner for a batch of this worker. An optimizer that changes the maths
    was asked for by name."""
    native, rows = isinstance(batch, Batch), rows_in(batch)
    return PlanRequest(
        rows * settings.mesh.rows,
        batch.ids_BS.shape[1] if native else 0,
        settings.precision,
        optimizer,
        settings.clip,
        settings.budget,
        -(-rows // settings.microbatches),
        settings.recompute,
        None if native else 0,
        approximate=() if optimizer.approximate is None else (optimizer.approximate,),
        tiers=settings.tiers,
        mesh=settings.mesh,
        shards=settings.shards,
        sequence_parallel=settings.sequence_parallel,
        pipeline=settings.pipeline,
        tiled=native,
        few=True,
    )


def segments_of(model: nn.Module, settings: Settings) -> int:
    """Of the model as plans count them."""
    return 2 + len(model.blocks if isinstance(model, Decoder) else settings.blocks)


def given_plan(model: nn.Module, settings: Settings, batch: Any) -> Plan | None:
    """The user's plan, if there is one. OutsizeError where it is of other batches."""
    plan = settings.plan
    if plan is None:
        return None
    tokens = batch.ids_BS.shape[1] if isinstance(batch, Batch) else 0
    rows = rows_in(batch) * settings.mesh.rows
    check_batch(plan, segments_of(model, settings), rows, tokens)
    return replace(plan, budget=settings.budget)


def _state_bytes(optimizer: Optimizer, sizes: Precision) -> int:
    """The least that an optimizer keeps of a parameter; states of less than one element for each
    are not counted."""
    own = BYTES[sizes.optimizer]
    return sum(s.dtype.itemsize if s.dtype else own for s in optimizer.states if s.per == 1)


def refuse_small_budget(model: nn.Module, optimizer: Optimizer, settings: Settings) -> None:
    """What is always there must fit, whatever the batch will be."""
    budget = settings.budget
    if budget is None:
        return
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters()) - trained
    sizes = settings.precision
    each = BYTES[sizes.compute] + BYTES[sizes.gradients]
    each += BYTES[sizes.master] if sizes.master else 0
    each += min(_state_bytes(taker(optimizer, main), sizes) for main in (False, True))
    static = trained * each + frozen * BYTES[sizes.compute]
    if static > budget:
        raise OutsizeError(
            f"memory budget of {format_bytes(budget)} ({budget} bytes) is too small:"
            f" parameters, gradients and optimizer alone are {static} bytes,"
            f" {counted(static - budget, 'byte')} missing; set memory above"
            f" {-(-static // 2**20)}MiB"
        )
