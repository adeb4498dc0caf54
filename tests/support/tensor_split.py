"""A decoder cut over the threads of a tensor axis, run as a job runs it, and put together again."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from threads import play

from outsize.collectives import Mesh, along
from outsize.kernels.entropy import PLAIN, LossOptions
from outsize.models.cuts import Cut
from outsize.models.decoder import Decoder
from outsize.models.families import parse
from outsize.parallel.tensor.decoder import split
from outsize.parallel.tensor.overlap import overlap_of
from outsize.plan import Plan
from outsize.runtime.again import recomputed, tiled
from outsize.runtime.intercept import intercept
from outsize.runtime.native import NativeFlow


class Sums:
    """A sink that adds to `.grad`, as autograd does."""

    def now(self, weight, compute) -> None:
        with torch.no_grad():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight, memory_format=torch.contiguous_format)
            compute(weight.grad)

    __call__ = now


@dataclass
class Part:
    """What one worker has after a pass: the loss, the gradients of its parameters, their cuts, and
    what it said to the others."""

    loss: float
    gradients: dict[str, torch.Tensor | None]
    cuts: dict[str, Cut]
    calls: list[tuple[str, int]]
    received: dict[str, int]


def filled(config, dtype=torch.float64) -> Decoder:
    """A decoder with weights that are no special values anywhere."""
    model = Decoder(parse(config)).to(dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise * 0.3 + (parameter.dim() == 1))
    return model


def trained(named) -> bool:
    return any(p.requires_grad for _, p in named)


def one_pass(model, plan, batch, factor, options=PLAIN, train=True) -> float:
    """Every microbatch forward and back; gradients are added to `.grad`."""
    flow = NativeFlow(model, plan, options)
    flow.attach(Sums())
    total = 0.0
    for m in range(plan.microbatches):
        with torch.set_grad_enabled(train):
            walk = flow.begin(flow.part(batch, *plan.rows_of(m)), factor)
            stages = range(len(plan.stages))
            for stage in stages:
                walk.forward(stage)
            first = next(i for i, (_, ps) in enumerate(flow.segments) if trained(ps))
            learning = [s for s in stages if train and plan.stages[s].last > first]
            for stage in reversed(learning):
                if plan.stages[stage].whole:
                    walk.recompute(stage)
                walk.backward(stage)
        total += float(walk.loss.detach())
    flow.attach(None)
    return total


def played(
    model: Decoder,
    plan: Plan,
    batch,
    size,
    sequence_parallel,
    options=PLAIN,
    wrap=None,
    chunks=0,
) -> list[Part]:
    """A pass of a copy of the model that is cut over `size` workers. wrap: what is done to the cut
    model; chunks: of overlapped products."""
    factor = 1 / max(batch.count(), 1)

    def work(world) -> Part:
        axis, mine = along(world, "tensor"), copy.deepcopy(model)
        cuts = split(
            mine,
            axis,
            sequence_parallel,
            overlap_of(world, chunks) if chunks and size > 1 else None,
        )
        if wrap is not None:
            wrap(mine)
        axis_calls = axis.calls
        axis_calls.clear(), axis.received.clear()
        loss = one_pass(mine, plan, batch, factor, options)
        calls, received = list(axis.calls), dict(axis.received)
        gradients = {name: p.grad for name, p in mine.named_parameters()}
        return Part(loss, gradients, cuts, calls, received)

    return play(Mesh(tensor=size), work)


def whole(parts: list[Part], name: str) -> torch.Tensor | None:
    """The gradient of a parameter, put together from what each worker has of it; copies that should
    be equal are seen to be."""
    if all(part.gradients[name] is None for part in parts):
        return None
    total = torch.zeros(parts[0].cuts[name].shape, dtype=torch.float64)
    for rank, part in enumerate(parts):
        cut, mine = part.cuts[name], part.gradients[name]
        if mine is None:
            mine = torch.zeros(cut.local, dtype=torch.float64)
        assert mine.shape == cut.local, f"{name}: {tuple(mine.shape)}, not {cut.local}"
        if cut.partial or rank % cut.shared == 0:
            cut.of(total).add_(mine)
            first = mine
        else:
            torch.testing.assert_close(mine, first, rtol=1e-12, atol=1e-14)
    return total


def reference(model: Decoder, batch, options: LossOptions = PLAIN):
    """Loss and gradients of whole logits by plain autograd."""
    model = copy.deepcopy(model)
    context = model.context(batch.positions().reshape(-1), batch.flat_bounds())
    logits = model.epilogue.logits(model.hidden(batch.ids_BS.reshape(-1), context))
    targets = batch.targets_BS.reshape(-1)
    valid = targets != -100
    loss = torch.nn.functional.cross_entropy(
        logits, targets, ignore_index=-100, label_smoothing=options.label_smoothing, reduction="sum"
    )
    loss = loss + options.z_loss * (logits.logsumexp(-1).square() * valid).sum()
    loss = loss / max(batch.count(), 1)
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}


def wrapping(tile=0, recompute=()):
    """What a job does to the parts of blocks once they are split."""

    def wrap(model) -> None:
        for block in model.blocks:
            for part in recompute:
                one = getattr(block, part)
                intercept(one, recomputed(one, False))
            if tile:
                intercept(block.mlp, tiled(block.mlp, tile))

    return wrap
