"""S/B/P: every conversion against plain tensors; modules by hand against the plain module."""

import copy
import itertools

import pytest
import torch
from foreign import model_of
from threads import play
from torch import nn
from torch.nn import functional as F

from outsize.collectives import Mesh, along
from outsize.errors import OutsizeError
from outsize.parallel.convert import convert, cost
from outsize.parallel.convert_run import Placed
from outsize.parallel.layouts import PARTIAL, REPLICATED, Sharded, dual, joined, part_of

LAYOUTS = (REPLICATED, PARTIAL, Sharded(0), Sharded(1), Sharded(2))
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def split_up(x, layout, n, rank):
    if layout == PARTIAL:
        noise = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1))
        return x + noise * (n - 1) if rank == 0 else x.clone().mul_(0).sub_(noise)
    return part_of(x, layout, n, rank).contiguous()


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(("source", "target"), list(itertools.product(LAYOUTS, LAYOUTS)))
def test_a_conversion_and_its_gradient(source, target, n):
    torch.manual_seed(0)
    whole, g = (torch.randn(6, 12, 6, dtype=torch.float64) for _ in range(2))

    def work(world):
        axis = along(world, "tensor")
        x = split_up(whole, source, n, axis.rank).requires_grad_()
        y = convert(x, source, target, whole.shape, axis)
        grad = split_up(g, dual(target), n, axis.rank)
        (gx,) = torch.autograd.grad(y, x, grad)
        return y.detach(), gx, sum(axis.received.values())

    ys, gs, received = zip(*play(Mesh(tensor=n), work), strict=True)
    torch.testing.assert_close(joined(ys, target), whole, **CLOSE)
    torch.testing.assert_close(joined(gs, dual(source)), g, **CLOSE)
    wanted = cost(source, target, whole.numel(), 8, n, True, False)
    assert sum(received) / n == pytest.approx(wanted, abs=n)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.gate, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


X = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
HANDS = {
    "column, row": {
        "up": Sharded(0),
        "gate": Sharded(0),
        "down": Sharded(1),
        "up.bias": Sharded(0),
    },
    "rows alone": {"down": Sharded(1)},
    "the wrong way": {"up": Sharded(1), "gate": Sharded(0), "down": Sharded(0)},
    "norm": {"norm.weight": Sharded(0), "norm.bias": Sharded(0)},
    "nothing": {},
}  # fmt: skip
SHORT = X[:1, :2]  # so short that to move weights is dearer than to move activations


def run_both(plain, layouts, args, inputs=(), n=2):
    """Outputs and every gradient of a module spread by hand, against the plain one's."""
    whole_args = [x.clone().requires_grad_() if x.is_floating_point() else x for x in args]
    plain.zero_grad()
    expected = plain(*whole_args)
    expected = getattr(expected, "logits", expected)
    g = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    expected.backward(g)

    def work(world):
        axis = along(world, "tensor")
        model = copy.deepcopy(plain)
        model.zero_grad()
        placed = Placed(model, axis, layouts, inputs)
        laid = [*inputs, *[REPLICATED] * (len(args) - len(inputs))]
        mine = [part_of(x, lay, n, axis.rank) for x, lay in zip(args, laid, strict=True)]
        mine = [x.clone().requires_grad_() if x.is_floating_point() else x for x in mine]
        axis.received.clear()
        y = placed(*mine)
        y.backward(g)
        chosen = placed.program(tuple(mine), {}).chosen
        sent = sum(axis.received.values())
        grads = {name: p.grad for name, p in model.named_parameters()}
        return y.detach(), grads, [getattr(x, "grad", None) for x in mine], placed, chosen, sent

    results = play(Mesh(tensor=n), work)
    for rank, (y, grads, gx, placed, _, _) in enumerate(results):
        torch.testing.assert_close(y, expected.detach(), **CLOSE)
        for name, p in plain.named_parameters():
            wanted = part_of(p.grad, placed.layouts.get(name, REPLICATED), n, rank)
            torch.testing.assert_close(grads[name], wanted, **CLOSE, msg=name)
        for mine, whole, lay in zip(gx, whole_args, [*inputs, *[REPLICATED] * 9], strict=False):
            if mine is not None:
                torch.testing.assert_close(mine, part_of(whole.grad, lay, n, rank), **CLOSE)
    return results


@pytest.mark.parametrize("inputs", [(), (Sharded(0),), (Sharded(1),)])
@pytest.mark.parametrize("name", HANDS)
def test_a_module_by_hand_is_the_plain_module(name, inputs):
    torch.manual_seed(0)
    results = run_both(MLP().double(), HANDS[name], (X,), inputs)
    if not inputs:
        received = sum(r[5] for r in results) / len(results)
        assert received == pytest.approx(results[0][4].received, abs=4), "bytes by the formula"


def test_megatrons_collectives_are_found():
    """One sum forward, one sum back: nothing cheaper is exact, and nothing dearer is chosen."""
    results = run_both(MLP().double(), {**HANDS["column, row"], "gate.bias": Sharded(0)}, (SHORT,))
    chosen = results[0][4]
    assert chosen.received == 2 * SHORT.numel() * 8  # 2 (n - 1) / n of the bytes, each way
    assert len([m for m in chosen.moves if m.target.fanned or m.source.layout == PARTIAL]) == 2


@pytest.mark.parametrize("n", [2, 4])
def test_attention_by_hand(n):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.o = nn.Linear(8, 8)

        def forward(self, x):
            q, k, v = (p(x).unflatten(-1, (-1, 2)).transpose(1, 2) for p in self.qkv)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.o(y.transpose(1, 2).flatten(-2))

    torch.manual_seed(0)
    layouts = {f"qkv.{i}.{w}": Sharded(0) for i in range(3) for w in ("weight", "bias")}
    results = run_both(Attention().double(), {**layouts, "o": Sharded(1)}, (SHORT,), n=n)
    assert results[0][4].received == pytest.approx(4 * (n - 1) / n * SHORT.numel() * 8)


def test_moving_weights_is_chosen_where_it_is_cheaper():
    chosen = run_both(MLP().double(), HANDS["column, row"], (X,))[0][4]
    assert chosen.received < 2 * X.numel() * 8


def test_a_block_of_transformers_by_hand():
    """Phi's: attention and feed-forward side by side on one norm's output."""
    model = model_of("phi").model.layers[0].train(False)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = model

        def forward(self, x, cos, sin):
            return self.block(x, position_embeddings=(cos, sin))

    layouts = {"block.self_attn.dense": Sharded(1), "block.mlp.fc2": Sharded(1)}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.fc1"):
        layouts |= {f"block.{name}.{leaf}": Sharded(0) for leaf in ("weight", "bias")}
    x, cos, sin = (torch.randn(1, 3, d, dtype=torch.float64) for d in (32, 4, 4))
    found = run_both(Block(), layouts, (x, cos, sin))[0][4]
    moves = [m for m in found.moves if m.target.fanned or m.source.layout == PARTIAL]
    # The branches' sums are added first: one sum forward, and back one for each tensor fanned out.
    assert len([m for m in moves if m.source.layout == PARTIAL]) == 1
    assert found.received < 4 * x.numel() * 8


def test_what_cannot_be_is_named():
    axis = play(Mesh(tensor=1), lambda world: along(world, "tensor"))[0]
    with pytest.raises(OutsizeError, match="did you mean 'down"):
        Placed(MLP(), axis, {"dwon.weight": Sharded(0)})
    with pytest.raises(OutsizeError, match="expected a dim below 2"):
        Placed(MLP(), axis, {"down": Sharded(2)})
