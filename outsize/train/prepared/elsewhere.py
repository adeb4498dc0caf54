"""What has no value of its own between two steps, since it rests on a tier or on other workers:
parameters, and the states of an optimizer of torch.optim. Whoever reads or writes one is told so;
it would be what lies in the pool just then, and an average of it is nobody's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from torch import nn

from outsize.errors import OutsizeError
from outsize.torch_private import DisableTorchFunction, tree_leaves

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


def hide(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse from now on what would read or write their elements."""
    for name, parameter in parameters.items():
        vars(parameter).update(its_name=name, its_class=type(parameter))
        parameter.__class__ = Elsewhere


def show(parameters: Iterable[nn.Parameter]) -> None:
    """They are ordinary parameters again."""
    for parameter in parameters:
        if isinstance(parameter, Elsewhere):
            parameter.__class__ = vars(parameter).pop("its_class")
            del vars(parameter)["its_name"]


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
