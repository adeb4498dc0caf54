"""Bytes foretold of several devices, one process each, are those that their allocators count."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import strict
import torch
from foretelling import OVER, ROWS, SEQUENCE, asked, decoder, hardware, measured
from streamed import resting

from outsize import accelerator
from outsize.collectives import Mesh
from outsize.launch import Mailbox, WorkerGroup, enter, run_here
from outsize.memory import meter
from outsize.plan import Plan, Precision, from_yaml, to_yaml, zero
from outsize.plan.plan import per_segment
from outsize.plan.settings import NONE
from outsize.plan.spread import pipelined
from outsize.runtime import spill
from outsize.search import predict
from outsize.simulate import Forecast

BFLOAT16, HOST = Precision.named("bfloat16"), {"optimizer": "host"}
SPILLED = {"rest": {"activations": "host"}}
MESHES: dict[Mesh, dict[str, dict[str, Any]]] = {
    Mesh(2): {
        "zero 0, spilled, chunks": {"loss_chunk": 16, "mlp_tile": 16, **SPILLED},
        "zero 1 on disk": {"shards": zero(1, 2), "rest": {"optimizer": "disk"}},
        "zero 2, bfloat16": {"shards": zero(2, 2), "precision": BFLOAT16},
        "zero 3 on host": {"shards": zero(3, 2), "order": "layer", "rest": HOST},
    },
    Mesh(3): {
        "zero 1, uneven": {"shards": zero(1, 3)},
        "zero 2, uneven, bfloat16": {"shards": zero(2, 3), "precision": BFLOAT16},
    },
    Mesh(1, 2): {
        "bfloat16": {"precision": BFLOAT16},
        "sequence, overlap": {"sequence_parallel": True, "settings": NONE.having({"overlap": 2})},
    },
    Mesh(context=2): {"context": {}},
    Mesh(1, 1, 2): {
        **{name: {"pipeline": pipelined(name)} for name in ("gpipe", "interleaved:2", "dualpipe")},
        "1f1b on host": {"pipeline": pipelined("1f1b"), "rest": HOST},
        "zb-h1": {"pipeline": pipelined("zb-h1"), "split_backward": True},
        "zb-v, spilled": {"pipeline": pipelined("zb-v"), **SPILLED},
    },
}


def plan_of(mesh: Mesh, **changes: Any) -> Plan:
    """Two microbatches on each worker that has rows of its own, of a pipeline four."""
    layers, rest = (3, 4)[mesh.pipeline > 1], changes.pop("rest", {})
    precision = changes.pop("precision", Precision.named("float32"))
    each = 1 if mesh.pipeline > 1 else 2
    plan = Plan(
        layers + 2, per_segment(layers + 2), ROWS * mesh.data, each, SEQUENCE, precision,
        mesh=mesh, **changes,
    )  # fmt: skip
    return resting(plan, **rest)


def foretold(plan: Plan, device: torch.device) -> Forecast:
    line = {"pipeline": plan.pipeline.said} if plan.mesh.pipeline > 1 else {}
    wanted = replace(
        asked(device, plan.precision), rows=plan.rows, mesh=plan.mesh, shards=plan.shards, **line
    )
    return predict(decoder(len(plan.stages) - 2), wanted, plan, hardware(plan.mesh.size))


def found_of(group: WorkerGroup, name: str, plan: Plan) -> list[list[int]]:
    """Of a worker: bytes foretold and measured of steps, then of an evaluation."""
    device = accelerator.find("strict")
    group.pulse.at(name)
    made = group.in_turn(name, lambda: foretold(plan, device))
    plan = from_yaml(group.told(name, lambda: to_yaml(made.plan)))
    config = decoder(len(plan.stages) - 2)
    step, evaluation = measured(config, plan, meter(device), device, group.world)
    turn = made
    if made.ranks:
        turn = made.ranks[plan.mesh.index("pipeline", group.world.rank)]
    return [[turn.peak, step], [turn.evaluation, evaluation]]


@pytest.mark.fresh
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_of_workers(mesh: Mesh, tmp_path: Path) -> None:
    strict.start("random", seed=5, devices=mesh.size)

    def work(post: Mailbox) -> int:
        torch.set_num_threads(1)
        device = accelerator.take("strict", post.here, post.near)
        group = enter(post, mesh, {"torch": torch.__version__}, device)
        with patch.object(spill, "LEAST", 64):  # tiny activations leave, too
            plans = {name: plan_of(mesh, **changes) for name, changes in MESHES[mesh].items()}
            found = {name: found_of(group, name, plan) for name, plan in plans.items()}
        (tmp_path / f"{post.rank}").write_text(json.dumps(found))
        return 0

    assert run_here(mesh.size, work) == 0
    for rank in range(mesh.size):
        for name, pairs in json.loads((tmp_path / f"{rank}").read_text()).items():
            for said, bytes_ in pairs:
                print(f"{name:20} {rank} {said:10,} {bytes_:10,} {said / max(1, bytes_):.4f}")
                assert bytes_ <= said <= OVER * bytes_, (name, rank, said, bytes_)
