"""The plain PyTorch loop that jobs are compared with: whole logits, autograd, torch.optim."""

from __future__ import annotations

import copy
import itertools

import torch
from torch.nn import functional as F

from outsize.data import Batch
from outsize.models.decoder import Decoder


def loss_of(model: Decoder, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy over the valid targets of a batch, by their weights."""
    context = model.context(batch.positions().reshape(-1), batch.flat_bounds())
    logits = model.epilogue.logits(model.hidden(batch.ids_BS.reshape(-1), context))
    targets = batch.targets_BS.reshape(-1)
    if batch.weights_BS is None:
        return F.cross_entropy(logits, targets, ignore_index=-100)
    losses = F.cross_entropy(logits, targets, ignore_index=-100, reduction="none")
    weights = batch.weights_BS.reshape(-1) * (targets != -100)
    return (losses * weights).sum() / weights.double().sum()


def train(model: Decoder, batches, lrs, clip, decay, betas=(0.9, 0.95)):
    """Plain AdamW training of a copy; gives losses, norms, last gradients and the copy."""
    model = copy.deepcopy(model)
    named = list(model.named_parameters())
    groups = [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=betas)
    losses, norms = [], []
    for batch, lr in zip(batches, lrs, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms, model


def batches(count, rows, sequence, vocab, seed=0):
    """Rows of documents of random, uneven lengths; one row has no target at all."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        ids = torch.randint(0, vocab, (rows, sequence), generator=generator)
        targets = torch.full_like(ids, -100)
        bounds = []
        for row in range(rows):
            cuts = torch.randint(1, sequence, (2,), generator=generator).tolist()
            edges = tuple(sorted({0, sequence, *cuts}))
            for start, stop in itertools.pairwise(edges):
                targets[row, start : stop - 1] = ids[row, start + 1 : stop]
            bounds.append(edges)
        targets[rows - 1] = -100
        made.append(Batch(ids, targets, tuple(bounds)))
    return made
