"""What `outsize eval` adds up, beside a loop over targets."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from outsize.cli.evaluate import _numbers
from outsize.data.source import Document
from outsize.data.sources import ReadLog
from outsize.serve.evaluate import evaluate

VOCAB = 7


class Table:
    """A model whose logits follow from the last token alone."""

    home = None
    config = SimpleNamespace(vocab=VOCAB)

    def __init__(self) -> None:
        self.table_VV = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))

    def logits(self, ids_T, bounds):
        assert bounds[0] == 0 and bounds[-1] == len(ids_T)
        return self.table_VV[ids_T]


@pytest.mark.parametrize("sequence", [3, 50])
def test_targets_count_by_their_weights(sequence) -> None:
    """Over windows that cut documents, and documents without a target."""
    made, model, documents = np.random.default_rng(2), Table(), []
    for size in (9, 2, 5, 12):
        ids, widths = made.integers(0, VOCAB, size), made.integers(0, 4, size)
        weights = made.choice([0.0, 0.5, 1.0, 2.0], size).astype(np.float32) * (size != 2)
        documents.append(Document(ids, True, 0, weights, widths))
    found = evaluate(model, documents, 0, sequence, False, ReadLog())
    nats = weight = size = targets = right = whole = 0
    for one in documents:
        wrong = 0
        for last, token, by, width in zip(
            one.ids, one.ids[1:], one.weights[1:], one.widths[1:], strict=False
        ):
            if by > 0:
                log_V = model.table_VV[last].double().log_softmax(-1)
                nats, weight, size = nats - by * float(log_V[token]), weight + by, size + by * width
                targets, hit = targets + 1, int(log_V.argmax()) == token
                right, wrong = right + hit, wrong + (not hit)
        whole += not wrong
    assert (found.targets, found.right, found.documents, found.whole) == (targets, right, 4, whole)
    assert found.loss == pytest.approx(nats / weight, rel=1e-6)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-6)
    said = _numbers(found, answers=True)
    assert said["right"] == right / targets and said["exact_match"] == whole / 4
