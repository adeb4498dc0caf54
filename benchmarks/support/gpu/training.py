"""Steps of Outsize and of its peers on one device, and what was foretold of them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from statistics import median
from typing import Any

import torch
from support.figures import work_of
from support.gpu.place import Place
from support.gpu.shapes import SHAPES, Work, config_of, drawn, native_draw, parameters
from torch import Tensor, nn

from outsize import accelerator
from outsize.data import IGNORE, Batch
from outsize.kernels.product import elsewhere
from outsize.memory import format_bytes, meter
from outsize.memory.tiers import TierSpec
from outsize.models.build import shells
from outsize.optim import AdamW
from outsize.plan import Precision
from outsize.runtime import Job
from outsize.runtime.making import NativeModel, make_job
from outsize.runtime.recipe import Here, Recipe
from outsize.search import PlanRequest, choose
from outsize.simulate import Forecast
from outsize.train.tiers import opened, with_tiers

LR, BETAS, EPS, DECAY, CLIP = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
OPTIMIZER = AdamW(LR, BETAS, EPS, DECAY)


def targets_of(ids_BS: Tensor) -> Tensor:
    """The next token; the last one of a row has none."""
    targets_BS = torch.full_like(ids_BS, IGNORE)
    targets_BS[:, :-1] = ids_BS[:, 1:]
    return targets_BS


# -- Outsize --------------------------------------------------------------------------------------


def request_of(work: Work, place: Place, **changes: Any) -> PlanRequest:
    request = PlanRequest(
        work.rows, work.sequence, Precision.named("bfloat16"), OPTIMIZER, clip=CLIP,
        documents=(0, work.sequence), apart=place.apart, kind=place.device.type,
        grain=accelerator.grain(place.device),
    )  # fmt: skip
    return replace(request, **changes)


def foretold(
    work: Work, place: Place, request: PlanRequest, tiers: Sequence[TierSpec] = ()
) -> Forecast:
    """What the planner picks."""
    hardware = with_tiers(place.hardware(), tuple(tiers))
    return choose(work.config, replace(request, tiers=tuple(tiers)), hardware)


def job_of(work: Work, place: Place, plan: Forecast, stores: Any, clip: float | None) -> Job:
    precision, device = plan.plan.precision, place.device
    dtype = getattr(torch, precision.master or precision.compute)
    model = NativeModel(shells(work.config, dtype, device), fill=native_draw(work.config, device))
    # An accelerator's allocator is asked instead: to count in a step would wait for the device.
    here = Here(ledger=None if place.apart else meter(device), stores=stores)
    return make_job(model, plan.plan, Recipe(OPTIMIZER, clip), here)


def trained(
    work: Work, place: Place, made: Forecast, clip: float | None, tiers: Sequence[TierSpec] = ()
) -> dict[str, Any]:
    """Steps of a plan, measured beside what was foretold."""
    bounds = ((0, work.sequence),) * work.rows
    with (
        opened(tuple(tiers), made.plan, made.below, place.device, print) as stores,
        closing(job_of(work, place, made, stores, clip)) as job,
    ):
        place.forget_peak()

        def step(number: int) -> float:
            ids = work.ids(number)
            with elsewhere():  # a dry run multiplies as the device does that is foretold
                return float(job.step(Batch(ids, targets_of(ids), bounds)))

        seconds, losses = place.times(step, work.warm + work.steps)
        peak = place.peak() if place.apart else job.report.trace.peak()
    return {
        **measured(work, seconds, losses, peak),
        "foretold": made.peak, "foretold seconds": made.seconds,
        "below": {name: size for name, size in made.below.items() if size},
        "plan": described(made),
    }  # fmt: skip


def described(made: Forecast) -> str:
    """A plan in a line."""
    plan = made.plan
    again = sorted({name for stage in plan.stages for name in stage.recompute})
    below = ", ".join(f"{format_bytes(size)} on {t}" for t, size in made.below.items() if size)
    return (
        f"microbatches of {plan.microbatch_rows} rows, recompute {', '.join(again) or 'nothing'},"
        f" loss in chunks of {plan.loss_chunk or 'all'}, tiles of {plan.mlp_tile or 'all'} tokens"
        + (f", {below}" if below else "")
    )


def ours(place: Place, work: dict[str, Any]) -> dict[str, Any]:
    """Outsize with the plan that its planner picks."""
    task = Work(**work)
    free = int(0.9 * place.hardware().tier("device").bytes)
    return trained(task, place, foretold(task, place, request_of(task, place, budget=free)), CLIP)


# -- figures --------------------------------------------------------------------------------------


def measured(
    work: Work, seconds: Sequence[float], losses: Sequence[float], peak: int | None
) -> dict[str, Any]:
    """What every contender reports. A step's seconds are the median of those that count."""
    config = work.config
    tokens, one = work.rows * work.sequence, median(seconds[work.warm :])
    flops = _flops(work.shape, work.sequence, tokens)
    return {
        "seconds": one, "tokens/s": tokens / one, "FLOP/s": flops[0] / one, "formula": flops[1],
        "peak": peak, "losses": list(losses), "every second": list(seconds),
        "layers": len(config.layers), "work": asdict(work),
    }  # fmt: skip


def _flops(shape: str, sequence: int, tokens: int) -> tuple[float, str]:
    config = config_of(shape)
    multiplied = parameters(shape) - config.vocab * config.hidden
    found = work_of(multiplied, len(config.layers), sequence, config.hidden, tokens)
    return found.flops, found.formula


# -- peers ----------------------------------------------------------------------------------------


def llama_of(shape: str, place: Place, dtype: torch.dtype = torch.float32) -> Any:
    """The transformers model with the same weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    told = {k: v for k, v in SHAPES[shape].items() if k not in ("architectures", "model_type")}
    with torch.device(place.device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**told), dtype=dtype)
    draw = drawn(place.device)
    for name, parameter in model.named_parameters():
        draw(name, parameter)
    return model


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Matrices decayed, vectors not; fused."""
    every = list(model.parameters())
    groups = [
        {"params": [p for p in every if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in every if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)


def looped(work: Work, place: Place, model: Any, run: Any, cast: bool = True) -> dict[str, Any]:
    """A plain loop: autocast to bfloat16 (unless `cast` is no), clipping, fused AdamW.

    It takes all rows at once, as its users do, and half as many wherever that does not fit.
    """
    optimizer, rows = adamw(model), work.rows

    def step(ids_BS: Tensor) -> float:
        total = 0.0
        for part_BS in ids_BS.split(rows):
            with torch.autocast(place.device.type, torch.bfloat16, enabled=cast):
                labels_BS = part_BS.clone()
                labels_BS[:, 0] = IGNORE  # transformers shifts them: the first is never used
                loss = run(input_ids=part_BS, labels=labels_BS, use_cache=False).loss
            loss = loss * (part_BS.shape[0] / ids_BS.shape[0])
            loss.backward()
            total += float(loss)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    while True:
        place.forget_peak()
        try:
            seconds, losses = place.times(
                lambda n: step(work.ids(n).to(place.device)), work.warm + work.steps
            )
            break
        except torch.OutOfMemoryError:
            if rows == 1:
                raise
            rows //= 2
        optimizer.zero_grad(set_to_none=True)
    plan = f"microbatches of {rows} rows"
    return {**measured(work, seconds, losses, place.peak()), "plan": plan}


def plain(place: Place, work: dict[str, Any], compiled: bool = False) -> dict[str, Any]:
    """The plain loop, uncompiled or under torch.compile."""
    task = Work(**work)
    model = llama_of(task.shape, place).train()
    return looped(task, place, model, torch.compile(model) if compiled else model)


def fsdp2(place: Place, work: dict[str, Any]) -> dict[str, Any]:
    """torch's fully_shard, a layer a unit, on one device: float32 shards, bfloat16 computing."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    task = Work(**work)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        mesh = init_device_mesh(place.device.type, (1,))
        model = llama_of(task.shape, place).train()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        try:
            return looped(task, place, model, model, False)
        finally:
            dist.destroy_process_group()


# -- the machine ----------------------------------------------------------------------------------


def matmul_peak(place: Place, size: int, calls: int) -> dict[str, Any]:
    """The best bfloat16 product of this device, FLOP/s: what fractions are of."""
    a, b = (torch.randn(size, size).to(torch.bfloat16).to(place.device) for _ in range(2))
    out = torch.empty_like(a)

    def product(_: int) -> float:
        torch.mm(a, b, out=out)
        return 0.0

    seconds, _ = place.times(product, calls + 1)
    return {"FLOP/s": 2 * size**3 / min(seconds[1:]), "size": size}


def probed(place: Place) -> dict[str, Any]:
    """The rates that plans are made with; kept for the cases behind this one."""
    hardware = place.hardware()
    (device,) = hardware.devices
    return {
        "FLOP/s": {name: rate.value for name, rate in device.peak.items()},
        "bytes/s": device.bandwidth.value,
        "tiers": {
            tier.name: {
                "bytes": tier.bytes,
                "read": tier.read and tier.read.value,
                "write": tier.write and tier.write.value,
            }
            for tier in hardware.tiers
        },
    }
