"""Where weight gradients go: into the chunks' flat buffers, at once or when their action comes.

Linear and embedding weights of native models arrive through a sink, as computations; everything
else arrives through autograd's accumulation into `.grad`, which is a view of the same buffer where
the dtypes agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from outsize.memory import Chunk

Compute = Callable[[Tensor], None]


class Gradients:
    """The sink of one job. A parameter is `touched` once it has received a gradient this step."""

    def __init__(self, chunks: Iterable[Chunk], owners: dict[str, nn.Parameter]) -> None:
        self._places: dict[int, tuple[str, Tensor]] = {}  # by weight: its name, its gradient
        self._weights: list[nn.Parameter] = []
        self._deferred: list[tuple[Tensor, Compute]] | None = None
        self._hooks = []
        self.touched: set[str] = set()
        for chunk in chunks:
            if chunk.gradients is None:
                continue
            for slot in chunk.table.slots:
                weight, view = owners[slot.name], slot.of(chunk.gradients)
                self._places[id(weight)] = slot.name, view
                self._weights.append(weight)
                if view.dtype == weight.dtype:
                    weight.grad = view
                hook = partial(self._arrived, slot.name, view)
                self._hooks.append(weight.register_post_accumulate_grad_hook(hook))

    def _arrived(self, name: str, view: Tensor, weight: Tensor) -> None:
        """Autograd has added to weight.grad."""
        self.touched.add(name)
        if weight.grad is not None and weight.grad is not view:
            view.add_(weight.grad)
            weight.grad = None if view.dtype != weight.dtype else view

    def __call__(self, weight: Tensor, compute: Compute) -> None:
        if self._deferred is None:
            self.now(weight, compute)
        else:
            self._deferred.append((weight, compute))

    def now(self, weight: Tensor, compute: Compute) -> None:
        """Add a gradient at once."""
        name, view = self._places[id(weight)]
        self.touched.add(name)
        if not torch.is_grad_enabled():  # as in any backward pass
            compute(view)
            return
        with torch.no_grad():  # deferred work
            compute(view)

    def defer(self) -> None:
        """From here on, keep weight gradients as computations."""
        assert self._deferred is None
        self._deferred = []

    def take(self) -> list[tuple[Tensor, Compute]]:
        """End deferring; gives what was kept."""
        taken, self._deferred = self._deferred, None
        assert taken is not None
        return taken

    def left(self) -> frozenset[str]:
        """Parameters to whose gradients somebody else's backward pass has added between two steps;
        they are forgotten."""
        names = frozenset(self.touched)
        for name, view in self._places.values():
            if name in names:
                view.zero_()
        self.touched.clear()
        return names

    def reset(self) -> None:
        """Forget the step."""
        self._deferred = None
        self.touched.clear()

    def close(self) -> None:
        """Let the parameters go: what they accumulate from now on is their own."""
        for hook in self._hooks:
            hook.remove()
        for weight in self._weights:
            weight.grad = None
