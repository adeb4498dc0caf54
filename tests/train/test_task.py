"""Jobs of three functions on several meshes, beside a plain loop."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from threads import play

import outsize
from outsize.collectives import parse_mesh
from outsize.errors import OutsizeError

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import three_functions as example

ROWS, EPOCHS, SEED = 4, 2, 3
EXAMPLES = example.make_examples(11)
HELD = EXAMPLES[:5]


def subject(name):
    torch.manual_seed(0)
    model = example.JOBS[name].make().double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def plain(name):
    """Losses, and what is predicted in the end."""
    own, model = example.JOBS[name], subject(name)
    optimizer, losses = optimizer_of(model), []
    for epoch in range(EPOCHS):
        order = torch.randperm(len(EXAMPLES), generator=torch.Generator().manual_seed(SEED + epoch))
        for first in (0, ROWS):
            batch = own.collate([EXAMPLES[i] for i in order[first : first + ROWS]])
            optimizer.zero_grad()
            loss = own.loss(model(**batch), batch) / (batch["labels"] != -100).sum()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    batch = own.collate(HELD)
    with torch.no_grad():
        return losses, own.predict(model(**batch), batch)


def trained(name, model, mesh, microbatches):
    own = example.JOBS[name]
    task = own.task
    job = outsize.prepare(
        model, optimizer_of(model), loss=task.loss, count=task.count, mesh=mesh,
        microbatches=microbatches,
    )  # fmt: skip
    losses = task.fit(job, EXAMPLES, ROWS, EPOCHS, SEED)
    found = task.predict(job, HELD)
    job.close()
    return losses, torch.stack(found)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("t5", "data=1"), ("t5", "pipeline=2"), ("gptj", "data=2"), ("gptj", "tensor=2")],
)
def test_three_functions_train_and_predict_as_a_plain_loop(near, name, mesh):
    losses, predicted = plain(name)
    microbatches = 2 if mesh.startswith("pipeline") else 1
    model = subject(name)
    work = near(lambda world: trained(name, copy.deepcopy(model), mesh, microbatches))
    for found, made in play(parse_mesh(mesh), work):
        assert found == pytest.approx(losses, rel=1e-8)
        assert torch.equal(made, predicted)


def test_what_cannot_be_is_refused():
    own, model = example.JOBS["gptj"], subject("gptj")
    task = outsize.Task(own.collate, own.loss, lambda output, batch: output.logits.sum())
    job = outsize.prepare(copy.deepcopy(model), "adamw", loss=task.loss, count=task.count)
    with pytest.raises(OutsizeError, match="rows is 12, expected a multiple of 1"):
        task.fit(job, EXAMPLES, 12)
    task.fit(job, EXAMPLES, ROWS, lr=1e-3)
    with pytest.raises(OutsizeError, match=r"predict gives \(\) for 4 examples"):
        task.predict(job, HELD)
