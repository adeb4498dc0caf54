"""torch FSDP2 (fully_shard, a layer a unit), alone or over DTensor's tensor parallelism; and that
alone, with and without sequence parallelism. The plans are those of PyTorch's own tutorials."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from support.contender_parallel import Answer, Task, answer, serve, targets_of
from support.llama_parallel import Llama, groups_of, loss_of, model_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F


def split(model: Llama, mesh: DeviceMesh, sequence: bool) -> None:
    """Tensor parallelism; sequence: what lies between branches is cut along the tokens."""
    between = Shard(1) if sequence else Replicate()
    ends: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    layer: dict[str, Any] = {
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        **{f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")},
        "attention.o": RowwiseParallel(output_layouts=between),
        "mlp.down": RowwiseParallel(output_layouts=between),
    }
    if sequence:
        gather = (Shard(1), None, None), (Replicate(), None, None)
        ends["norm"] = SequenceParallel()
        layer |= {
            "attention_norm": SequenceParallel(),
            "mlp_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=gather[0], desired_input_layouts=gather[1]
            ),
            "mlp": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
        }
    parallelize_module(model, mesh, ends)
    for each in model.layers:
        parallelize_module(each, mesh, layer)


class Worker:
    def __init__(self, task: Task, rank: int) -> None:
        mesh = init_device_mesh("cpu", (task.data, task.tensor), mesh_dim_names=("data", "tensor"))
        self.task, self.rank, self.model = task, rank, model_of(task)
        if task.tensor > 1:
            split(self.model, mesh["tensor"], task.sequence_parallel)
        if task.data > 1:
            for layer in self.model.layers:
                fully_shard(layer, mesh=mesh["data"])
            fully_shard(self.model, mesh=mesh["data"])
        kinds = [_of_kind(groups_of(self.model, task), cut) for cut in (True, False)]
        self.groups = [group for groups in kinds for group in groups if group["params"]]
        self.optimizer = torch.optim.AdamW(
            self.groups, lr=task.lr, betas=task.betas, eps=task.eps, fused=True
        )

    def step(self, ids_BS: Tensor) -> float:
        mine_BS = self.task.mine(ids_BS, self.rank)
        with loss_parallel() if self.task.tensor > 1 else nullcontext():
            loss = self._loss(mine_BS)
            loss.backward()
        self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.full_tensor() if isinstance(loss, DTensor) else loss)

    def _loss(self, ids_BS: Tensor) -> Tensor:
        logits_BSV = self.model(ids_BS)
        if self.task.tensor == 1:
            return loss_of(logits_BSV, ids_BS)
        return F.cross_entropy(logits_BSV.flatten(0, 1), targets_of(ids_BS).flatten())

    def _clip(self) -> None:
        """By the norm of everything; kinds of tensors that may not be mixed apart."""
        gradients = [[p.grad for p in g["params"]] for g in self.groups]
        norms = [nn.utils.get_total_norm(grads) for grads in gradients]
        plain = [n.full_tensor() if isinstance(n, DTensor) else n for n in norms]
        total = torch.stack(plain).norm()
        for group in self.groups:
            nn.utils.clip_grads_with_norm_(group["params"], self.task.clip, total)

    def found(self, base: int, peak: int) -> Answer:
        return answer(base, peak)


def _of_kind(groups: list[dict[str, Any]], cut: bool) -> list[dict[str, Any]]:
    return [
        {**group, "params": [p for p in group["params"] if isinstance(p, DTensor) is cut]}
        for group in groups
    ]


if __name__ == "__main__":
    serve(Worker)
