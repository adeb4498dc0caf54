"""What a run's values say of training arrives in its steps: the numbers of a plain loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outsize.checkpoint import hub
from outsize.data import TrainStream
from outsize.kernels.entropy import LossOptions
from outsize.models.build import build
from outsize.models.dropout import Noise
from outsize.optim import AdamW
from outsize.train.metrics import read_metrics
from outsize.train.opening import data_of
from outsize.train.resolve import resolve
from outsize.train.setup import set_up
from outsize.verify import plain
from outsize.verify.naive import NativeLoss

SEED, STEPS, CLIP = 5, 3, 0.3
SAID = {
    "precision": "float64", "train.steps": STEPS, "train.seed": SEED, "train.clip": CLIP,
    "train.dropout": 0.125, "train.label_smoothing": 0.1, "train.z_loss": 0.01,
    "optimizer.lr": 0.01, "optimizer.betas": "[0.8, 0.9]", "optimizer.weight_decay": 0.3,
    "learning_rate.warmup": 0, "learning_rate.shape": "linear", "learning_rate.final": 0.25,
    "sample.tokens": 0,
}  # fmt: skip


def reference(data, config):
    """The same training without a plan; every number is written out here again."""
    model = build(config, SEED, dtype=torch.float64)
    masters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    stream = TrainStream(data.train, SEED, 4, 64)
    batches = [replace(stream.batch(step), noise=Noise(0.125, SEED, step)) for step in range(STEPS)]
    rates = tuple(0.01 * (1 - 0.75 * step / STEPS) for step in range(STEPS))
    recipe = plain.Recipe(AdamW(0.01, (0.8, 0.9), weight_decay=0.3), rates, CLIP)
    loss = NativeLoss(model, LossOptions(0.1, 0.01), ())
    return plain.train(plain.Plain(model, loss, masters), recipe, batches)


@pytest.mark.parametrize(
    "plan", [{}, {"plan.microbatch_rows": 1, "plan.recompute": "[block]", "plan.loss_chunk": 40}]
)
def test_a_run_has_the_numbers_of_a_plain_loop(runs, plan, monkeypatch) -> None:
    said = {name.replace(".", "__"): value for name, value in (SAID | plan).items()}
    runs.train(**said)
    from rich.console import Console

    from outsize.launch import WorkerGroup

    setup = set_up(resolve(None, runs.sets(**said)))
    steps = reference(data_of(setup, Console(quiet=True), WorkerGroup()), setup.subject.config)
    records = [r for r in read_metrics(runs.home / "run") if "loss" in r]
    assert [r["loss"] for r in records] == pytest.approx([s.loss for s in steps], rel=1e-10)
    norms = [s.norm for s in steps]
    assert [r["gradient_norm"] for r in records] == pytest.approx(norms, rel=1e-10)
    assert min(norms) > CLIP, "each step is clipped"
    found = hub.load(runs.home / "run" / "step-00000003", torch.float64)
    for name, weight in found.named_parameters():
        torch.testing.assert_close(weight.detach(), steps[-1].weights[name], rtol=1e-10, atol=1e-10)
