"""What `prepare` may be told as the keys of a run: the numbers of a plain loop."""

from __future__ import annotations

import copy

import pytest
import torch
from plain import batches
from subjects import ROWS, SEQUENCE, VOCAB, config_of
from torch import nn
from torch.nn import functional as F

import outsize
from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.plan import Sharding

SMOOTHING, Z = 0.1, 1e-2


def plain(model, data):
    """Losses and weights of a loop with torch.optim.SGD."""
    model = copy.deepcopy(model)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for batch in data:
        context = model.context(batch.positions().reshape(-1), batch.flat_bounds())
        logits = model.epilogue.logits(model.hidden(batch.ids_BS.reshape(-1), context))
        targets = batch.targets_BS.reshape(-1)
        loss = F.cross_entropy(logits, targets, ignore_index=-100, label_smoothing=SMOOTHING)
        loss = loss + Z * logits.logsumexp(-1)[targets != -100].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, dict(model.named_parameters())


def test_options_of_the_plan_and_of_the_loss():
    model = build(config_of("llama"), seed=1, dtype=torch.float64)
    data = batches(3, ROWS, SEQUENCE, VOCAB)
    losses, expected = plain(model, data)
    job = outsize.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), microbatches=3, recompute=["block"],
        loss_chunk=5, mlp_tile=3, sequence_chunk=7, label_smoothing=SMOOTHING, z_loss=Z,
    )  # fmt: skip
    assert [float(job.step(batch)) for batch in data] == pytest.approx(losses, rel=1e-10)
    said = job.plan.loss_chunk, job.plan.mlp_tile, job.plan.sequence_chunk
    assert said == (5, 3, 7)
    for name, weight in job.weights():
        torch.testing.assert_close(weight, expected[name].detach(), rtol=1e-10, atol=1e-10)
    job.close()
    other = build(config_of("llama"), seed=1, dtype=torch.float64)
    split = outsize.prepare(other, "adamw", split_backward=True, zero=[1, 1, 1], gathered=3)
    split.step(data[0])
    assert split.plan.split_backward and split.plan.shards == Sharding()
    split.close()


def test_what_is_refused():
    model = build(config_of("llama"), seed=1)
    own = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    for subject, options, said in (
        (own, {"z_loss": 0.1}, "z_loss is 0.1, which decoders that outsize.load gives have, and"),
        (own, {"mlp_tile": 4}, "mlp_tile is 4, which decoders"),
        (model, {"label_smoothing": 1.5}, "label_smoothing is 1.5; expected"),
        (model, {"zero": [1, 2]}, r"zero is \[1, 2\]; expected 0 to 3, or three numbers"),
        (model, {"sequence_chunks": 4}, "sequence_chunks is no option.*sequence_chunk"),
    ):
        with pytest.raises(OutsizeError, match=said):
            outsize.prepare(subject, "adamw", **options)
