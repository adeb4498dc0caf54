"""The `Linear` seam: a weight that the model multiplies by, and how it uses it.

`use` is what a tensor-parallel layout is derived from: "column" weights make independent outputs
(may be cut along their output), "row" weights consume what column weights made (may be cut along
their input, giving partial sums), "plain" ones stay whole.

The model says `y = linear(x)` and reads no weight. How the weight is multiplied is its `product`:
the plain one, one of many ways, with chunks of tokens on their way to other workers. Products nest:
what makes one takes the one that was there. What other modules make of the product, as an adapter
does, is `beside` it. A bias that is added behind a sum is left to who takes that
(`adds_bias`). Gradients of the weight go to `sink`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor, nn

from outsize.errors import OutsizeError
from outsize.kernels import rows as alone
from outsize.kernels.linear import GradSink, embedding, linear
from outsize.models.coding import CODES, SCALES, Coded, Format, Grid, divided
from outsize.models.declared import STREAM, Declared, Initial, Lies, Unit

if TYPE_CHECKING:
    from outsize.kernels.codes import Laid
    from outsize.kernels.eights import Agree
    from outsize.kernels.rows import Rounding
    from outsize.models.adapter import Beside

Use = Literal["column", "row", "plain"]
MODEL = Initial(std="model")


class Product(Protocol):
    """How the weight of a Linear is multiplied."""

    def __call__(self, one: Linear, x: Tensor, bias: Tensor | None, /) -> Tensor:
        """x (..., d_in) -> (..., d_out), bias (d_out) added where there is one."""


def dense(one: Linear, x: Tensor, bias: Tensor | None) -> Tensor:
    """The weight as it is, whatever x has before its last dim."""
    return linear(x, one.weight, bias, one.sink)


def by_codes(one: Linear, x: Tensor, bias: Tensor | None) -> Tensor:
    """A weight that is decoded for the product, and again for the gradient of x."""
    from outsize.kernels.coded import linear as multiply

    if one.coded is not None and one.coded.eights:
        return _of_eights(one, x, bias)
    if alone.wanted_by_codes(x):
        laid = one.laid()
        if laid is not None and laid.ready:
            return alone.by_codes(x, laid, one.sizes[0], bias)
    y = multiply(x, one.sizes, one.decoded)
    return y if bias is None else y + bias


def _of_eights(one: Linear, x: Tensor, bias: Tensor | None) -> Tensor:
    """What is multiplied is rounded to 8 bits."""
    from outsize.kernels.eights import linear as multiply

    laid = one.laid()
    assert laid is not None and one.coded is not None, "its codes are whole numbers"
    return multiply(x, laid, one.sizes[0], bias, one.coded.eights, one.agree)


def _lying(laid: Laid | None, codes_OR: Tensor) -> Tensor:
    """Codes that are packed, as files have them."""
    from outsize.kernels.codes import lying

    assert laid is not None, "of whole numbers"
    return lying(laid).blocks_NB.view(codes_OR.shape)


class Linear(nn.Module):
    """x (..., d_in) -> (..., d_out); weight (d_out, d_in).

    unit: between what a column or row weight may be cut. whole: how one lies that never is. beside:
    what has the product's place; by linearity a worker's part of one is beside its part of the
    other. agree: on what rows are rounded by, with those who have the rest of each. adds_bias:
    else others do.
    """

    bias: nn.Parameter | None
    beside: Beside | None
    use: Use
    unit: Unit | None
    whole: Lies
    sink: GradSink | None
    product: Product
    coded: Coded | None
    agree: Agree | None
    adds_bias: bool

    def __init__(
        self,
        d_in: int,
        d_out: int,
        bias: bool = False,
        use: Use = "plain",
        unit: Unit | None = None,
        whole: Lies = STREAM,
    ) -> None:
        super().__init__()
        assert (use == "plain") == (unit is None), "what is cut is cut between units"
        vars(self).update(  # at once: nn.Module asks of each whether it is a parameter, 3 us
            bias=None, beside=None, use=use, unit=unit, whole=whole, sink=None, product=dense,
            coded=None, agree=None, adds_bias=True,
        )  # fmt: skip
        self.weight = nn.Parameter(torch.empty(d_out, d_in))
        if bias:
            self.bias = nn.Parameter(torch.empty(d_out))

    @property
    def bytes(self) -> int:
        """Of what it multiplies by, here; what is beside it not counted."""
        return sum(parameter.nbytes for parameter in self.parameters(recurse=False))

    @property
    def weight_here(self) -> nn.Parameter | None:
        """None where it is coded."""
        return self._parameters.get("weight")

    @property
    def sizes(self) -> tuple[int, int]:
        """Outputs and inputs that are here."""
        if self.coded is None:
            d_out, d_in = self.weight.shape
        else:
            (d_out, row), form = self.get_parameter(CODES).shape, self.coded.format
            d_in = row // form.block * form.group
        return d_out, d_in

    def code(self, form: Format, name: str, eights: Rounding = "") -> None:
        """Hold frozen codes in the place of the weight. eights: as of Coding. OutsizeError as of
        divided."""
        d_out, d_in = self.sizes
        divided(form, name, d_in)
        groups, device = d_in // form.group, self.weight.device
        self.coded = Coded(form, Grid(groups), eights)
        del self.weight
        for leaf, shape in (
            (CODES, (d_out, groups * form.block)),
            (SCALES, (form.shared(d_out, groups),)),
        ):
            if shape[-1]:
                made = torch.empty(shape, dtype=torch.uint8, device=device)
                self.register_parameter(leaf, nn.Parameter(made, requires_grad=False))
        self.product = by_codes

    def uncode(self, dtype: torch.dtype) -> None:
        """Hold the weight that codes stand for."""
        weight = self.decoded(0, self.sizes[0], dtype)
        for leaf in (CODES, SCALES):
            self._parameters.pop(leaf, None)
        self.weight, self.coded, self.product = nn.Parameter(weight), None, dense

    def decoded(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Rows of the weight that is coded."""
        assert self.coded is not None, "asked of one that is"
        shared, form = self._parameters.get(SCALES), self.coded.format
        codes = self.get_parameter(CODES).detach()
        if self.coded.packed:
            codes = _lying(self.laid(), codes)
        return form.decode(codes[first:last], shared, self.coded.grid.below(first), dtype)

    def laid(self) -> Laid | None:
        """What codes stand for, as blocks; None where they are no values times scales."""
        assert self.coded is not None, "asked of one that is"
        shared, own = self._parameters.get(SCALES), self._parameters[CODES]
        assert own is not None, "it has codes"
        codes = own.detach()
        laid = self.coded.format.laid(codes, shared, self.coded.grid)
        if laid is None or not self.coded.packed:
            return laid
        return laid._replace(packed=len(laid.blocks_NB) // len(codes))

    def matrix(self) -> Tensor:
        """The weight (d_out, d_in); of codes what they stand for, float32."""
        if self.coded is None:
            return self.weight
        return self.decoded(0, self.sizes[0], torch.float32)

    def declare(self, leaf: str) -> Declared:
        start = Initial(std="residual" if self.use == "row" else "model")
        if leaf == "bias":
            start = Initial(value=0.0)
        return Declared(start, self.lies(leaf))

    def lies(self, leaf: str) -> Lies:
        """How weight or bias is cut; that of a row weight is added behind the sum."""
        if leaf == SCALES:
            return Lies()
        if self.use == "column":
            return Lies(0, self.unit)
        if self.use == "row" and leaf == CODES:
            assert self.coded is not None, "it has codes"
            return Lies(1, self.unit, groups=(self.coded.format.group, self.coded.format.block))
        if self.use == "row":
            return Lies(1, self.unit) if leaf == "weight" else STREAM
        return self.whole

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.adds_bias else None
        if self.beside is None:
            return self.product(self, x, bias)
        y = self.beside(self, x)
        return y if bias is None else y + self.beside.shift(bias)

    def plain(self, x: Tensor) -> Tensor:
        """The product by the weight alone: nothing beside it, no bias."""
        return self.product(self, x, None)

    def wide(self, x: Tensor) -> Tensor:
        """The product in float32 at least, without bias, whatever weight and x are held in."""
        self._alone("is multiplied in float32")
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        sink = redirect(self.sink, self.weight, lambda grad: grad)
        return linear(x.to(dtype), self.weight.to(dtype), None, sink)

    def fused(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias, for a kernel that makes more of the product at once (a loss). Raises
        OutsizeError where they are not the whole of it."""
        self._alone("is multiplied inside the loss")
        return self.weight, self.bias

    def _alone(self, what: str) -> None:
        if self.beside is not None or self.product is not dense:
            raise OutsizeError(
                f"model: a weight of shape {tuple(self.weight.shape)} {what}, and cannot have an"
                " adapter; leave it out of the adapter's targets"
            )


def linears(model: nn.Module) -> Iterator[tuple[str, Linear]]:
    """The Linears of a decoder's blocks by name, those of adapters and routers left out."""
    for name, module in list(model.named_modules()):
        own = isinstance(module, Linear) and name.startswith("blocks.")
        own = own and ".beside." not in name and "_around." not in name
        if own and not name.endswith(".router.score"):
            assert isinstance(module, Linear)
            yield name, module


def held(model: nn.Module) -> Iterator[tuple[str, Linear]]:
    """Those that may be coded: with the head, where it is."""
    yield from linears(model)
    head = model.get_submodule("epilogue.head")
    if isinstance(head, Linear) and head.coded is not None:
        yield "epilogue.head", head


def redirect(
    sink: GradSink | None, owner: Tensor, part: Callable[[Tensor], Tensor]
) -> GradSink | None:
    """A sink for a tensor derived from `owner`, whose gradient is `part` of the owner's."""
    if sink is None:
        return None
    taker = sink
    return lambda _, compute: taker(owner, lambda grad: compute(part(grad)))


class Embedding(nn.Module):
    """ids (...) int64 -> (..., d); weight (n, d). unit: what its rows are, where they may be cut.
    start: their first values. lookup: how rows are found; on_host: by ids that are in the host's
    memory."""

    def __init__(self, n: int, d: int, unit: Unit | None = None, start: Initial = MODEL) -> None:
        super().__init__()
        self.start = start
        self.lies = STREAM if unit is None else Lies(0, unit)
        self.weight = nn.Parameter(torch.empty(n, d))
        self.sink: GradSink | None = None
        self.lookup: Callable[[Embedding, Tensor], Tensor] = rows
        self.on_host = False

    def declare(self, _: str) -> Declared:
        return Declared(self.start, self.lies)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lookup(self, ids)


def rows(table: Embedding, ids: Tensor) -> Tensor:
    """All rows are here."""
    return embedding(ids, table.weight, table.sink)
