"""States of a prepared job on a pipeline: saved whole, for any mesh to go on from."""

from __future__ import annotations

import pytest
import torch
from threads import play
from torch import nn
from torch.nn import functional as F

import outsize
from outsize.checkpoint.store import Store
from outsize.collectives import parse_mesh
from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.models.families import parse

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 97,
    "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 48,
    "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
SMALL = 20_000  # bytes of a file: weights and states are several, and the last of each not full


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    monkeypatch.setattr(
        "outsize.train.prepared.states.Store", lambda path, keep=None: Store(path, keep, SMALL)
    )


def test_a_native_decoder(near, tmp_path):
    mesh, ids = "pipeline=2,tensor=2", torch.randint(0, 97, (4, 16))

    def work(world):
        model = build(parse(CONFIG), 0, dtype=torch.float64)
        job = outsize.prepare(model, "adamw", mesh=mesh, microbatches=2)
        job.step(ids)
        job.save(tmp_path)
        found = float(job.step(ids))
        job.close()
        return found

    said = play(parse_mesh(mesh), near(work))
    assert isinstance(outsize.load(tmp_path), nn.Module)
    job = outsize.prepare(build(parse(CONFIG), 1, dtype=torch.float64), "adamw")
    job.load(tmp_path)
    assert said == pytest.approx([float(job.step(ids))] * 4, rel=1e-9)


class Counting(nn.Module):
    """Counts its rows."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += len(x)
        return x + self.inner(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counting() for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_an_adopted_module(near, tmp_path):
    """Its buffers are those of the worker that moves them; and where the first cannot write, nobody
    waits for it."""
    batch = torch.randn(6, 8).double(), torch.randint(0, 3, (6,))

    def job_of(seed: int, **more):
        torch.manual_seed(seed)
        total = {"count": lambda given: 6.0, "microbatches": 2}
        return outsize.prepare(Net().double(), "adamw", loss=loss, **total, **more)

    def loss(output, given):
        return F.cross_entropy(output, given[1], reduction="sum")

    def work(world):
        job = job_of(0, mesh="pipeline=2")
        for _ in range(2):
            job.step(batch)
        where = job.save(tmp_path)
        assert where == tmp_path / "step-00000002" and (where / "manifest.json").exists()
        kept = job.state_dict()["buffers"]
        with pytest.raises(OutsizeError, match="step 2 is already saved"):
            job.save(tmp_path)
        found = float(job.step(batch))
        job.close()
        return found, {name: int(value) for name, value in kept.items()}

    said = play(parse_mesh("pipeline=2"), near(work))
    again = job_of(7)
    again.load(tmp_path)
    assert [found for found, _ in said] == pytest.approx([float(again.step(batch))] * 2, rel=1e-10)
    assert [seen for _, seen in said] == [{f"blocks.{i}.seen": 12 for i in range(4)}] * 2
    assert int(again.model.blocks[3].seen) == 18
