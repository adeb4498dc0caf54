"""The checker names what is wrong. Each test plants a bug of the field (silent_bugs) and sees the
module, the tensor, the axis and the missing collective in the finding."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from outsize.errors import OutsizeError
from outsize.models.cuts import Cut
from outsize.parallel.check.checker import Declaration, examined, refuse
from outsize.parallel.check.cuts import counted
from outsize.parallel.check.trace import trace
from outsize.parallel.layouts import (
    FAN_OUT,
    PARTIAL,
    REPLICATED,
    SUM,
    Exchange,
    Laid,
    Sharded,
)

META = torch.device("meta")


class Layer(nn.Module):
    """A residual layer with a norm, a router-like gate and a bias in the row weight."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.gate = nn.Linear(8, 1)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        h = self.norm(x)
        return x + self.branch(h)

    def branch(self, h):
        return self.down(F.gelu(self.up(h)))


class Gated(Layer):
    def branch(self, h):
        return self.gate(h).sigmoid() * self.down(F.gelu(self.up(h)))


UP = {"up.weight": Sharded(0), "up.bias": Sharded(0), "down.weight": Sharded(1)}
GOOD = Declaration(
    "tensor",
    2,
    UP,
    exchanges={("up", "input"): FAN_OUT, ("down", "product"): SUM},
    inputs=(Laid(),),
)


def found(declared, module=Layer, shape=(4, 8)):
    with META:
        graph = trace(module(), (torch.empty(shape),))
    return tuple(examined(graph, declared).findings)


def only(findings):
    assert len(findings) == 1, [str(f) for f in findings]
    return findings[0]


def without(declared, *sites, **changes):
    kept = {s: e for s, e in declared.exchanges.items() if s not in sites}
    return replace(declared, exchanges=kept, **changes)


def test_a_layer_with_all_its_collectives_passes():
    assert found(GOOD) == ()
    refuse(())


def test_a_partial_value_in_an_addition_is_named():
    finding = only(found(without(GOOD, ("down", "product"))))
    assert (finding.module, finding.axis) == ("down", "tensor")
    assert "added to a partial tensor: the sum has it 2 times" in finding.what
    assert finding.missing.startswith("all_reduce")
    with pytest.raises(OutsizeError, match=r"layouts: down, .* axis tensor: .*missing: all_reduce"):
        refuse([finding])


def test_a_bias_added_on_every_worker_is_named():
    late = without(GOOD, ("down", "product"))
    late = replace(late, exchanges={**late.exchanges, ("down", "output"): SUM})
    finding = found(late)[0]
    assert finding.module == "down" and "the sum has it 2 times" in finding.what


def test_a_partial_value_in_a_nonlinearity_is_named():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8, bias=False)

        def forward(self, x):
            return F.gelu(self.a(x))

    declared = Declaration(
        "tensor", 2, {"a.weight": Sharded(1)}, inputs=(Laid(Sharded(1), Sharded(1)),)
    )
    finding = only(found(declared, Deep))
    assert "enters gelu, which is not linear" in finding.what and finding.missing == "all_reduce"
    summed = replace(declared, exchanges={("a", "output"): SUM})
    assert found(summed, Deep) == ()


def test_a_product_of_two_partial_tensors_is_named():
    class Product(nn.Module):
        def forward(self, x):
            y = x.sum(-1)
            return y * y

    finding = found(Declaration("tensor", 2, inputs=(Laid(Sharded(1), Sharded(1)),)), Product)[0]
    assert finding.what == "two partial tensors are multiplied"


def test_a_missing_reduction_of_the_inputs_gradient_is_named():
    finding = found(without(GOOD, ("up", "input")))
    assert any("norm" in f.module and "enters the optimizer" in f.what for f in finding)
    mixed = next(f for f in finding if "from elsewhere" in f.what)
    assert mixed.module == "norm" and mixed.missing.startswith("all_reduce of the gradient")


def test_a_router_inside_the_branch_must_be_reduced():
    """torchtitan 2387, 4054: the gate multiplies summands, so its gradient is a summand."""

    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(8), Gated()
            self.mlp.norm = nn.Identity()
            self.mlp.down = nn.Linear(16, 8, bias=False)
            self.mlp.forward = self.mlp.branch

        def forward(self, x):
            return self.mlp(self.norm(x))

    declared = Declaration(
        "tensor",
        2,
        {f"mlp.{name}": layout for name, layout in UP.items()},
        exchanges={("norm", "output"): FAN_OUT, ("mlp", "output"): SUM},
    )
    findings = found(declared, Branch)
    assert {(f.module, f.tensor) for f in findings} == {
        ("mlp.gate", "weight"),
        ("mlp.gate", "bias"),
    }
    assert all(f.missing == "all_reduce of the gradient" for f in findings)
    names = frozenset({"mlp.gate.weight", "mlp.gate.bias"})
    assert found(replace(declared, reduced=names), Branch) == ()


def test_a_whole_gradient_that_is_summed_is_named():
    """Expert gradients multiplied by the degree (pytorch 160285, Megatron-LM 5956)."""
    finding = only(found(replace(GOOD, reduced=frozenset({"norm.weight"}))))
    assert (finding.module, finding.tensor) == ("norm", "weight")
    assert "2 times too large" in finding.what
    twice = {**GOOD.exchanges, ("", "input"): FAN_OUT}
    finding = only(found(replace(GOOD, exchanges=twice)))
    assert "would be summed all the same, 2 times too large" in finding.what


def test_a_backward_that_is_not_summed_is_named():
    """Gathered for a computation that each worker does in part; scattered back without a sum."""
    gather = Exchange(Laid(Sharded(0), Sharded(0)), Laid())
    scatter = Exchange(Laid(PARTIAL, REPLICATED), Laid(Sharded(0), Sharded(0)))
    exchanges = {("up", "input"): gather, ("down", "product"): scatter}
    rows = (Laid(Sharded(0), Sharded(0)),)
    names = frozenset({"norm.weight", "norm.bias", "down.bias"})
    declared = Declaration("tensor", 2, UP, names, exchanges, rows, rows)
    finding = only(found(declared))
    assert (finding.module, finding.missing) == ("up", "all_reduce")
    assert "comes back partial" in finding.what
    exchanges["up", "input"] = Exchange(Laid(Sharded(0), Sharded(0)), Laid(REPLICATED, PARTIAL))
    assert found(replace(declared, exchanges=exchanges)) == ()


class Head(nn.Module):
    """Logits, and what a loss makes of them."""

    def __init__(self, after):
        super().__init__()
        self.head, self.after = nn.Linear(8, 16, bias=False), after

    def forward(self, x):
        return self.after(self.head(x))


def head(after, outputs=(), exchanges=None):
    exchanges = {("head", "input"): FAN_OUT} if exchanges is None else exchanges
    declared = Declaration(
        "tensor", 2, {"head.weight": Sharded(0)}, exchanges=exchanges, outputs=outputs
    )
    return found(declared, lambda: Head(after))


LOGITS = Laid(Sharded(1), Sharded(1))
GATHER = Exchange(LOGITS, Laid())


def test_gathered_logits_through_a_parallel_loss_are_named():
    """Megatron-LM 7452: the loss is too large by the logarithm of the degree."""
    same = nn.Identity()
    assert head(same, (LOGITS,)) == ()
    gathered = {("head", "input"): FAN_OUT, ("head", "output"): GATHER}
    finding = head(same, (LOGITS,), gathered)[0]
    assert finding.module == "the loss" and "count each class 2 times" in finding.what
    finding = head(same, (Laid(),))[0]
    assert finding.missing == "all_gather" and "gets what is sharded(1)" in finding.what


@pytest.mark.parametrize(
    ("statistic", "missing"),
    [
        (lambda x: x.mean(-1), "one division by the whole count"),  # label smoothing, 737 and 7464
        (lambda x: x.logsumexp(-1), "all_reduce(max)"),
        (lambda x: x.amax(-1), "all_reduce(max)"),
        (lambda x: torch.linalg.vector_norm(x, dim=-1), "all_reduce of the squares"),
        (lambda x: F.layer_norm(x, (16,)), "all_reduce of the moments"),
        (lambda x: x.softmax(-1), "all_gather"),
        (
            lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.int64, device=META)),
            "all_gather",
        ),
        (lambda x: x.argmax(-1), "all_gather"),
        (lambda x: x.sum(-1).square(), "all_reduce"),
    ],
)
def test_a_local_statistic_used_as_global_is_named(statistic, missing):
    finding = head(statistic)[0]
    assert missing in finding.missing, str(finding)
    assert "sharded" in finding.what or "partial" in finding.what


def test_a_mean_of_means_over_rows_is_named_and_a_sum_is_not():
    """transformers 34191: the mean over each worker's rows is not the mean over all."""

    def loss(reduction):
        return lambda x: F.cross_entropy(
            x, torch.zeros_like(x[:, 0], dtype=torch.int64), reduction=reduction
        )

    rows = Laid(Sharded(0), Sharded(0))

    def over(reduction, **changes):
        declared = Declaration("data", 2, inputs=(rows,), **changes)
        return found(declared, lambda: Head(loss(reduction)))

    finding = over("mean")[0]
    assert (finding.axis, "one division by the whole count" in finding.missing) == ("data", True)
    laid = (Laid(PARTIAL, REPLICATED),)
    finding = only(over("sum", outputs=laid))
    assert (finding.module, finding.missing) == ("head", "all_reduce of the gradient")
    assert over("sum", outputs=laid, reduced=frozenset({"head.weight"})) == ()


def test_a_declaration_of_what_is_not_there_is_named():
    declared = replace(GOOD, exchanges={**GOOD.exchanges, ("dwon", "product"): SUM})
    assert "nothing passes there" in only(found(declared)).what
    declared = replace(GOOD, parameters={**UP, "up.weigth": Sharded(0)})
    assert "does not use such a parameter" in only(found(declared)).what


def test_each_element_is_counted_once_in_the_norm():
    """Norm eight times too large under hybrid sharding (torchtitan 2318; Megatron-LM 7452)."""
    good = {
        "norm.weight": Cut((8,), shared=4),
        "up.weight": Cut((16, 8), 0, ((4, 8),)),
        "kv.weight": Cut((8, 8), 0, ((4, 8),), shared=2, partial=True),
        "odd": Cut((10,), 0, ((2, 5),)),
    }
    assert list(counted(good, "tensor", 4)) == []
    whole = {"norm.weight": Cut((8,), shared=1)}
    assert "counts it 4 times" in only(list(counted(whole, "tensor", 4))).what
    for cut in (
        Cut((16, 8), 0, ((4, 8),), shared=2),
        Cut((16, 8), 0, ((0, 8),)),
        Cut((16, 8), 0, ((0, 5),)),
    ):
        finding = only(list(counted({"up.weight": cut}, "tensor", 4)))
        assert "no part of" in finding.what


def test_memory_that_is_written_in_parts_keeps_its_layout():
    class Writes(nn.Module):
        def forward(self, x):
            y = torch.empty_like(x)
            y[:, :4], y[:, 4:] = x[:, 4:], -x[:, :4]
            return y

    rows = Laid(Sharded(0), Sharded(0))
    assert found(Declaration("tensor", 2, inputs=(rows,), outputs=(rows,)), Writes) == ()
    columns = Laid(Sharded(1), Sharded(1))
    assert found(Declaration("tensor", 2, inputs=(columns,), outputs=(columns,)), Writes)


def test_an_operator_without_a_rule_takes_replicated_tensors_alone():
    class Odd(nn.Module):
        def forward(self, x):
            return x.flip(0)

    assert found(Declaration("tensor", 2), Odd) == ()
    rows = Laid(Sharded(0), Sharded(0))
    finding = found(Declaration("tensor", 2, inputs=(rows,)), Odd)[0]
    assert "no rule says what comes of it" in finding.what and finding.missing == "all_gather"
