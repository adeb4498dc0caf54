"""A few weights of each matrix trained where they are: of every M of a row the smallest one.

Liao et al., "Parameter-Efficient Fine-Tuning without Introducing New Latency", 2023: PaFi, whose
mask is that of the smallest magnitudes, whatever the task; here within groups of a row, so that it
follows from what a worker has of a weight. What is trained is the change of those weights, which
begins as zero; merged, the model costs what it did. As rounded to bfloat16 equal ones count as
equal, and the first of them is taken: a model in bfloat16 has the mask of one in float32.

    adapt: {sparse: {of: 64}}                       # in a run's file

The change is made for a product and again for its gradients, of the weight's size; nothing of that
is kept between. On a tensor axis it is cut as the weight is, between groups. peft has no such
adapter: files are of a peft_type of our own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize.errors import OutsizeError
from outsize.models.adapter import FORMATS, OWN, Adapted, Naming, Weighed, along_output
from outsize.models.declared import Declared, Initial, Lies
from outsize.models.targets import ALL, TARGETS, OnLinears, number, refuse_others, stored
from outsize.registry import setting, technique

KEY, FORMAT = "adapt.sparse", f"{OWN}SPARSE"


@dataclass(frozen=True)
class Sparse(OnLinears):
    """Which Linears of the blocks have it, and of how many weights one is trained."""

    key: ClassVar[str] = KEY
    of: int = setting(64, "of so many weights of a row the smallest is trained", least=2)
    targets: tuple[str, ...] = setting((ALL,), TARGETS)

    def beside(self, name: str, one: Weighed) -> Few:
        """What a linear layer of this name has beside it. OutsizeError where groups do not fit."""
        if (d_in := one.sizes[1]) % self.of:
            raise OutsizeError(
                f"{KEY}.of: {self.of} does not divide the {d_in} features that {name} takes;"
                " expected a number that does"
            )
        return Few(one, self.of)

    def to_json(self, adapted: Adapted) -> dict[str, Any]:
        return stored(FORMAT, adapted, {"of": self.of})


class Few(nn.Module):
    """(W + S) x, beside a Linear of weight W. change (d_out, d_in / of): what is not 0 of S."""

    enters = False

    def __init__(self, one: Weighed, of: int) -> None:
        super().__init__()
        d_out, d_in = one.sizes
        self.of = of
        self.change = nn.Parameter(torch.empty(d_out, d_in // of))
        self.lies = along_output(one, 0)
        if one.use == "row":
            self.lies = Lies(1, one.unit, groups=(of, 1))

    def declare(self, _: str) -> Declared:
        return Declared(Initial(), self.lies, "sparse_change")

    def forward(self, one: Weighed, x: Tensor) -> Tensor:
        plain = one.plain(x)
        update: Tensor = _Update.apply(x, one, self.of, self.change)  # type: ignore[no-untyped-call]
        return plain + update

    def merged(self, weight: Tensor) -> Tensor:
        return weight + spread(self.change.to(weight.dtype), chosen(weight, self.of), self.of)

    def shift(self, bias: Tensor) -> Tensor:
        return bias


def chosen(weight: Tensor, of: int) -> Tensor:
    """(d_out, d_in / of) int64: in each group of a row, the number of the smallest weight."""
    at_OG: Tensor = weight.detach().bfloat16().abs().unflatten(1, (-1, of)).argmin(2)
    return at_OG


def spread(change_OG: Tensor, at_OG: Tensor, of: int) -> Tensor:
    """S (d_out, d_in)."""
    made = change_OG.new_zeros((*change_OG.shape, of))
    return made.scatter_(2, at_OG.unsqueeze(2), change_OG.unsqueeze(2)).flatten(1)


class _Update(torch.autograd.Function):
    # The Linear is held and not its weight, which may lie elsewhere between the passes.
    @staticmethod
    def forward(ctx: Any, x: Tensor, one: Weighed, of: int, change: Tensor) -> Tensor:
        ctx.save_for_backward(x, change)
        ctx.one, ctx.of = one, of
        return F.linear(x, spread(change, chosen(one.matrix(), of), of))

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        x, change = ctx.saved_tensors
        at_OG = chosen(ctx.one.matrix(), ctx.of)
        gx = gy @ spread(change, at_OG, ctx.of) if ctx.needs_input_grad[0] else None
        gy_TO, x_TI = gy.reshape(-1, gy.shape[-1]), x.reshape(-1, x.shape[-1])
        whole = (gy_TO.t() @ x_TI).unflatten(1, (-1, ctx.of))
        return gx, None, None, whole.gather(2, at_OG.unsqueeze(2)).squeeze(2)


def read(found: Mapping[str, Any], naming: Naming) -> Sparse:
    """The adapter that an adapter_config.json says. OutsizeError for what is not read here."""
    refuse_others(found, {})
    return Sparse(number(found, "of"), naming(found))


FORMATS.add(FORMAT, read)
technique(KEY, Sparse, "trains the smallest of every few weights of a row")
