"""Weights by target, and a loss with coefficients, in every kernel of the head: whole, in chunks,
its vocabulary cut over workers in one pass or two. Against whole logits and autograd in float64."""

from __future__ import annotations

import pytest
import torch
from clipped import Clipped, plainly
from threads import play
from torch.nn import functional as F

from outsize.collectives import Mesh, along
from outsize.kernels.entropy import LossOptions, Targets, Vocabulary
from outsize.kernels.loss import Head, chunked_loss
from outsize.kernels.vocabulary import Part, agree, early_gradient, score, settle

TOKENS, HIDDEN, VOCAB = 22, 6, 31
SPANS = ((0, 3), (3, 4), (4, 31))
FACTOR = 1 / 17


def subject():
    torch.manual_seed(11)
    h = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.float64, requires_grad=True)
    vector = torch.randn(VOCAB, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, VOCAB, (TOKENS,))
    ids[[0, 3, 21]] = -100
    weights = 2 * torch.rand(TOKENS)
    weights[7:12] = 0.0
    near = F.linear(h, weight, vector).log_softmax(-1).gather(1, ids.clamp(0).unsqueeze(1))
    near = near.squeeze(1).detach()
    columns = {
        "advantage": torch.randn(TOKENS, dtype=torch.float64),  # negative ones as well
        "old": near + 0.3 * torch.randn(TOKENS, dtype=torch.float64),
        "reference": near + torch.randn(TOKENS, dtype=torch.float64),
    }
    columns["advantage"][[0, 8]] = float("nan")  # no target, and one of weight 0
    return h, weight, vector, Targets(ids, weights, columns)


def whole(h, weight, vector, targets, terms, loss):
    logits = F.linear(h, weight, vector)
    entropy = F.cross_entropy(
        logits, targets.ids_T, reduction="none", label_smoothing=terms.label_smoothing
    )
    entropy = entropy + terms.z_loss * logits.logsumexp(-1).square() * (targets.ids_T != -100)
    counts = (targets.ids_T != -100) & (targets.weights_T != 0)
    columns = {name: x[counts] for name, x in targets.columns.items()}
    entropy = entropy[counts]
    made = entropy if loss is None else plainly(-entropy, columns)
    return (made * targets.weights_T[counts]).sum() * FACTOR


def close(a, b, limit=1e-10):
    return float((a - b).abs().max()) <= limit * float(b.abs().max())


CASES = [
    (LossOptions(), None), (LossOptions(0.1), None), (LossOptions(0.3, 1e-3), None),
    (LossOptions(), Clipped()),
]  # fmt: skip


class Sums:
    def __init__(self, *weights):
        self.of = {id(w): torch.zeros_like(w) for w in weights}

    def __call__(self, weight, compute):
        with torch.no_grad():
            compute(self.of[id(weight)])


@pytest.mark.parametrize("chunk", [1, 5, 100])
@pytest.mark.parametrize(("terms", "loss"), CASES)
def test_a_whole_head(terms, loss, chunk):
    h, weight, vector, targets = subject()
    expected = whole(h, weight, vector, targets, terms, loss)
    gradients = torch.autograd.grad(expected, [h, weight, vector])
    sink = Sums(weight, vector)
    made = chunked_loss(
        h, weight, vector, targets, Head(FACTOR, chunk, sink, options=terms, loss=loss)
    )
    made.backward()
    got = [made.detach(), h.grad, sink.of[id(weight)], sink.of[id(vector)]]
    for ours, theirs in zip(got, [expected.detach(), *gradients], strict=True):
        assert close(ours, theirs)
    assert not h.grad[7:12].any(), "a weight of 0 is no target"
    with torch.no_grad():  # an evaluation is of the cross-entropy, by weights
        bare = whole(h, weight, vector, targets, LossOptions(), None)
        head = Head(FACTOR, chunk, sink, options=terms, loss=loss)
        assert close(chunked_loss(h, weight, vector, targets, head), bare)


def in_one_pass(x, mine, targets, head, axis):
    loss = chunked_loss(x, *mine, targets, head)
    loss.backward()
    return loss.detach(), axis.all_reduce(x.grad)


def in_two(early):
    def run(x, mine, targets, head, axis):
        part = Part(*mine, head)
        scored = score(x.detach(), targets, part, early)
        agreed = agree(scored, part)
        summand = early_gradient(scored, agreed) if early else None
        late = settle(scored, agreed, part)
        return agreed.loss, axis.all_reduce(late if summand is None else summand)

    return run


@pytest.mark.parametrize("run", [in_one_pass, in_two(False), in_two(True)])
@pytest.mark.parametrize(("terms", "loss"), CASES)
def test_a_head_that_is_cut(terms, loss, run):
    h, weight, vector, targets = subject()
    expected = whole(h, weight, vector, targets, terms, loss)
    gradients = torch.autograd.grad(expected, [h, weight, vector])

    def work(world):
        axis = along(world, "tensor")
        rows = slice(*SPANS[axis.rank])
        mine = [x.detach()[rows].clone().requires_grad_() for x in (weight, vector)]
        sink, x = Sums(*mine), h.detach().requires_grad_()
        head = Head(FACTOR, 5, sink, options=terms, vocabulary=Vocabulary(SPANS, axis), loss=loss)
        made, gradient = run(x, mine, targets, head, axis)
        return made, gradient, *(sink.of[id(x)] for x in mine)

    losses, hidden, *parts = zip(*play(Mesh(tensor=len(SPANS)), work), strict=True)
    assert all(close(one, expected.detach()) for one in losses)
    assert all(close(one, gradients[0]) for one in hidden)
    for part, theirs in zip(parts, gradients[1:], strict=True):
        assert close(torch.cat(part), theirs)
