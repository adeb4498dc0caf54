"""Operations as counted against formulas and against PyTorch's own counter."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from outsize.kernels import attention  # noqa: F401  (its operators)
from outsize.simulate.counter import Counter


def counted(run) -> Counter:
    counter = Counter()
    with counter:
        run()
    return counter


def mlp():
    x = torch.randn(48, 20, requires_grad=True)
    first, second = torch.nn.Linear(20, 64), torch.nn.Linear(64, 12, bias=False)
    return lambda: second(first(x).relu()).sum().backward()


def test_products_are_those_of_the_formula_and_of_torch():
    got = counted(mlp()).work.flops()
    assert got == 3 * 2 * 48 * (20 * 64 + 64 * 12)  # forward, input and weight gradient
    theirs = FlopCounterMode(display=False)
    with theirs:
        mlp()()
    assert got == theirs.get_total_flops()


def test_batched_products_count_every_batch():
    a, b = torch.randn(5, 7, 3), torch.randn(5, 3, 11)
    assert counted(lambda: a @ b).work.flops() == 2 * 5 * 7 * 3 * 11


def test_attention_counts_the_causal_half():
    q, k, v = (torch.randn(2, 3, 40, 8, requires_grad=True) for _ in range(3))

    def run() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    work = counted(run).work
    square = 2 * 3 * 40 * 40 * 8  # documents, heads, queries, keys, head size
    forward = 2 * 2 * square / 2  # two products of 2 operations each, half of them
    assert work.attention == {
        ("forward", "float32"): forward, ("backward", "float32"): 2.5 * forward,
    }  # fmt: skip


def test_attention_of_cudnn_counts_as_any_other():
    q, k, v, lse = (torch.empty(2, 3, 40, size, device="meta") for size in (8, 8, 8, 1))
    none, size = torch.empty(0, device="meta"), 2 * 3 * 40 * 40 * 8

    def run() -> None:
        torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)
        torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            q, q, k, v, q, lse, none, none, None, none, none, 40, 40, 0.0, True
        )

    assert counted(run).work.attention == {
        ("forward", "float32"): 2 * size, ("backward", "float32"): 5 * size,
    }  # fmt: skip


def test_attention_under_a_mask_counts_all_scores():
    q, k, v = (torch.randn(2, 3, 40, 8) for _ in range(3))
    mask = torch.ones(40, 40, dtype=torch.bool).tril()
    causal = counted(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)).work.flops()
    masked = counted(lambda: F.scaled_dot_product_attention(q, k, v, mask)).work.flops()
    assert masked == 2 * causal


def test_our_attention_counts_as_that_of_torch():
    """Two documents in one call; then the last 64 queries of one of 192 tokens."""
    q, k, v = (torch.randn(192, heads, 8) for heads in (4, 2, 2))
    call = torch.ops.outsize.attention.default
    work = counted(lambda: call(q, k, v, (0, 64, 192), 0.3, None)).work
    per_score = 4 * 2 * (8 + 8)
    assert work.flops() == per_score * (64**2 + 128**2) / 2
    work = counted(lambda: call(q[128:], k, v, (0, 192), 0.3, None)).work
    assert work.flops() == per_score * (64 * 128 + 64**2 / 2)
    work = counted(lambda: call(q, k, v, (0, 192), 0.3, 64)).work
    assert work.flops() == per_score * (64 * 128 + 64**2 / 2)


def test_views_are_free_and_the_rest_moves_its_bytes():
    x, y = torch.ones(10, 6), torch.ones(10, 6)
    assert counted(lambda: x.view(60)[3:].unsqueeze(0).detach().t()).work.calls == 0
    work = counted(lambda: x + y).work
    assert (work.moved, work.calls, work.flops()) == (3 * 240, 1, 0)


def test_what_is_picked_moves_what_is_picked():
    """Of a table of 900 rows: two rows of five numbers read and written, and which they are."""
    table, ids = torch.ones(900, 5), torch.tensor([3, 7])
    for pick in (
        lambda: F.embedding(ids, table),
        lambda: table[ids],
        lambda: table.index_select(0, ids),
    ):
        assert counted(pick).work.moved == 2 * 40 + 16
    logits, index = torch.ones(4, 900), torch.zeros(4, 1, dtype=torch.int64)
    assert counted(lambda: logits.gather(1, index)).work.moved == 2 * 16 + 32
    pull = torch.ones(4, 1)  # read; of the logits as many, which are written, too
    assert counted(lambda: logits.scatter_add_(1, index, pull)).work.moved == 3 * 16 + 32


def test_what_is_written_over_moves_both_ways():
    """Of an operator that gives nothing back: two tensors of 100 numbers, read and written."""
    both, third = [torch.ones(100), torch.ones(100)], torch.ones(100)
    assert counted(lambda: torch._foreach_add_(both, 1.0)).work.moved == 2 * 2 * 400
    assert counted(lambda: third.add_(1.0)).work.moved == 2 * 400


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.as_strided((6,), (2,), 1), lambda x: x.permute(1, 0), lambda x: x.unbind(0),
        lambda x: x.diagonal(), lambda x: x.split_with_sizes([4, 6]), lambda x: x.t(),
        lambda x: x.new_empty(50), torch.empty_like,
    ],
)  # fmt: skip
def test_views_and_bare_memory_move_nothing(view):
    x = torch.ones(10, 10)
    assert counted(lambda: view(x)).work.moved == 0


def test_what_only_says_a_form_is_not_read():
    x = torch.ones(10, 10)
    assert counted(lambda: x.new_zeros(5)).work.moved == 4 * 5
    assert counted(lambda: torch.zeros_like(x)).work.moved == 400


def test_fake_tensors_count_the_same():
    real = counted(mlp()).work
    with FakeTensorMode():
        fake = counted(mlp()).work
    assert fake == real


def test_convolutions_are_products():
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    layer = torch.nn.Conv2d(3, 5, 3, padding=1)

    def run() -> None:
        layer(x).sum().backward()

    with FlopCounterMode(display=False) as theirs:
        run()
    assert counted(run).work.flops() == theirs.get_total_flops()
