"""S and T passes of a head that is cut over workers, against whole logits and autograd."""

from __future__ import annotations

import pytest
import torch
from threads import play
from torch.nn import functional as F

from outsize.collectives import Mesh, along
from outsize.errors import OutsizeError
from outsize.kernels.entropy import LossOptions, Vocabulary
from outsize.kernels.loss import Head, Targets
from outsize.kernels.vocabulary import Part, agree, early_gradient, score, settle

TOKENS, HIDDEN, VOCAB = 22, 6, 31
FACTOR = 1 / 17
MICROBATCHES = 2


class Sums:
    """A sink with one buffer a weight, at least float32."""

    def __init__(self, *weights: torch.Tensor) -> None:
        wide = torch.promote_types(weights[0].dtype, torch.float32)
        self.of = {id(w): torch.zeros(w.shape, dtype=wide) for w in weights}

    def __call__(self, weight, compute) -> None:
        with torch.no_grad():
            compute(self.of[id(weight)])


def plain(h, weight, bias, targets, scale, softcap, terms):
    """Sum of losses times FACTOR from whole logits."""
    logits = F.linear(h, weight, bias) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits, valid = logits.double(), targets != -100
    losses = F.cross_entropy(
        logits, targets, ignore_index=-100, reduction="sum", label_smoothing=terms.label_smoothing
    )
    return (losses + terms.z_loss * (logits.logsumexp(-1).square() * valid).sum()) * FACTOR


def subject(bias: bool, large: float):
    hidden = torch.randn(MICROBATCHES, TOKENS, HIDDEN, dtype=torch.float64) * large
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.float64, requires_grad=True)
    vector = torch.randn(VOCAB, dtype=torch.float64, requires_grad=True) if bias else None
    targets = torch.randint(0, VOCAB, (MICROBATCHES, TOKENS))
    targets[0, [0, 3, 21]] = -100
    targets[1] = -100
    targets[1, 7] = VOCAB - 1
    return hidden.requires_grad_(), weight, vector, targets


def passes(world, spans, early, hidden, weight, vector, targets, options):
    """Both microbatches' S, then both exchanges and T, on one worker. Gives its loss, the sum over
    the workers of the gradient of the hidden states, and the gradients of its rows."""
    axis = along(world, "tensor")
    *options, chunk = options
    first, last = spans[axis.rank]
    rows = weight.detach()[first:last].clone().requires_grad_()
    own = None if vector is None else vector.detach()[first:last].clone().requires_grad_()
    sink = Sums(*(w for w in (rows, own) if w is not None))
    scale, softcap, terms = options
    head = Head(FACTOR, chunk, sink, scale, softcap, terms, Vocabulary(spans, axis))
    part = Part(rows, own, head)
    scored = [
        score(h, Targets(t), part, early) for h, t in zip(hidden.detach(), targets, strict=True)
    ]
    loss, gradients = 0.0, []
    for one in scored:
        agreed = agree(one, part)
        loss += float(agreed.loss)
        if early:
            gradients.append(axis.all_reduce(early_gradient(one, agreed)))
            assert settle(one, agreed, part) is None
        else:
            gradients.append(axis.all_reduce(settle(one, agreed, part)))
    return loss, torch.stack(gradients), [sink.of[id(w)] for w in (rows, own) if w is not None]


def close(a, b, limit=1e-10):
    return float((a - b).abs().max()) <= limit * float(b.abs().max())


TERMS = [LossOptions(), LossOptions(0.1), LossOptions(z_loss=0.02), LossOptions(0.3, 1e-3)]
SPANS = [((0, 16), (16, 31)), ((0, 3), (3, 4), (4, 31))]
SHAPES = [(1.0, None), (0.3, 2.0), (0.3, None)]
# Each pair of values of two of them is in one case at least.
CASES = [
    (SPANS[(i + j + early) % 2], bool((i // 2 + early) % 2), shape, terms,
     *((1.0, TOKENS), (1e3, 5))[(i + j // 2 + early * j) % 2], bool(early))
    for i, shape in enumerate(SHAPES) for j, terms in enumerate(TERMS) for early in (0, 1)
]  # fmt: skip


@pytest.mark.parametrize(("spans", "bias", "shape", "terms", "large", "chunk", "early"), CASES)
def test_both_variants_equal_whole_logits(spans, bias, shape, terms, large, chunk, early):
    """Uneven parts, two microbatches under way, tokens without targets; logits so large that only
    a shift by the largest of all workers' saves them, in chunks."""
    torch.manual_seed(3)
    hidden, weight, vector, targets = subject(bias, large)
    options = (*shape, terms)
    wanted = [hidden, weight] if vector is None else [hidden, weight, vector]
    expected = sum(plain(h, weight, vector, t, *options)
                   for h, t in zip(hidden, targets, strict=True))  # fmt: skip
    gradients = torch.autograd.grad(expected, wanted)
    results = play(
        Mesh(tensor=len(spans)),
        lambda world: passes(
            world, spans, early, hidden, weight, vector, targets, (*options, chunk)
        ),
    )
    for loss, gradient, _ in results:
        assert loss == pytest.approx(float(expected.detach()), rel=1e-10)
        assert close(gradient, gradients[0])
        assert not gradient[targets == -100].any(), "a token without a target has no gradient"
    for at, whole in enumerate(gradients[1:]):
        assert close(torch.cat([parts[at] for _, _, parts in results]), whole)


@pytest.mark.parametrize("early", [False, True])
def test_half_precision_sums_in_single(early):
    """bfloat16 hidden states and weights: gradients to the rounding of their products."""
    torch.manual_seed(5)
    hidden, weight, _, targets = subject(False, 1.0)
    half, rows = hidden.detach().bfloat16(), weight.detach().bfloat16()
    exact_h, exact_w = half.double().requires_grad_(), rows.double().requires_grad_()
    terms = LossOptions(0.1, 1e-3)
    expected = sum(
        plain(h, exact_w, None, t, 1.0, None, terms) for h, t in zip(exact_h, targets, strict=True)
    )
    gradients = torch.autograd.grad(expected, [exact_h, exact_w])
    results = play(
        Mesh(tensor=2),
        lambda world: passes(
            *(world, SPANS[0], early, half, rows.requires_grad_(), None, targets),
            (1.0, None, terms, 5),
        ),
    )
    assert results[0][0] == pytest.approx(
        float(expected.detach()), rel=1e-3
    )  # logits are rounded once, by their product
    assert close(results[0][1].double(), gradients[0], 2e-2)
    assert close(torch.cat([parts[0] for *_, parts in results]).double(), gradients[1], 2e-2)


def test_a_target_outside_the_vocabulary_is_refused():
    hidden, weight, _, targets = subject(False, 1.0)
    targets[0, 5] = VOCAB
    options = (1.0, None, LossOptions(), TOKENS)
    with pytest.raises(OutsizeError, match="target 31 is no token of a vocabulary of 31"):
        play(
            Mesh(tensor=2),
            lambda world: passes(world, SPANS[0], True, hidden, weight, None, targets, options),
        )
