"""`verify` on the device, each worker on one of its own: what a plan gives is what plain PyTorch
gives on the CPU, in an order of streams of its own for each plan.

The workers are threads of one process, so that a plan costs a second or two; `test_workers.py` and
`test_torchrun.py` have processes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import strict
import torch
from streamed import resting
from torch import nn
from verifying import case_of

from outsize.collectives import Mesh
from outsize.errors import OutsizeError
from outsize.optim import AdamW
from outsize.plan import Pipelined, Plan, Precision, Sharding, zero
from outsize.plan.plan import per_segment
from outsize.plan.settings import NONE
from outsize.verify import Adopted, Case, verify
from outsize.verify.planned import judging

DATA, TENSOR, LINE = Mesh(2), Mesh(1, 2), Mesh(1, 1, 2)
PLANS: dict[str, dict[str, Any]] = {
    "zero 0, recompute, chunks": {
        "mesh": DATA, "stages": per_segment(5, ("block",)), "loss_chunk": 7, "mlp_tile": 6,
    },
    "zero 2": {"mesh": DATA, "shards": zero(2, 2), "order": "layer", "resume_at": 1},
    "zero 3 on host": {
        "mesh": DATA, "shards": zero(3, 2), "order": "layer",
        "rest": {"optimizer": "host"},
    },
    "zero 1 on disk": {
        "mesh": DATA, "shards": Sharding(1, 1, 2), "rest": {"optimizer": "disk"}, "resume_at": 1,
    },
    "spilled": {"mesh": DATA, "rest": {"activations": "host"}},
    "tensor, overlap": {
        "mesh": TENSOR, "settings": NONE.having({"overlap": 3}), "sequence_parallel": True,
        "order": "layer", "rest": {"optimizer": "host"},
    },
    "context": {"mesh": Mesh(context=2), "resume_at": 1},
    "expert": {"mesh": Mesh(expert=2), "family": "mixtral", "resume_at": 1},
    "expert, data": {"mesh": Mesh(2, expert=2), "family": "mixtral", "rows": 4},
    "tensor, data": {"mesh": Mesh(2, 2), "shards": zero(1, 2), "clip": 0.5},
    **{
        f"pipeline, {name}": {"mesh": LINE, "pipeline": Pipelined(name), **more}
        for name, more in {
            "gpipe": {}, "1f1b": {"rest": {"optimizer": "host"}}, "interleaved:2": {},
            "zb-h1": {"split_backward": True}, "zb-v": {"rest": {"activations": "host"}},
            "dualpipe": {"resume_at": 1, "rows": 4},
        }.items()
    },
    **{
        f"pipeline, vocabulary {variant}": {
            "mesh": LINE, "pipeline": Pipelined("1f1b", vocabulary=variant), "resume_at": 1,
        }
        for variant in (1, 2)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_a_plan(name: str) -> None:
    strict.start(*strict.ORDERS[list(PLANS).index(name)], devices=4, device_bytes=1 << 28)
    changes = dict(PLANS[name])
    rest = changes.pop("rest", {})
    case = case_of(changes.pop("family", "llama, untied"), **changes)
    case = replace(case, plan=resting(case.plan, **rest), device="strict")
    found = verify(case, own=False)
    assert found.holds, found.exact
    assert torch.accelerator.max_memory_allocated(case.plan.mesh.size - 1) > 0


def test_layer_norms_in_16_bits() -> None:
    """Whose kernel on the CPU keeps means and deviations in another type than devices do."""
    strict.start("random", seed=6, devices=2)
    found = verify(replace(case_of("gpt2", named="bfloat16"), device="strict"))
    assert found.own is not None and found.holds, found.over


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for layer in self.layers:
            h = h + layer(h).tanh()
        return self.last(h)


def _count(batch: dict[str, torch.Tensor]) -> float:
    return float(len(batch["target"]))


def _rows(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(7, 5, generator=generator),
        "target": torch.randint(0, 3, (7,), generator=generator),
    }


@pytest.mark.parametrize("mesh", [Mesh(2), Mesh(1, 1, 2)], ids=str)
def test_a_module_of_somebodys_own(mesh: Mesh) -> None:
    strict.start("random", seed=4, devices=2)
    torch.manual_seed(0)

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(output, batch["target"], reduction="sum")

    own = Adopted(Net(), lambda step, rows: _rows(step), loss, _count, "layers.*")
    shards = zero(3, 2) if mesh.data > 1 else Sharding()
    exact = Precision.named("float64")
    plan = Plan(5, per_segment(5), 7, 2, precision=exact, mesh=mesh, shards=shards)
    case = Case(own, plan, AdamW(1e-2, eps=1e-4), _rows, 2, device="strict")
    assert verify(case, own=False).holds


def test_without_enough_devices_the_cpu_judges() -> None:
    strict.start("demand", devices=2)
    assert [judging("auto", n) for n in (1, 2, 3)] == ["strict", "strict", "cpu"]
    assert judging("cpu", 1) == "cpu"
    with pytest.raises(OutsizeError, match="3 workers share 2 devices"):
        verify(replace(case_of(mesh=Mesh(3)), device="strict"), own=False)
