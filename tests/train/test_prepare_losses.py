"""What `prepare` does with losses by target, weights of labels, and batches of nothing."""

from __future__ import annotations

import plain
import pytest
import torch
from clipped import Clipped, plainly
from subjects import VOCAB, config_of
from torch import nn
from torch.nn import functional as F

import outsize
from outsize.data import Batch
from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.optim import SGD


def model():
    return build(config_of("llama"), seed=1, dtype=torch.float64)


def ids(rows=3, tokens=12):
    return torch.randint(0, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(2))


def test_weights_of_labels():
    """As every trainer's collator has them: label and weight of the token itself, not of the next
    one; -100 for none."""
    tokens, twin = ids(), model()
    labels = tokens.masked_fill(torch.rand(tokens.shape) < 0.3, -100)
    weights = torch.rand(tokens.shape)
    job = outsize.prepare(model(), SGD(0.1), microbatches=2)
    made = job.step({"input_ids": tokens, "labels": labels, "weights": weights})
    batch = Batch(tokens, tokens, ((0, 12),) * 3)
    context = twin.context(batch.positions().reshape(-1), batch.flat_bounds())
    logits = twin.epilogue.logits(twin.hidden(tokens.reshape(-1), context)).view(3, 12, -1)
    losses = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="none"
    )
    counted = (weights[:, 1:] * (labels[:, 1:] != -100)).flatten()
    expected = (losses * counted).sum() / counted.double().sum()
    assert float(made) == pytest.approx(float(expected.detach()), rel=1e-10)
    with pytest.raises(OutsizeError, match=r"weights is a torch\.float32 tensor of shape"):
        job.step({"input_ids": tokens, "weights": torch.ones(3)})


def test_a_loss_of_targets():
    """Coefficients and other models' log-probabilities, through the public function."""
    (batch,) = plain.batches(1, 3, 12, VOCAB)
    shape = batch.targets_BS.shape
    columns = {name: torch.randn(shape, dtype=torch.float64) for name in ("advantage", "old")}
    columns["reference"] = torch.randn(shape, dtype=torch.float64)
    job, twin = outsize.prepare(model(), SGD(0.1), loss=Clipped(), clip=None), model()
    with pytest.raises(OutsizeError, match="the loss reads the column 'advantage' of each target"):
        job.step(batch)
    made = job.step(Batch(batch.ids_BS, batch.targets_BS, batch.bounds, columns=columns))
    context = twin.context(batch.positions().reshape(-1), batch.flat_bounds())
    logits = twin.epilogue.logits(twin.hidden(batch.ids_BS.reshape(-1), context))
    targets = batch.targets_BS.reshape(-1)
    entropy = F.cross_entropy(logits, targets, ignore_index=-100, reduction="none")
    losses = plainly(-entropy, {name: x.reshape(-1) for name, x in columns.items()})
    expected = losses[targets != -100].mean()
    expected.backward()
    assert float(made) == pytest.approx(float(expected.detach()), rel=1e-10)
    updated = dict(job.weights())
    for name, p in twin.named_parameters():
        wanted = p.detach() - 0.1 * p.grad
        torch.testing.assert_close(updated[name], wanted, rtol=1e-10, atol=1e-10)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_what_does_not_go_together():
    with pytest.raises(OutsizeError, match="has no output to take it from"):
        outsize.prepare(model(), "adamw", loss=lambda output, batch: output.loss)
    with pytest.raises(OutsizeError, match="count is given with a decoder"):
        outsize.prepare(model(), "adamw", count=lambda batch: 1.0)
    with pytest.raises(OutsizeError, match=r"only decoders that outsize\.load gives have"):
        outsize.prepare(Blocks(), "adamw", loss=Clipped())


@pytest.mark.parametrize(
    ("make", "batch"),
    [
        (Blocks, torch.zeros(0, 4)),
        (Blocks, {"x": torch.zeros(0, 4)}),
        (model, torch.zeros(0, 8, dtype=torch.int64)),
        (model, torch.zeros(2, 0, dtype=torch.int64)),
    ],
)
def test_a_batch_of_nothing_is_refused(make, batch):
    """It has no loss: a mean over nothing is no number."""
    job = outsize.prepare(make(), "adamw")
    with pytest.raises(OutsizeError, match="batch is empty: it begins with a torch"):
        job.step(batch)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (torch.full((2, 8), VOCAB), f"batch: token id {VOCAB} is not in the model's vocabulary"),
        (torch.full((2, 8), -1), f"token id -1 .*; expected 0 to {VOCAB - 1}: use the model's own"),
        (
            {"input_ids": torch.ones(2, 8).long(), "labels": torch.full((2, 8), VOCAB)},
            f"batch: target {VOCAB} is not",
        ),
        (
            {"input_ids": torch.ones(2, 8).long(), "labels": torch.ones(2, 4).long()},
            r"labels is a torch.int64 tensor of shape \(2, 4\); expected a target for each",
        ),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_ids_that_the_vocabulary_has_not(first, batch, said):
    """The refused step leaves the weights alone."""
    made = model()
    job = outsize.prepare(made, "adamw")
    if not first:
        job.step(torch.ones(2, 8).long())
    before = [p.detach().clone() for p in made.parameters()]
    with pytest.raises(OutsizeError, match=said):
        job.step(batch)
    assert all(torch.equal(p, b) for p, b in zip(made.parameters(), before, strict=True))


def test_a_prompt_that_is_no_text():
    """Bytes of a command line that are not UTF-8."""
    from outsize.data import ByteTokenizer
    from outsize.decode.text import prompt_ids

    with pytest.raises(OutsizeError, match="prompt is not UTF-8 behind 'caf'"):
        prompt_ids(ByteTokenizer(), "caf\udce9")


def test_a_loss_sees_a_batch_as_it_was_handed_in():
    """A tokenizer's BatchEncoding, whose entries have names, cut into microbatches too; so does a
    count, and a Task."""
    from transformers import BatchEncoding

    def total(output, batch):
        assert type(batch) is BatchEncoding
        return ((output - batch.labels) ** 2).sum()

    class Line(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1, dtype=torch.float64)

        def forward(self, inputs, labels=None):
            return self.layer(inputs)[:, 0]

    inputs, labels = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    module = Line()
    expected = float(((module(inputs) - labels) ** 2).mean().detach())
    batch = BatchEncoding({"inputs": inputs, "labels": labels})
    job = outsize.prepare(
        module, SGD(0.0), loss=total, count=lambda batch: len(batch.labels), microbatches=2
    )
    assert float(job.step(batch)) == pytest.approx(expected, rel=1e-12)
    job.close()
    task = outsize.Task(
        lambda rows: BatchEncoding({"inputs": inputs[rows], "labels": labels[rows]}), total,
        lambda output, batch: output.detach() + 0 * batch.labels,
    )  # fmt: skip
    job = outsize.prepare(module, SGD(0.0), loss=task.loss, count=task.count)
    assert task.fit(job, range(6), rows=6) == pytest.approx([expected], rel=1e-12)
    found = torch.stack(task.predict(job, range(6)))
    torch.testing.assert_close(found, module(inputs).detach(), rtol=1e-12, atol=1e-12)
