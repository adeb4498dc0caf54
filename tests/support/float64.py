"""A reference that asks for float32 inside (norms, softmax, ropes of transformers) made exact."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Float64(TorchFunctionMode):
    """Every request for float32 is one for float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        if func is Tensor.float:
            return args[0].double()
        named = {key: wide(value) for key, value in (kwargs or {}).items()}
        return func(*(wide(x) for x in args), **named)
