"""The chunked cross-entropy against plain logits and autograd, and what it holds."""

from __future__ import annotations

import itertools

import pytest
import torch
from threads import play
from torch.nn import functional as F

from outsize.collectives import Alone, Mesh, along
from outsize.errors import OutsizeError
from outsize.kernels.entropy import LossOptions, Vocabulary
from outsize.kernels.loss import Head, Targets, chunked_loss
from outsize.memory import Ledger

TOKENS, HIDDEN, VOCAB = 22, 6, 31
FACTOR = 1 / 17


class Sums:
    """A sink with one buffer a weight."""

    def __init__(self, *weights: torch.Tensor, dtype: torch.dtype) -> None:
        self.of = {id(w): torch.zeros(w.shape, dtype=dtype) for w in weights}

    def __call__(self, weight, compute) -> None:
        with torch.no_grad():
            compute(self.of[id(weight)])


def plain(h, weight, bias, targets, scale=1.0, softcap=None, smoothing=0.0, z_loss=0.0):
    """Sum of losses times FACTOR from whole logits."""
    logits = F.linear(h, weight, bias) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits, valid = logits.double(), targets != -100
    losses = F.cross_entropy(
        logits, targets, ignore_index=-100, reduction="sum", label_smoothing=smoothing
    )
    return (losses + z_loss * (logits.logsumexp(-1).square() * valid).sum()) * FACTOR


def subject(dtype=torch.float64, bias=True):
    h = torch.randn(TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, dtype=dtype, requires_grad=True)
    vector = torch.randn(VOCAB, dtype=dtype, requires_grad=True) if bias else None
    targets = torch.randint(0, VOCAB, (TOKENS,))
    targets[[0, 3, 21]] = -100
    targets[5:10] = -100  # a whole chunk of five
    return h, weight, vector, targets


def close(a, b, limit=1e-10):
    return float((a - b).abs().max()) <= limit * float(b.abs().max())


OPTIONS = list(itertools.product([1, 5, 8, 22, 100], [False, True], [1.0, 0.3], [None, 2.0]))


@pytest.mark.parametrize(("chunk", "bias", "scale", "softcap"), OPTIONS)
def test_loss_and_gradients_equal_plain_logits(chunk, bias, scale, softcap):
    h, weight, vector, targets = subject(bias=bias)
    wanted = [h, weight] if vector is None else [h, weight, vector]
    expected = plain(h, weight, vector, targets, scale, softcap)
    gradients = torch.autograd.grad(expected, wanted)

    sink = Sums(*wanted[1:], dtype=torch.float64)
    head = Head(FACTOR, chunk, sink, scale, softcap)
    loss = chunked_loss(h, weight, vector, Targets(targets), head)
    loss.backward()
    assert loss.dtype == torch.float64 and close(loss.detach(), expected.detach())
    got = [h.grad, *(sink.of[id(w)] for w in wanted[1:])]
    assert all(close(ours, theirs) for ours, theirs in zip(got, gradients, strict=True))
    assert not h.grad[targets == -100].any(), "a token without a target has no gradient"


TERMS = [LossOptions(0.1), LossOptions(z_loss=0.02), LossOptions(0.3, 1e-3)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.3, 2.0)])
def test_terms_of_the_loss(terms, scale, softcap, dtype):
    """Label smoothing as PyTorch has it, the z-loss as PaLM has it, behind scale and cap; in
    float32, which has a fused pass without them, too."""
    h, weight, vector, targets = subject(dtype)
    added = (terms.label_smoothing, terms.z_loss)
    wide = [x.detach().double().requires_grad_() for x in (h, weight, vector)]
    expected = plain(*wide, targets, scale, softcap, *added)
    gradients = torch.autograd.grad(expected, wide)
    limit = 1e-10 if dtype == torch.float64 else 2e-6
    sink = Sums(weight, vector, dtype=dtype)
    head = Head(FACTOR, 5, sink, scale, softcap, terms)
    loss = chunked_loss(h, weight, vector, Targets(targets), head)
    loss.backward()
    got = [loss.detach(), h.grad, sink.of[id(weight)], sink.of[id(vector)]]
    for ours, theirs in zip(got, [expected.detach(), *gradients], strict=True):
        assert close(ours, theirs, limit)

    with torch.no_grad():  # an evaluation has none of it
        bare = plain(*wide, targets, scale, softcap)
        assert close(chunked_loss(h, weight, vector, Targets(targets), head), bare, limit)


def test_half_precision_is_widened_where_the_fused_pass_does_not_serve():
    """The product is rounded; what is made of it is in float32, where it would be 4e-3 off."""
    h, weight, _, targets = subject(torch.bfloat16, bias=False)
    logits = (h @ weight.t()).detach().double() * 0.3
    expected = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=0.1) * FACTOR
    head = Head(FACTOR, 5, Sums(weight, dtype=torch.float32), 0.3, None, LossOptions(0.1))
    loss = chunked_loss(h, weight, None, Targets(targets), head)
    assert loss.dtype == torch.float32 and close(loss.detach(), expected, 1e-5)


@pytest.mark.parametrize("terms", [LossOptions(), *TERMS])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.3, 2.0)])
@pytest.mark.parametrize("large", [1.0, 1e4])
@pytest.mark.parametrize("spans", [((0, 16), (16, 31)), ((0, 3), (3, 4), (4, 31))])
def test_a_vocabulary_of_several_workers(spans, large, scale, softcap, terms):
    """Uneven parts; logits so large that only a shift by the largest of all workers' saves them."""
    h, weight, vector, targets = subject()
    with torch.no_grad():
        weight.mul_(large)
    added = (terms.label_smoothing, terms.z_loss)
    expected = plain(h, weight, vector, targets, scale, softcap, *added)
    gradients = torch.autograd.grad(expected, [h, weight, vector])

    def work(world):
        axis = along(world, "tensor")
        rows = slice(*spans[axis.rank])
        mine = [x.detach()[rows].clone().requires_grad_() for x in (weight, vector)]
        sink, x = Sums(*mine, dtype=torch.float64), h.detach().requires_grad_()
        vocabulary = Vocabulary(spans, axis)
        loss = chunked_loss(
            x, *mine, Targets(targets), Head(FACTOR, 5, sink, scale, softcap, terms, vocabulary)
        )
        loss.backward()
        assert [name for name, _ in axis.calls] == ["all_gather"] * 5, "once a chunk"
        return loss.detach(), x.grad, *(sink.of[id(x)] for x in mine)

    losses, hidden, *parts = zip(*play(Mesh(tensor=len(spans)), work), strict=True)
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    assert close(losses[0], expected.detach())
    assert close(torch.stack(hidden).sum(0), gradients[0])
    for part, theirs in zip(parts, gradients[1:], strict=True):
        assert close(torch.cat(part), theirs)


def test_targets_that_are_no_tokens_are_refused_where_the_vocabulary_is_cut():
    """Nobody would have their logits, and nobody would notice."""
    h, weight, _, targets = subject(bias=False)
    targets[0] = VOCAB
    vocabulary = Vocabulary(((0, VOCAB),), Alone())
    with pytest.raises(OutsizeError, match=f"target {VOCAB} is no token of a vocabulary of 31"):
        chunked_loss(h, weight, None, Targets(targets), Head(1.0, 5, None, vocabulary=vocabulary))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0; expected 0 or more, below 1"),
        ({"label_smoothing": -0.1}, "label_smoothing is -0.1"),
        ({"z_loss": -1.0}, "z_loss is -1.0; expected 0 or more"),
        ({"z_loss": float("nan")}, "z_loss is nan"),
    ],
)
def test_options_out_of_range_are_refused(wrong, message):
    with pytest.raises(OutsizeError, match=message):
        LossOptions(**wrong)


def test_no_target_at_all_gives_zeros():
    h, weight, vector, targets = subject()
    sink = Sums(weight, vector, dtype=torch.float64)
    loss = chunked_loss(
        h, weight, vector, Targets(torch.full_like(targets, -100)), Head(1.0, 5, sink)
    )
    loss.backward()
    assert loss.item() == 0.0 and not h.grad.any()
    assert not any(buffer.any() for buffer in sink.of.values())


def test_logits_of_any_size_do_not_overflow():
    h, weight, _, targets = subject(bias=False)
    with torch.no_grad():
        weight.mul_(1e4)
    expected = plain(h, weight, None, targets)
    (gh,) = torch.autograd.grad(expected, h)
    sink = Sums(weight, dtype=torch.float64)
    chunked_loss(h, weight, None, Targets(targets), Head(FACTOR, 5, sink)).backward()
    assert torch.isfinite(h.grad).all() and close(h.grad, gh)


def test_the_weight_may_be_tied_to_the_embedding():
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.float64, requires_grad=True)
    ids, targets = torch.randint(0, VOCAB, (2, TOKENS))
    (expected,) = torch.autograd.grad(
        plain(F.embedding(ids, weight).tanh(), weight, None, targets), weight
    )
    sink = Sums(weight, dtype=torch.float64)
    h = F.embedding(ids, weight).tanh()
    chunked_loss(h, weight, None, Targets(targets), Head(FACTOR, 8, sink)).backward()
    assert close(sink.of[id(weight)] + weight.grad, expected)


def test_frozen_weights_get_no_gradient_and_hidden_states_do():
    h, weight, vector, targets = subject()
    (gh,) = torch.autograd.grad(plain(h, weight, vector, targets), h)
    sink = Sums(dtype=torch.float64)  # would raise KeyError for whatever came
    chunked_loss(
        h, weight.detach(), vector.detach(), Targets(targets), Head(FACTOR, 5, sink)
    ).backward()
    assert close(h.grad, gh)


def test_hidden_states_without_gradient_still_train_the_head():
    h, weight, _, targets = subject(bias=False)
    (gw,) = torch.autograd.grad(plain(h, weight, None, targets), weight)
    sink = Sums(weight, dtype=torch.float64)
    chunked_loss(h.detach(), weight, None, Targets(targets), Head(FACTOR, 5, sink)).backward()
    assert close(sink.of[id(weight)], gw)


def test_without_gradients_the_sink_is_left_alone():
    h, weight, vector, targets = subject()
    expected = plain(h, weight, vector, targets, 0.5, 3.0).detach()
    with torch.no_grad():
        head = Head(FACTOR, 5, Sums(dtype=torch.float64), 0.5, 3.0)
        assert close(chunked_loss(h, weight, vector, Targets(targets), head), expected)


def test_bfloat16_with_float32_gradients_is_near_the_float32_result():
    h, weight, vector, targets = subject(torch.float32)
    half = [x.detach().bfloat16().requires_grad_() for x in (h, weight, vector)]
    exact = [x.detach().float().requires_grad_() for x in half]  # the same rounded inputs
    expected = plain(*exact, targets)
    gradients = torch.autograd.grad(expected, exact)

    sink = Sums(half[1], half[2], dtype=torch.float32)
    loss = chunked_loss(*half, Targets(targets), Head(FACTOR, 5, sink))
    loss.backward()
    assert loss.dtype == torch.float32
    # Logits are rounded to 8 bits once (relative 2^-8 of values up to ~8) and gradients once more.
    assert close(loss.detach(), expected.detach(), 1e-2)
    got = [half[0].grad, sink.of[id(half[1])], sink.of[id(half[2])]]
    for ours, theirs in zip(got, gradients, strict=True):
        assert float((ours - theirs).norm()) <= 2e-2 * float(theirs.norm())


def test_full_logits_never_exist_and_no_chunk_is_kept():
    tokens, hidden, vocab = 512, 16, 1000
    h = torch.randn(tokens, hidden, requires_grad=True)
    weight = torch.randn(vocab, hidden, requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,))
    sink = Sums(weight, dtype=torch.float32)

    whole = Ledger()
    with whole:
        F.cross_entropy(F.linear(h, weight), targets).backward()
    h.grad = weight.grad = None

    ledger = Ledger()
    with ledger:
        ledger.see(h), ledger.see(weight), ledger.see(targets)
        sink.of[id(weight)] += 0  # seen now, so that it is not the loss's
        before = ledger.total
        ledger.reset_peak()
        loss = chunked_loss(h, weight, None, Targets(targets), Head(1 / tokens, 32, sink))
        after, peak = ledger.total, ledger.peak
        loss.backward()
    logits = tokens * vocab * 4
    assert whole.peak > 2 * logits  # they do exist there, with their gradient
    assert 6 * (peak - before) <= whole.peak and peak - before < logits / 4
    assert after - before == tokens * hidden * 4 + 4, "the hidden gradient and the loss alone stay"
