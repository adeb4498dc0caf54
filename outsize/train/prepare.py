"""`prepare`: somebody's own model and loop, two lines, on the same runtime as everything else.

job = outsize.prepare(model, optimizer=torch.optim.AdamW(model.parameters()), memory="2GiB")
loss = job.step(batch)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_leaves, tree_map

from outsize.data import IGNORE, Batch
from outsize.errors import OutsizeError
from outsize.hardware import Hardware
from outsize.hardware.probe import probe
from outsize.memory import Meter, format_bytes, meter, parse_bytes
from outsize.memory.store import Store
from outsize.memory.tiers import TierSpec
from outsize.models.adopt import find_blocks
from outsize.models.decoder import Decoder
from outsize.optim import SGD, AdamW, Optimizer, parse
from outsize.plan import DEVICE, Plan, Precision
from outsize.plan.plan import BYTES, per_segment
from outsize.runtime import AdoptedFlow, Job, NativeFlow, Report
from outsize.runtime.flow import Flow
from outsize.runtime.job import Group
from outsize.runtime.placement import PARAMETERS
from outsize.search import pick
from outsize.simulate import Forecast, forecast
from outsize.simulate.rehearse import Costs, nowhere, rehearse
from outsize.train.foretelling import choose_tiered, wish_of
from outsize.train.tiers import opened, specs_of, with_tiers

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


def prepare(
    model: nn.Module,
    optimizer: Optimizer | torch.optim.Optimizer | str,
    memory: str | int | None = None,
    *,
    loss: Loss | None = None,
    count: Callable[[Any], float] | None = None,
    blocks: str | Sequence[str] | None = None,
    microbatches: int = 1,
    clip: float | None = None,
    recompute: Sequence[str] | None = None,
    precision: Literal["float32", "float64", "bfloat16"] | None = None,
    host_memory: str | int | None = None,
    disk: str | None = None,
    tiers: Sequence[str] = (),
) -> Prepared:
    """Make a model ready to train under a plan; the plan is chosen at the first step.

    model: a native decoder, or any module made of a sequence of blocks. optimizer: a
    torch.optim.AdamW or SGD over its parameters (groups, and learning rates that a scheduler
    changes, are kept), "adamw", "sgd", or one of outsize.optim. memory: bytes that the device may
    hold, as 2**31 or "2GiB"; the plan is made to fit, or refused with what is missing, and a step
    that would hold more raises. loss: loss(output, batch) -> mean loss; None takes the output's
    `loss`, or the output where it is a scalar. With microbatches > 1 the batch is cut along its
    first dimension, and then loss must give a sum and count(batch) what to divide it by.
    blocks: path patterns of the blocks; None finds them. clip: largest gradient norm. recompute:
    ("block",) or names of submodules of the blocks; None leaves it to the plan. precision:
    None keeps the model's own dtype, with a float32 master copy where that is bfloat16.

    With memory, states that do not fit rest on tiers: host_memory, RAM beside it, as "4GiB"; disk,
    folders as "DIR[,DIR][:SIZE]"; tiers, memory with a path as "NAME=PATH:SIZE". The model's
    parameters move there at the first step, one chunk at a time, and have no values of their own
    any more: `evaluate` computes with them, `weights` reads them, and the model's own forward is
    refused until they are back on the device.

    Raises OutsizeError for a model that cannot be split, naming the module.
    """
    specs = specs_of(host_memory, disk, tuple(tiers))
    if specs and memory is None:
        raise OutsizeError(
            f"{specs[0].name!r} is a tier for what does not fit in memory, and memory is None;"
            " expected bytes that the device may hold: pass memory='2GiB'"
        )
    found = () if isinstance(model, Decoder) else tuple(find_blocks(model, blocks))
    if microbatches > 1 and not isinstance(model, Decoder) and (count is None or loss is None):
        raise OutsizeError(
            f"microbatches is {microbatches} without loss and count: a mean of means is not the"
            " mean; pass loss=(output, batch) -> sum and count=batch -> number of targets"
        )
    if microbatches > 1:
        _refuse_batch_statistics(model)
    settings = Settings(
        loss,
        count,
        found,
        microbatches,
        clip,
        None if recompute is None else tuple(recompute),
        None if memory is None else parse_bytes(memory),
        _precision(model, precision),
        specs,
    )
    return Prepared(model, optimizer, settings)


def _refuse_batch_statistics(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise OutsizeError(
                f"module {name!r} is a {type(module).__name__}: its statistics are those of the"
                " whole batch, which microbatches would change; use microbatches=1"
            )


def _precision(model: nn.Module, name: str | None) -> Precision:
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if name is None and len(dtypes) > 1:
        raise OutsizeError(
            f"model holds parameters of {', '.join(sorted(map(str, dtypes)))}; expected one dtype:"
            " convert it with model.to(dtype), or pass precision="
        )
    return Precision.named(name or str(dtypes.pop()).removeprefix("torch."))


class Prepared:
    """A model under training. `step` trains on a batch; `report` tells of the last step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | torch.optim.Optimizer | str,
        settings: Settings,
    ) -> None:
        self.model, self.settings = model, settings
        self._torch = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        self._optimizer = _convert(optimizer)
        self._group_of = None if self._torch is None else _group_of(model, self._torch)
        self._job: Job | None = None
        self.forecast: Forecast | None = None
        self._stack = ExitStack()  # of the stores, while there is a job
        self._ours = False  # the forward at hand is the job's
        if not settings.tiers:
            self._refuse_small_budget()

    def _refuse_small_budget(self) -> None:
        """What is always there must fit, whatever the batch will be."""
        budget = self.settings.budget
        if budget is None:
            return
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        frozen = sum(p.numel() for p in self.model.parameters()) - trained
        sizes = self.settings.precision
        each = BYTES[sizes.compute] + BYTES[sizes.gradients]
        each += (BYTES[sizes.master] if sizes.master else 0) + (
            len(self._optimizer.states) * BYTES[sizes.optimizer]
        )
        static = trained * each + frozen * BYTES[sizes.compute]
        if static > budget:
            raise OutsizeError(
                f"memory budget of {format_bytes(budget)} ({budget} bytes) is too small:"
                f" parameters, gradients and optimizer alone are {static} bytes,"
                f" {static - budget} bytes missing; set memory above {-(-static // 2**20)}MiB"
            )

    @property
    def plan(self) -> Plan:
        """The plan, once a first step has been made."""
        return self._made.plan

    @property
    def report(self) -> Report:
        """Loss, norm, seconds and trace of the last step."""
        return self._made.report

    @property
    def _made(self) -> Job:
        if self._job is None:
            raise OutsizeError(
                "job has no plan yet: it is made for the first batch; call step first"
            )
        return self._job

    def step(self, batch: Any, lr: float | None = None) -> Tensor:
        """Train on one batch; gives the mean loss, a scalar tensor.

        A native decoder takes token ids (B, S), a mapping with input_ids and labels, or a Batch;
        an adopted module what its forward takes: a mapping by keyword, a tuple by place.
        """
        if isinstance(self.model, Decoder):
            batch = _tokens(batch)
        if self._job is None:
            self._job = self._make(batch)
        if self._torch is not None:
            self._job.updates.groups = _groups(self._torch)
            self._torch._opt_called = True  # type: ignore[attr-defined]  # what schedulers look for
            lr = 1.0
        with self._computing():
            return self._job.step(batch, lr)

    def evaluate(self, batch: Any) -> tuple[float, int]:
        """Sum of losses over a batch and what to divide it by, wherever the weights rest; after a
        first step."""
        if isinstance(self.model, Decoder):
            batch = _tokens(batch)
        rows = batch.ids_BS.shape[0] if isinstance(batch, Batch) else _rows(batch)
        with self._computing():
            return self._made.evaluate(batch, rows)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter by name; of what rests below, a copy of one chunk at a time: use each
        before the next. After a first step."""
        return self._made.weights()

    @contextmanager
    def _computing(self) -> Iterator[None]:
        self._ours = True
        try:
            yield
        finally:
            self._ours = False

    def _refuse_forward(self, *_: Any) -> None:
        if not self._ours:
            raise OutsizeError(
                f"{type(self.model).__name__}: its weights rest on tiers, so its own forward would"
                " compute with others; call job.evaluate(batch), or read job.weights()"
            )

    def close(self) -> None:
        """Give the model back as an ordinary module. Parameters that rested on tiers are NaN from
        then on: read `weights` before."""
        try:
            if self._job is not None:
                self._job.close()
                _forget(self._job)
                self._job = None
        finally:
            self._stack.close()

    def _make(self, batch: Any) -> Job:
        settings = self.settings
        plans = list(self._plans(batch))
        plan, below = plans[0], dict[str, int]()
        if settings.budget is not None:
            self.forecast = self._fit(plans, batch, with_tiers(probe(), settings.tiers))
            plan, below = self.forecast.plan, dict(self.forecast.below)
        ledger = None if settings.budget is None else meter(self._device(), settings.budget)
        with ExitStack() as stack:
            stores = stack.enter_context(opened(settings.tiers, plan, below))
            job = self._job_of(self.model, settings.blocks, plan, ledger, stores)
            if any(stage.rest.parameters != DEVICE for stage in plan.stages):
                stack.callback(self.model.register_forward_pre_hook(self._refuse_forward).remove)
            self._stack = stack.pop_all()
        return job

    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _plans(self, batch: Any) -> Sequence[Plan]:
        """Candidate plans, quickest first."""
        native = isinstance(batch, Batch)
        rows = batch.ids_BS.shape[0] if native else _rows(batch)
        segments = 2 + (
            len(self.model.blocks) if isinstance(self.model, Decoder) else len(self.settings.blocks)
        )
        base = Plan(
            segments,
            per_segment(segments, self.settings.recompute or ()),
            rows,
            -(-rows // self.settings.microbatches),
            batch.ids_BS.shape[1] if native else 0,
            self.settings.precision,
            loss_chunk=512 if native else 0,
            budget=self.settings.budget,
        )
        if self.settings.recompute is not None:
            return [base]
        blocks = segments - 2
        counts = sorted({-(-blocks * quarter // 4) for quarter in range(1, 5)})
        graded = [replace(base, stages=_first_blocks(segments, count)) for count in counts]
        return [base, *graded]

    def _fit(self, plans: Sequence[Plan], batch: Any, hardware: Hardware) -> Forecast:
        def foretell(plan: Plan) -> Forecast:
            return forecast(plan, self._fake_job, lambda rows: _empty(batch, rows), hardware)

        def rehearsed(plan: Plan) -> Costs:
            return rehearse(plan, self._fake_job, lambda rows: _empty(batch, rows))

        settings = self.settings
        try:
            if not settings.tiers:
                return pick(iter(plans), foretell, settings.budget)
            wish = wish_of(plans[0], self._optimizer, settings.clip)
            wish = replace(wish, tiers=settings.tiers)
            return choose_tiered(plans, wish, hardware, rehearsed)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise OutsizeError(
                f"{type(self.model).__name__} cannot be foretold: its forward depends on values"
                f" ({error}); leave memory out, or give it a forward that depends on shapes alone"
            ) from None

    def _fake_job(self, plan: Plan, ledger: Meter) -> Job:
        """The same job over a copy of the model that has no memory. Called in a fake mode."""
        twin, blocks = _shadow(self.model, self.settings.blocks)
        return self._job_of(twin, blocks, plan, ledger, nowhere(plan))

    def _job_of(
        self,
        model: nn.Module,
        blocks: Sequence[tuple[str, nn.Module]],
        plan: Plan,
        ledger: Meter | None,
        stores: Mapping[str, Store],
    ) -> Job:
        groups = None if self._torch is None else _groups(self._torch)
        return Job(
            self._flow(model, blocks, plan), plan, self._optimizer, groups, self._group_of,
            self.settings.clip, ledger, stores=stores,
        )  # fmt: skip

    def _flow(self, model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], plan: Plan) -> Flow:
        if isinstance(model, Decoder):
            return NativeFlow(model, plan)
        count = self.settings.count
        counter = None if count is None else lambda batch: torch.tensor(float(count(batch)))
        return AdoptedFlow(
            model, blocks, plan, self.settings.loss or _own_loss,
            _cut if self.settings.microbatches > 1 else None, counter,
        )  # fmt: skip


def _forget(job: Job) -> None:
    """Parameters that rested below are views of a pool that holds something else."""
    for index, table in enumerate(job.placement.tables):
        for slot in table.slots if job.placement.tier(index, PARAMETERS) != DEVICE else ():
            parameter = job.owners[slot.name]
            lost = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
            parameter.data = lost.expand(parameter.shape)


def _first_blocks(segments: int, count: int) -> Any:
    plain, again = per_segment(segments), per_segment(segments, ("block",))
    return tuple(again[i] if i <= count else plain[i] for i in range(segments))


# -- batches ------------------------------------------------------------------------------------


def _tokens(batch: Any) -> Batch:
    """Token ids as a Batch: every row a document, labels shifted by one."""
    if isinstance(batch, Batch):
        return batch
    ids = batch["input_ids"] if isinstance(batch, Mapping) else batch
    labels = batch.get("labels", ids) if isinstance(batch, Mapping) else ids
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype != torch.int64:
        raise OutsizeError(
            f"batch is {_say(ids)}; expected token ids, an int64 tensor (rows, tokens)"
        )
    targets = torch.full_like(ids, IGNORE)
    targets[:, :-1] = labels[:, 1:]
    return Batch(ids, targets, ((0, ids.shape[1]),) * ids.shape[0])


def _say(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _rows(batch: Any) -> int:
    """The first dimension of a batch's first tensor that has one."""
    for item in tree_leaves(batch):
        if isinstance(item, Tensor) and item.ndim:
            return max(1, item.shape[0])
    return 1


def _cut(batch: Any, start: int, stop: int) -> Any:
    rows = _rows(batch)

    def take(item: Any) -> Any:
        whole = isinstance(item, Tensor) and item.ndim > 0 and item.shape[0] == rows
        return item[start:stop] if whole else item

    return tree_map(take, batch)


def _empty(batch: Any, rows: int) -> Any:
    """A batch of the same form with `rows` rows and no values; made in a fake mode."""
    if isinstance(batch, Batch):
        ids = torch.zeros(rows, batch.ids_BS.shape[1], dtype=torch.int64)
        return Batch(ids, torch.zeros_like(ids), batch.bounds[:rows])
    all_rows = _rows(batch)

    def like(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        cut = item.ndim and item.shape[0] == all_rows
        shape = (rows, *item.shape[1:]) if cut else item.shape
        return torch.empty(shape, dtype=item.dtype, device=item.device)

    return tree_map(like, batch)


def _own_loss(output: Any, batch: Any) -> Tensor:
    """The loss that an output carries: itself, or its `loss`."""
    if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
        output = output["loss"]
    loss = getattr(output, "loss", output)
    if isinstance(loss, Tensor) and loss.ndim == 0:
        return loss
    raise OutsizeError(
        f"model gives {_say(loss)} and no loss; pass loss=(output, batch) -> scalar, or labels"
    )


# -- models and optimizers ----------------------------------------------------------------------


def _shadow(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]
) -> tuple[nn.Module, list[tuple[str, nn.Module]]]:
    """A copy of a model whose tensors are made anew, empty, in the mode that is on."""
    known: dict[int, Any] = {}
    for p in model.parameters():
        empty = torch.empty(p.shape, dtype=p.dtype, device=p.device)
        known[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
    for b in model.buffers():
        known[id(b)] = torch.empty(b.shape, dtype=b.dtype, device=b.device)
    twin = copy.deepcopy(model, known)
    return twin, [(path, twin.get_submodule(path)) for path, _ in blocks]


def _convert(optimizer: Optimizer | torch.optim.Optimizer | str) -> Optimizer:
    if isinstance(optimizer, str):
        decay = 0.1 if optimizer == "adamw" else 0.0
        lr, betas = (3e-4, (0.9, 0.95)) if optimizer == "adamw" else (1e-2, (0.0, 0.0))
        return parse(optimizer, lr, decay, betas)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if optimizer.state:
        raise OutsizeError("optimizer has made steps already; expected a fresh one: make it anew")
    for name in ("amsgrad", "maximize", "nesterov", "dampening"):
        if any(group.get(name) for group in optimizer.param_groups):
            raise OutsizeError(f"optimizer option {name} is not supported; leave it out")
    first = optimizer.param_groups[0]
    for name in ("betas", "eps", "momentum"):
        if any(group.get(name) != first.get(name) for group in optimizer.param_groups):
            raise OutsizeError(f"optimizer groups differ in {name}; expected one value for all")
    if type(optimizer) is torch.optim.AdamW:
        return AdamW(1.0, tuple(first["betas"]), first["eps"], 0.0)
    if type(optimizer) is torch.optim.SGD:
        return SGD(1.0, first["momentum"], 0.0)
    raise OutsizeError(
        f"optimizer {type(optimizer).__name__} is not supported; expected torch.optim.AdamW or SGD,"
        " 'adamw' or 'sgd'"
    )


def _groups(optimizer: torch.optim.Optimizer) -> list[Group]:
    """Settings as they are now: a scheduler may have changed them."""
    return [Group(g["weight_decay"], float(g["lr"])) for g in optimizer.param_groups]


def _group_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    index = {id(p): i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
    named = dict(model.named_parameters())
    for name, p in named.items():
        if p.requires_grad and id(p) not in index:
            raise OutsizeError(
                f"parameter {name!r} is in no group of the optimizer; give it to the optimizer or"
                " set its requires_grad to False"
            )
    return {name: index.get(id(p), 0) for name, p in named.items()}
