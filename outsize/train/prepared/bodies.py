"""What of a module itself `prepare` refuses: parameters that have no values yet or share memory, a
wrapper that sums gradients, and what would see parts of a batch where a plain loop sees all rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import isclose

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from outsize.collectives import Collective, World, along
from outsize.errors import OutsizeError
from outsize.torch_private import buffers_here, changes, hooked


def check_body(model: nn.Module) -> None:
    """OutsizeError for a module whose parameters cannot be trained where they are."""
    if isinstance(model, DistributedDataParallel):
        raise OutsizeError(
            "model is a DistributedDataParallel, which sums gradients over workers itself; pass"
            " model.module, and loss and count"
        )
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise OutsizeError(
                f"parameter {name!r} has no shape yet; call the model with a batch once, then make"
                " the optimizer and call outsize.prepare"
            )
        if parameter.is_meta:
            raise OutsizeError(
                f"parameter {name!r} is on the meta device and has no values; expected a model with"
                " values: model.to_empty(device='cpu'), then its initial values"
            )
    _refuse_shared(model)


def _refuse_shared(model: nn.Module) -> None:
    """The job lays parameters out anew, each for itself: one that is a view of another, or of which
    a buffer is, would be it no more."""
    spans: dict[int, list[tuple[int, int, str, Tensor]]] = {}
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if tensor.layout is torch.strided and tensor.numel():
                span = sum(
                    (n - 1) * by for n, by in zip(tensor.shape, tensor.stride(), strict=True)
                )
                first = tensor.data_ptr()
                last = first + span * tensor.element_size()
                home = spans.setdefault(tensor.untyped_storage().data_ptr(), [])
                home.append((first, last, f"{kind} {name!r}", tensor))
    for (_, last, one, mine), (first, _, other, its) in _neighbours(spans):
        if first <= last and (mine.requires_grad or its.requires_grad):
            raise OutsizeError(
                f"{one} and {other} are two tensors of one memory, which a job would part; make"
                " both the same nn.Parameter, or give each memory of its own (clone)"
            )


def _neighbours(
    spans: dict[int, list[tuple[int, int, str, Tensor]]],
) -> Iterator[tuple[tuple[int, int, str, Tensor], tuple[int, int, str, Tensor]]]:
    for home in spans.values():
        yield from pairwise(sorted(home, key=lambda span: span[:2]))


def check_rows(model: nn.Module, what: str) -> None:
    """OutsizeError for what in a module would see a part of a batch's rows. what: says how it comes
    in parts."""
    for name, parameter in model.named_parameters():
        if hooked(parameter):
            raise OutsizeError(
                f"parameter {name!r} has a hook of its gradient, which would see that of a part of"
                f" the batch: {what}; remove it (clip= limits the norm of the whole), or leave the"
                " batch whole on one worker"
            )
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise OutsizeError(
                f"module {name!r} has max_norm, which changes its weights by what a forward"
                f" looks up, here of a part of the batch: {what}; set it to None, or leave the"
                " batch whole on one worker"
            )


def check_walls(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> None:
    """OutsizeError for hooks of gradients around blocks that lie on several workers: where a
    worker has the values behind a block alone, none come to those before it."""
    for name, module in model.named_modules():
        inside = any(path == name or path.startswith(f"{name}.") for path, _ in blocks)
        if name and inside and hooked(module):
            raise OutsizeError(
                f"module {name!r} has a backward hook, and a pipeline has gradients of its inputs"
                " and outputs on different workers; register the hook on a module inside a block,"
                " or put all workers on the data axis"
            )


class Moving:
    """Buffers, frozen parameters and counters that a module's forward changes, where the rows of a
    batch come in parts: each part would change them, by its own rows. Those of batch normalisation
    have their own rule. A counter is a number among a module's attributes that two steps change by
    the same amount, or by the same factor; one of whole numbers, a buffer too, that grows by rows
    has in parts what it has of them together."""

    def __init__(self, model: nn.Module, microbatches: int, frozen: bool) -> None:
        """frozen: whether parameters that are not trained lie still, so that they count too."""
        self._model, self._microbatches, self._frozen = model, microbatches, frozen
        self._before: dict[str, tuple[Tensor, int, Tensor | None]] = {}
        self._moved: set[str] | None = None  # in the first step: some are only made in it
        self._told: set[str] = set()
        self._counts: dict[str, float] = {}
        self._paces: dict[str, tuple[float, float]] = {}

    def begin(self) -> None:
        """A step begins."""
        self._before = {
            name: (b, changes(b), _whole(b) if self._moved is None or name in self._moved else None)
            for name, b in self._others()
        }
        self._counts = dict(self._numbers())

    def ended(self, world: World, rows: int) -> None:
        """One of so many rows has ended. OutsizeError where a plain loop has other counters now, or
        other buffers on other workers; a warning, once for each buffer, where it may have."""
        now = dict(self._others())
        began = {name: self._before.get(name, (None, 0, None)) for name in now}
        moved = {n for n, b in now.items() if not _still(b, *began[n][:2])}
        by_rows = {n for n in moved if self._counts_rows(_whole(now[n]), began[n][2], rows)}
        again = moved & (self._moved or set()) - by_rows - self._told
        if self._microbatches > 1 and (counted := self._counted(rows)):
            raise OutsizeError(self._in_parts(min(counted)))
        if self._microbatches > 1 and again:
            # A table of which each microbatch writes its own rows is what it is by a plain loop.
            self._told |= again
            warnings.warn(self._in_parts(min(again)), stacklevel=4)
        if self._moved is None and now and (workers := along(world, "data")).size > 1:
            self._refuse_unlike(now, by_rows, workers)
        self._moved = moved if self._moved is None else self._moved

    def _in_parts(self, name: str) -> str:
        return (
            f"{name!r} is changed by the forward, once a microbatch, and microbatches is"
            f" {self._microbatches}: unless each row has its own place in it, a plain loop has"
            " other numbers since the first step; use microbatches=1, or change it between steps"
        )

    def _counts_rows(
        self, now: float | Tensor | None, before: float | Tensor | None, rows: int
    ) -> bool:
        """Whether a whole number has grown by rows, and not by calls."""
        if now is None or before is None or isinstance(now, float) or rows <= self._microbatches:
            return False
        grown = int(now) - int(before)
        return grown > 0 and grown % rows == 0

    def _counted(self, rows: int) -> set[str]:
        """Counters, but of rows, that this step and the one before have moved alike."""
        before, paces = self._counts, self._paces
        now = {name: value for name, value in self._numbers() if before.get(name, value) != value}
        self._paces = {
            name: (value - before[name], value / before[name] if before[name] else 0.0)
            for name, value in now.items()
        }
        return {
            name
            for name, pace in self._paces.items()
            if any(isclose(a, b) for a, b in zip(pace, paces.get(name, ()), strict=False))
            and not self._counts_rows(now[name], before[name], rows)
        }

    def _numbers(self) -> Iterator[tuple[str, float]]:
        """Numbers among modules' attributes, where a step has several microbatches."""
        for path, module in self._model.named_modules() if self._microbatches > 1 else ():
            for name, value in vars(module).items():
                if type(value) in (int, float) and value - value == 0:
                    yield f"{path}.{name}" if path else name, value

    def _refuse_unlike(
        self, now: dict[str, Tensor], by_rows: set[str], workers: Collective
    ) -> None:
        sums = torch.stack([b.detach().double().nan_to_num().sum() for b in now.values()])
        both = workers.all_reduce(torch.cat((sums, -sums)), "max")
        largest, smallest = both[: len(sums)], -both[len(sums) :]
        for name, most, least in zip(now, largest.tolist(), smallest.tolist(), strict=True):
            if most != least or name in by_rows:
                raise OutsizeError(
                    f"buffer {name!r} is changed by the forward, by other rows on each worker of"
                    " the data axis, and a plain loop has one of all rows; use one worker, or"
                    " change it between steps"
                )

    def _others(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._buffers()
        if self._frozen:
            named = self._model.named_parameters()
            yield from ((name, p) for name, p in named if not p.requires_grad)

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        for path, module in self._model.named_modules():
            if not isinstance(module, _BatchNorm):
                for name, buffer in buffers_here(module).items():
                    if buffer is not None and not buffer.is_complex():
                        yield f"{path}.{name}" if path else name, buffer


def _whole(buffer: Tensor) -> Tensor | None:
    """The sum of whole numbers; None of others, and of a parameter's: codes count nothing."""
    other = buffer.is_floating_point() or buffer.dtype == torch.bool
    return None if other or isinstance(buffer, nn.Parameter) else buffer.detach().sum()


def _still(now: Tensor, before: Tensor | None, version: int) -> bool:
    return now is before and changes(now) == version
