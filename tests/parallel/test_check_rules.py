"""The rules of the checker against arithmetic: whatever layouts it lets pass, parts computed apart
and joined are the whole, and so are their gradients."""

import itertools

import pytest
import torch
from joined import joined
from torch import nn
from torch.nn import functional as F

from outsize.parallel.check.checker import Declaration, examined
from outsize.parallel.check.infer import Blank, whole
from outsize.parallel.check.trace import trace
from outsize.parallel.layouts import PARTIAL, REPLICATED, Laid, Sharded, dual, part_of

N = 2


def heads(x):
    return x.unflatten(-1, (-1, 2)).transpose(1, 2)


def grouped(x):  # as repeat_kv of transformers: each head for two groups of queries
    x = x.unflatten(-1, (-1, 2)).transpose(1, 2)[:, :, None].expand(-1, -1, 2, -1, -1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


# name: (function, shapes, how many layouts at least pass, beside everything being replicated)
ZOO = {
    "gelu": (F.gelu, [(4, 6)], 2),
    "neg": (torch.neg, [(4, 6)], 3),
    "double": (lambda x: x * 2, [(4, 6)], 3),
    "add": (torch.add, [(4, 6), (4, 6)], 3),
    "add bias": (torch.add, [(4, 6), (6,)], 3),
    "mul": (torch.mul, [(4, 6), (4, 6)], 4),
    "div": (torch.div, [(4, 6), (4, 1)], 3),
    "addcmul": (torch.addcmul, [(4, 6), (4, 6), (4, 6)], 2),
    "linear": (F.linear, [(4, 6), (8, 6)], 5),
    "linear, batch": (F.linear, [(2, 4, 6), (8, 6), (8,)], 4),
    "matmul": (torch.matmul, [(2, 4, 6), (2, 6, 4)], 6),
    "mm": (torch.mm, [(4, 6), (6, 8)], 5),
    "softmax": (lambda x: x.softmax(-1), [(4, 6)], 1),
    "log_softmax": (lambda x: F.log_softmax(x, 0), [(4, 6)], 1),
    "sum": (lambda x: x.sum(1), [(4, 6)], 3),
    "sum, kept": (lambda x: x.sum(0, keepdim=True), [(4, 6)], 3),
    "mean": (lambda x: x.mean(-1), [(4, 6)], 2),
    "amax": (lambda x: x.amax(-1), [(4, 6)], 1),
    "vector_norm": (lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True), [(4, 6)], 1),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, w.shape, w, b), [(4, 6), (6,), (6,)], 1),
    "heads": (heads, [(2, 3, 8)], 3),
    "grouped": (grouped, [(2, 3, 4)], 3),
    "odd heads": (lambda x: x.unflatten(-1, (-1, 2)), [(4, 6)], 2),  # three over two workers
    "flatten": (lambda x: x.flatten(0, 1), [(4, 2, 6)], 3),
    "unflatten": (lambda x: x.unflatten(0, (-1, 2)), [(8, 3)], 2),
    "transpose": (lambda x: x.transpose(0, 2), [(2, 4, 6)], 4),
    "permute": (lambda x: x.permute(2, 0, 1), [(2, 4, 6)], 4),
    "unsqueeze": (lambda x: x[:, None], [(4, 6)], 3),
    "split": (lambda x: x.split(2, dim=0)[1] * 3, [(4, 6)], 2),
    "slice": (lambda x: x[:, :4], [(4, 6)], 2),
    "unbind": (lambda x: x.unbind(0)[1], [(4, 6)], 2),
    "cat": (lambda a, b: torch.cat((a, b), 1), [(4, 6), (4, 2)], 3),
    "cat, same dim": (lambda a, b: torch.cat((a, b)), [(4, 6), (2, 6)], 3),
    "stack": (lambda a, b: torch.stack((a, b), 1), [(4, 6), (4, 6)], 3),
    "index": (lambda x: x[torch.tensor([1, 1, 0], device=x.device)], [(4, 6)], 2),
    "scatter": (lambda x, y: _scattered(x, y), [(4, 6), (4, 2)], 1),
    "gather": (lambda x: x.unflatten(1, (-1, 3)).gather(2, _least(x)), [(4, 6)], 2),
    "attention": (F.scaled_dot_product_attention, [(2, 4, 3, 5)] * 3, 2),
    "written": (lambda x: _written(x), [(4, 6)], 1),
    "cross_entropy": (lambda x: F.cross_entropy(x, _rows(x), reduction="sum"), [(4, 6)], 0),
    "expanded": (lambda x, y: x[:, None].expand(-1, y.shape[1], -1) + y, [(4, 6), (4, 2, 6)], 2),
}  # fmt: skip


def _least(x):
    return x.detach().unflatten(1, (-1, 3)).argmin(2, keepdim=True)


def _scattered(x, y):
    zeros = y.new_zeros((*y.shape, 3))
    return x + zeros.scatter_(2, _least(x), y.unsqueeze(2)).flatten(1)


def _rows(x):
    return torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)


def _written(x):
    y = torch.empty_like(x)
    y[:, :3] = -x[:, :3]
    y[:, 3:] = x[:, 3:]
    return y


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


def layouts_of(shape):
    return [REPLICATED, PARTIAL, *(Sharded(d) for d in range(len(shape)))]


def parts(x, layout, rank):
    """What a worker has: of a sum, a summand."""
    if layout == PARTIAL:
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(5), dtype=x.dtype)
        return x - noise if rank == 0 else noise
    return part_of(x, layout, N, rank).contiguous()


def gradient_layout(checked, index):
    layout = checked.gradients[index]
    assert layout is not None
    return layout


@pytest.mark.parametrize("name", ZOO)
def test_what_passes_is_right(name):
    function, shapes, least = ZOO[name]
    torch.manual_seed(0)
    whole_tensors = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    plain = function(*whole_tensors)
    g = torch.randn_like(plain)
    expected = torch.autograd.grad(plain, whole_tensors, g)
    metas = tuple(torch.empty(s, dtype=torch.float64, device="meta") for s in shapes)
    graph = trace(Call(function), metas)
    passed = 0
    for chosen in itertools.product(*(layouts_of(s) for s in shapes)):
        laid = tuple(Laid(x, dual(x)) for x in chosen)
        checked = examined(graph, Declaration("tensor", N, inputs=laid))
        out = checked.values[graph.outputs[0]]
        if out is None or isinstance(out, Blank):
            continue
        out = REPLICATED if whole(out) else out
        declared = Declaration("tensor", N, inputs=laid, outputs=(Laid(out, dual(out)),))
        checked = examined(graph, declared)
        if checked.findings:
            continue
        passed += any(x != REPLICATED for x in chosen)
        outs, grads = [], []
        for rank in range(N):
            local = [
                parts(x.detach(), lay, rank) for x, lay in zip(whole_tensors, chosen, strict=True)
            ]
            local = [x.requires_grad_() for x in local]
            outs.append(function(*local))
            here = part_of(g, dual(out), N, rank)
            grads.append(torch.autograd.grad(outs[-1], local, here))
        torch.testing.assert_close(joined(outs, out), plain, rtol=1e-10, atol=1e-10)
        for i, index in enumerate(graph.inputs):
            layout = gradient_layout(checked, index)
            found = joined([grad[i] for grad in grads], layout)
            torch.testing.assert_close(found, expected[i], rtol=1e-10, atol=1e-10, msg=str(chosen))
    assert passed >= least, f"{passed} layouts pass"
