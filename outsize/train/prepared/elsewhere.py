"""What has no value of its own between two steps, since it rests on a tier or on other workers:
parameters, and the states of an optimizer of torch.optim. Whoever reads or writes one is told so;
it would be what lies in the pool just then, and an average of it is nobody's. And parameters that
are here, beside a master copy: what is written by their `data` is counted by nobody.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from outsize.errors import OutsizeError
from outsize.torch_private import DisableTorchFunction, disabled_torch_function, tree_leaves

# What may be asked of such a parameter, beside whether it is of some kind: all but its elements.
_READ = {
    "shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize", "requires_grad", "grad",
    "grad_fn", "_version", "_backward_hooks",
}  # fmt: skip
_SET = {"requires_grad", "grad", "_backward_hooks"}
_CALLED = {
    "size", "dim", "numel", "nelement", "stride", "storage_offset", "data_ptr", "element_size",
    "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "__len__", "__hash__",
}  # fmt: skip

PIECE = 1 << 20  # elements that are looked at together
_SUMS = "its_sums"
_DATA: Any = Tensor.data
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Elsewhere(nn.Parameter):
    """A parameter while nothing of it is here."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        asked = {"__get__": _READ, "__set__": _SET}.get(func.__name__)
        name = func.__name__ if asked is None else func.__self__.__name__
        if not name.startswith("is_") and name not in (_CALLED if asked is None else asked):
            mine = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, Elsewhere))
            raise OutsizeError(
                f"parameter {vars(mine)['its_name']!r} has no values here between two steps: they"
                " rest on a tier or on other workers; read job.weights() or job.state_dict(),"
                " compute with job.evaluate(batch), and hand what you change to job.load_state_dict"
            )
        with DisableTorchFunction():
            return func(*args, **(kwargs or {}))


class Asked(nn.Parameter):
    """A parameter whose `data` may be written: PyTorch counts no such changes. From when it is
    asked for, what it holds is known by sums of its bits."""

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @property
    def data(self) -> Any:
        values = _DATA.__get__(self)
        if _SUMS not in vars(self):
            vars(self)[_SUMS] = _sums(values)
        return values

    @data.setter
    def data(self, value: Tensor) -> None:
        _DATA.__set__(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = nn.Parameter.__deepcopy__(self, memo)
        made.__class__ = vars(self)["its_class"]
        return made


def told(parameter: nn.Parameter) -> bool:
    """Whether it has been written by its `data` since `tell`."""
    before = vars(parameter).get(_SUMS)
    return before is not None and before != _sums(parameter.detach())


def tell(parameter: nn.Parameter) -> None:
    """What it holds now is known."""
    if _SUMS in vars(parameter):
        vars(parameter)[_SUMS] = _sums(parameter.detach())


def _sums(values: Tensor) -> tuple[int, int]:
    """Of the bits of all elements, and the same weighted by where they stand."""
    bits = values.reshape(-1).view(_BITS[values.itemsize])
    each = weighted = torch.zeros((), dtype=torch.int64, device=values.device)
    for begin in range(0, len(bits), PIECE):
        part = bits[begin : begin + PIECE].long()
        places = torch.arange(begin, begin + len(part), device=values.device)
        each, weighted = each + part.sum(), weighted + (part * (2 * places + 1)).sum()
    return int(each), int(weighted)


def hide(parameters: Mapping[str, nn.Parameter], kind: type[nn.Parameter] = Elsewhere) -> None:
    """Refuse from now on what would read or write their elements; or note that `data` is asked."""
    for name, parameter in parameters.items():
        vars(parameter).update(its_name=name, its_class=type(parameter))
        parameter.__class__ = kind


def show(parameters: Iterable[nn.Parameter]) -> None:
    """They are ordinary parameters again."""
    for parameter in parameters:
        if isinstance(parameter, Elsewhere | Asked):
            parameter.__class__ = vars(parameter).pop("its_class")
            del vars(parameter)["its_name"]


def forget(parameters: Iterable[nn.Parameter]) -> None:
    """What they hold is nobody's concern."""
    for parameter in parameters:
        vars(parameter).pop(_SUMS, None)


class Unshown(defaultdict[Any, Any]):
    """The `state` of an optimizer of torch.optim while none of it is there."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise OutsizeError(
            "optimizer.state has no values between two steps: they rest on a tier or on several"
            " workers; read job.state_dict() or optimizer.state_dict(), and hand what you change to"
            " job.load_state_dict"
        )

    _Refusal = Callable[..., Any]
    __getitem__: _Refusal = _refuse
    __setitem__: _Refusal = _refuse
    __delitem__: _Refusal = _refuse
    __iter__: _Refusal = _refuse
    __len__: _Refusal = _refuse
    __contains__: _Refusal = _refuse
    __reduce__: _Refusal = _refuse
    get: _Refusal = _refuse
    items: _Refusal = _refuse
    keys: _Refusal = _refuse
    values: _Refusal = _refuse
    pop: _Refusal = _refuse
    popitem: _Refusal = _refuse
    clear: _Refusal = _refuse
    update: _Refusal = _refuse
    setdefault: _Refusal = _refuse
