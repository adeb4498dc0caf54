"""Adopted modules whose blocks are shared out over walks of one process, tensors handed over by
hand, beside plain autograd."""

from __future__ import annotations

import copy

import torch

from outsize.models.adopt import find_blocks
from outsize.plan import Plan, Precision
from outsize.plan.plan import per_segment
from outsize.runtime.adopted.flow import AdoptedFlow, arguments, reach_of


def plan_of(model, blocks=None, recompute=(), stages=None):
    count = len(find_blocks(model, blocks)) + 2
    cut = per_segment(count, recompute) if stages is None else stages
    return Plan(count, cut, 1, 1, 0, Precision.named("float64"))


def plain(model, parts, loss):
    """The sum of losses of parts and its gradients, by name."""
    twin = copy.deepcopy(model)
    total = 0.0
    for part in parts:
        args, kwargs = arguments(part, twin)
        value = loss(twin(*args, **kwargs), part)
        value.backward()
        total += float(value.detach())
    return total, {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}


class Workers:
    """One flow a worker, each over its own copy of a model; parameters that a worker does not need
    are NaN there. owners: by stage, its worker."""

    def __init__(self, model, plan, loss, owners, example, blocks=None):
        self.owners, self.plan = owners, plan
        self.held = [
            [s for s, w in enumerate(owners) if w == worker] for worker in range(max(owners) + 1)
        ]
        self.flows = []
        for held in self.held:
            twin = copy.deepcopy(model)
            found = find_blocks(twin, blocks)
            reach = reach_of(twin, found, loss, example)
            flow = AdoptedFlow(twin, found, plan, loss, reach=reach)
            self.forget(flow, held)
            self.flows.append(flow)
        self.sent = []  # numbers of tensors

    def forget(self, flow, held):
        segments = [i for s in held for i in range(*self.ends(s))]
        near = {u for i in segments for u in flow.uses[i]}
        for i, (_, named) in enumerate(flow.segments):
            for _, p in named if i not in near else ():
                p.data.fill_(torch.nan)

    def ends(self, stage):
        return self.plan.stages[stage].first, self.plan.stages[stage].last

    def begin(self, part):
        return [
            flow.begin(part, 1.0, held=held)
            for flow, held in zip(self.flows, self.held, strict=True)
        ]

    def forward(self, walks, stage):
        here = self.owners[stage]
        before = self.owners[stage - 1] if stage else here
        if before != here:
            sent = [t.clone() for t in walks[before].take(stage - 1)]
            self.sent.append(len(sent))
            walks[here].put(stage - 1, sent)
        walks[here].forward(stage)

    def backward(self, walks, stage):
        here = self.owners[stage]
        if self.plan.stages[stage].whole:
            walks[here].recompute(stage)
        walks[here].backward(stage)
        before = self.owners[stage - 1] if stage else here
        if before != here:
            walks[before].put_gradient(
                stage - 1,
                [None if g is None else g.clone() for g in walks[here].take_gradient(stage - 1)],
            )

    def run(self, parts):
        """All forwards, then all backwards, microbatch by microbatch in each stage."""
        every = [self.begin(part) for part in parts]
        stages = range(len(self.plan.stages))
        for stage in stages:
            for walks in every:
                self.forward(walks, stage)
        last = self.owners[-1]
        total = sum(float(walks[last].loss) for walks in every)
        for stage in reversed(stages):
            for walks in every:
                self.backward(walks, stage)
        return total, self.gradients()

    def gradients(self):
        """Added over workers, by name."""
        found = {}
        for flow in self.flows:
            for name, p in flow.model.named_parameters():
                if p.grad is not None:
                    found[name] = found.get(name, 0) + p.grad
        return found


def check(model, parts, loss, owners, blocks=None, recompute=(), stages=None):
    """Workers beside one; gives the workers."""
    plan = plan_of(model, blocks, recompute, stages)
    wanted, gradients = plain(model, parts, loss)
    workers = Workers(model, plan, loss, owners, parts[0], blocks)
    got, mine = workers.run(parts)
    assert abs(got - wanted) <= 1e-10 * abs(wanted)
    assert set(mine) == set(gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(mine[name], gradient, rtol=1e-10, atol=1e-10, msg=name)
    return workers
