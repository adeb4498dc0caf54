"""The head of an adopted module in chunks of tokens: its logits never exist all at once.

Behind the last block a linear layer gives `Logits`, which have their shape and are computed when
somebody asks for them. What treats every token by itself (a cast, a cap, a view, leaving out the
last token) is noted; their cross-entropy, log-probabilities of chosen tokens and sums over all are
then computed a chunk at a time, and so are the gradients. Anything else has all of them computed.

T tokens, C of a chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from outsize.errors import OutsizeError
from outsize.runtime.adopted.asked import Cast, Each, Entropy, Finish, Work, in_chunks
from outsize.runtime.casts import Casts
from outsize.torch_private import (
    DisableTorchFunction,
    disable_current_modes,
    make_wrapper_subclass,
    tree_map,
)

# By name of the operator: casts, and what is done with numbers or to each element.
_CASTS = {"float", "double", "half", "bfloat16", "to"}
_EACH = {
    "mul", "__mul__", "__rmul__", "multiply", "div", "__truediv__", "true_divide", "divide", "tanh",
    "log_softmax",
}  # fmt: skip
_LAID = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"}
_FORM = {"__get__", "size", "dim", "numel", "is_floating_point", "stride", "__len__", "get_device"}
_IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"}
_ENTROPY = signature(F.cross_entropy)


@dataclass(frozen=True)
class Linear:
    """A linear layer's call that is not made yet. x: (..., D); each: of its output, in turn."""

    x: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None
    owner: Heads
    casts: Casts = field(default_factory=Casts)
    each: tuple[Each, ...] = ()

    def asked(self, asked: Tensor, finish: Finish) -> Tensor:
        """finish(logits, asked) by token: (..., *). asked: (..., *) too."""
        lead = self.x.shape[:-1]
        x_TD, asked_T = self.x.reshape(-1, self.x.shape[-1]), asked.flatten(0, len(lead) - 1)
        self.owner.met = True
        work = Work(self.owner.chunk, self.casts, self.each, finish)
        made_T = in_chunks(x_TD, self.weight_VD, self.bias_V, asked_T, work)
        return made_T.view(*lead, *made_T.shape[1:])

    def whole(self) -> Tensor:
        """All of it."""
        with self.casts.within():
            y = F.linear(self.x, self.weight_VD, self.bias_V)
            for one in self.each:
                y = one(y)
        return y


class Logits(Tensor):
    """What a linear layer would give. PyTorch asks for a subclass."""

    linear: Linear
    made: Tensor | None

    @staticmethod
    def __new__(cls, linear: Linear) -> Logits:
        form = _form(linear)
        made: Logits = make_wrapper_subclass(
            cls, form.shape, strides=form.stride(), dtype=form.dtype, device=linear.x.device
        )
        made.linear, made.made = linear, None
        return made

    def whole(self) -> Tensor:
        """As a tensor like others, made once."""
        if self.made is None:
            self.made = self.linear.whole()
        return self.made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*tree_map(_whole, tuple(args)), **tree_map(_whole, dict(kwargs or {})))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in _FORM:
            with DisableTorchFunction():
                return func(*args, **kwargs)
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, Logits) and first.made is None:
            rest = args[1:], {k: v for k, v in kwargs.items() if k != "input"}
            found = _kept(func, name, first.linear, *rest)
            if found is not None:
                return found
        if name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
            raise OutsizeError(
                f"loss_chunk is {_owner(args).chunk} and code behind the blocks changes logits in"
                f" place ({name}), which are not there; have it make new ones, or set it to 0"
            )
        args, kwargs = tree_map(_whole, tuple(args)), tree_map(_whole, dict(kwargs))
        return func(*args, **kwargs)


def _owner(args: Any) -> Heads:
    return next(a.linear.owner for a in args if isinstance(a, Logits))


def _whole(leaf: Any) -> Any:
    return leaf.whole() if isinstance(leaf, Logits) else leaf


def _form(linear: Linear) -> Tensor:
    """Shape and type of the output, without memory."""
    kind = linear.x.device.type
    cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if cast else linear.x.dtype
    shape = (*linear.x.shape[:-1], linear.weight_VD.shape[0])
    with disable_current_modes():
        form = torch.empty(shape, dtype=dtype, device="meta")
        for one in linear.each:
            form = one(form)
    return form


def _kept(
    func: Callable[..., Any], name: str, linear: Linear, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """What an operator gives of logits that need not be there for it; None where they must."""
    if linear.x.ndim < 2 or any(isinstance(leaf, Logits) for leaf in (*args, *kwargs.values())):
        return None
    if name == "contiguous" or (name == "detach" and not torch.is_grad_enabled()):
        return Logits(linear)
    if name in _CASTS:
        return _cast(func, linear, args, kwargs)
    if name in _EACH and _plain(name, linear, args, kwargs):
        return _further(linear, partial(_with, func, args, kwargs))
    if name in _LAID or name == "__getitem__":
        return _laid(func, name, linear, args, kwargs)
    if func is F.cross_entropy:
        return _entropy(linear, args, kwargs)
    if name == "gather":
        return _gathered(linear, *args, **kwargs)
    if name == "logsumexp":
        return _summed(linear, args, kwargs)
    return None


def _further(linear: Linear, each: Each) -> Logits:
    return Logits(replace(linear, each=(*linear.each, each)))


def _cast(
    func: Callable[..., Any], linear: Linear, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Logits | None:
    """In another floating type, where they are."""
    form = _form(linear)
    probe = torch.empty(0, dtype=form.dtype, device=linear.x.device)
    found = func(probe, *args, **kwargs)
    if found.device != probe.device or not found.is_floating_point():
        return None
    return _further(linear, Cast(found.dtype))


def _with(func: Callable[..., Tensor], args: Any, kwargs: Any, x: Tensor) -> Tensor:
    return func(x, *args, **kwargs)


def _plain(name: str, linear: Linear, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator treats each token by itself, whichever they are."""
    if name == "log_softmax":
        return _last(linear, *args, **kwargs)
    return not kwargs and all(isinstance(arg, int | float) for arg in args)


def _last(linear: Linear, dim: int | None = None, *args: Any, **kwargs: Any) -> bool:
    """Whether a dim is that of the vocabulary."""
    return dim in (-1, linear.x.ndim - 1)


def _laid(
    func: Callable[..., Any],
    name: str,
    linear: Linear,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Logits | None:
    """The tokens laid otherwise, or some of them."""
    vocabulary = linear.weight_VD.shape[0]
    if name == "__getitem__":
        if _touches_last(args[0], linear.x.ndim):
            return None
        return Logits(replace(linear, x=linear.x[args[0]]))
    if any(isinstance(arg, torch.dtype) for arg in (*args, *kwargs.values())):
        return None
    with disable_current_modes():
        form = torch.empty(*linear.x.shape[:-1], vocabulary, device="meta")
        form = func(form, *args, **kwargs)
    lead = form.shape[:-1]
    if form.shape[-1] != vocabulary or prod(lead) != prod(linear.x.shape[:-1]):
        return None
    return Logits(replace(linear, x=linear.x.reshape(*lead, linear.x.shape[-1])))


def _touches_last(index: Any, dims: int) -> bool:
    """Whether an index takes some entries of the last dim."""
    index = index if isinstance(index, tuple) else (index,)
    at = next((n for n, one in enumerate(index) if one is ...), None)
    behind = index if at is None else index[at + 1 :]
    taken = sum(_dims(one) for one in behind)
    reaches = taken > 0 if at is not None else taken >= dims
    last = index[-1]
    return reaches and not (isinstance(last, slice) and last == slice(None))


def _dims(index: Any) -> int:
    """That one entry of an index takes."""
    if index is None:
        return 0
    return index.ndim if isinstance(index, Tensor) and index.dtype == torch.bool else 1


# -- what is asked of them ----------------------------------------------------------------------


def _entropy(linear: Linear, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The cross-entropy of a class for each token."""
    said = _ENTROPY.bind(None, *args, **kwargs)
    said.apply_defaults()
    given = said.arguments
    target, weight, ignored = given["target"], given["weight"], given["ignore_index"]
    old = given["size_average"] is not None or given["reduce"] is not None
    if linear.x.ndim != 2 or target.ndim != 1 or target.is_floating_point() or old:
        return None
    finish: Finish = Entropy(ignored, given["label_smoothing"])
    if weight is not None:
        finish = partial(
            F.cross_entropy, weight=weight, ignore_index=ignored, reduction="none",
            label_smoothing=given["label_smoothing"],
        )  # fmt: skip
    losses_T = linear.asked(target, finish)
    if given["reduction"] == "none":
        return losses_T
    if given["reduction"] == "sum":
        return losses_T.sum()
    counted_T = target != ignored
    weights_T: Tensor = counted_T
    if weight is not None:
        weights_T = weight[target.where(counted_T, 0)].where(counted_T, 0.0)
    mean: Tensor = losses_T.sum() / weights_T.sum()
    return mean


def _gathered(linear: Linear, dim: int, index: Tensor, **kwargs: Any) -> Tensor | None:
    """Those of chosen entries of the vocabulary."""
    if kwargs or not _last(linear, dim) or index.shape[:-1] != linear.x.shape[:-1]:
        return None
    return linear.asked(index, _taken)


def _summed(linear: Linear, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The logarithm of the sum over the vocabulary."""
    if len(args) != 1 or kwargs or not _last(linear, args[0]):
        return None
    none = torch.empty((*linear.x.shape[:-1], 0), device=linear.x.device)
    return linear.asked(none, _total)


def _taken(logits_CV: Tensor, index_CN: Tensor) -> Tensor:
    return logits_CV.gather(-1, index_CN)


def _total(logits_CV: Tensor, none_C: Tensor) -> Tensor:
    return logits_CV.logsumexp(-1)


class Heads(TorchFunctionMode):
    """While entered, linear layers of more than `chunk` tokens give Logits where it is `behind` the
    last block. met: somebody has asked of them what is made a chunk at a time, or there are no
    more."""

    def __init__(self, chunk: int, behind: Callable[[], bool]) -> None:
        super().__init__()
        self.chunk, self.behind, self.met = chunk, behind, False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not F.linear or not self.behind():
            return func(*args, **(kwargs or {}))
        return self.linear(*args, **(kwargs or {}))

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """As PyTorch's."""
        x = _whole(input)
        if x.ndim < 2 or prod(x.shape[:-1]) <= self.chunk:
            self.met = True  # there are no more tokens than that
            return F.linear(x, weight, bias)
        return Logits(Linear(x, weight, bias, self))

    def check(self) -> None:
        """OutsizeError where no logits were asked for a chunk at a time."""
        if not self.met:
            raise OutsizeError(
                f"loss_chunk is {self.chunk}, but behind the last block no cross-entropy of a"
                " linear layer's output was found that has more tokens: nothing would be done;"
                " leave it out"
            )
