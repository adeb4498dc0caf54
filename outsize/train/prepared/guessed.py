"""What a module is called with, where nobody says it: ids, numbers or images of the sizes that its
own modules have, and the loss that its output carries."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize.errors import OutsizeError
from outsize.runtime.adopted.flow import arguments
from outsize.torch_private import tree_leaves, tree_map
from outsize.train.prepared.batches import empty_like, own_loss
from outsize.train.prepared.making import twin_of
from outsize.train.prepared.module import unpacked

ROWS = 2  # of the batch that is kept; others have its form


@dataclass(frozen=True)
class Given:
    """What a module is called with. batch: of ROWS rows; loss: of (output, batch); tokens: of a
    row, 1 where it has none; dtype: of the numbers in a batch; note: what was assumed."""

    batch: Any
    loss: Callable[[Any, Any], Tensor]
    tokens: int
    dtype: torch.dtype = torch.float32
    note: str = ""

    def of(self, rows: int) -> Any:
        """A batch of so many rows, without values; made in a fake mode."""

        def typed(item: Any) -> Any:
            own = isinstance(item, Tensor) and item.is_floating_point()
            return item.to(self.dtype) if own else item

        return tree_map(typed, empty_like(self.batch, rows))


def guessed(model: nn.Module, sequence: int) -> Given:
    """The first form of a batch that the module runs with, on tensors without values. OutsizeError
    where it runs with none, with what it says of the first."""
    first = ""
    for given in _forms(model, sequence):
        reason = fails(model, given)
        if not reason:
            return given
        first = first or reason
    name = type(model).__name__
    why = f"cannot be rehearsed with what it seems to take ({first})"
    raise OutsizeError(
        f"{name} {why if first else 'takes what is not known'}; expected a factory that gives an"
        " outsize.verify.Adopted(model, batch, loss, count)"
    )


def fails(model: nn.Module, given: Given) -> str:
    """Why a module does not run with a batch, in a line; "" where it does."""
    from outsize.simulate.fake import FakeMode

    own = replace(given, dtype=next(model.parameters()).dtype)
    try:
        with FakeMode(), torch.no_grad(), unpacked(given.batch):
            twin, _ = twin_of(model, (), torch.device("cpu"))
            batch = own.of(1)
            args, kwargs = arguments(batch, twin)
            given.loss(twin(*args, **kwargs), batch)
    except Exception as error:  # whatever somebody's code raises
        return line_of(error)
    return ""


def line_of(error: BaseException) -> str:
    """The first line of what was raised."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


# -- forms -----------------------------------------------------------------------------------------


def _forms(model: nn.Module, sequence: int) -> Iterator[Given]:
    """By what its forward says that it takes, or by the first module that has parameters."""
    main = getattr(model, "main_input_name", None)
    if isinstance(main, str):
        yield from _transformers(model, main, sequence)
        return
    for leaf in model.modules():
        if any(True for _ in leaf.parameters(recurse=False)):
            yield from _plain(model, leaf, sequence)
            return


def _transformers(model: nn.Module, main: str, sequence: int) -> Iterator[Given]:
    config, takes = getattr(model, "config", None), inspect.signature(model.forward).parameters
    one = torch.zeros(ROWS, dtype=torch.int64)
    ids = torch.zeros(ROWS, sequence, dtype=torch.int64)
    if main == "input_ids":
        labels, tokens, inputs = [ids, one], sequence, ids
    elif main == "pixel_values":
        side, colours = getattr(config, "image_size", 224), getattr(config, "num_channels", 3)
        high, wide = side if isinstance(side, (list, tuple)) else (side, side)
        labels, tokens, inputs = [one], 1, torch.zeros(ROWS, colours, high, wide)
    else:
        return
    if "labels" in takes:
        for each in labels:
            yield Given({main: inputs, "labels": each}, own_loss, tokens)
    yield Given({main: inputs}, _assumed, tokens, note=_note(model))


def _plain(model: nn.Module, leaf: nn.Module, sequence: int) -> Iterator[Given]:
    note = _note(model)
    if isinstance(leaf, nn.Embedding):
        ids = torch.zeros(ROWS, sequence, dtype=torch.int64)
        yield Given(ids, _assumed, sequence, note=note)
        return
    numbers: list[tuple[tuple[int, ...], int]] = []
    if isinstance(leaf, nn.Conv2d):
        side = getattr(model, "image_size", getattr(model, "img_size", None))
        high, wide = side if isinstance(side, (list, tuple)) else (side or 224, side or 224)
        numbers = [((leaf.in_channels, int(high), int(wide)), 1)]
    elif isinstance(leaf, nn.Conv1d):
        numbers = [((leaf.in_channels, sequence), sequence)]
    else:
        last = _features(leaf)
        numbers = [((sequence, last), sequence), ((last,), 1)] if last else []
    for shape, tokens in numbers:
        yield Given(torch.zeros(ROWS, *shape), _assumed, tokens, note=note)


def _features(leaf: nn.Module) -> int:
    """What a linear layer, a norm or an attention takes of each token."""
    for name in ("in_features", "embed_dim", "normalized_shape"):
        value = getattr(leaf, name, None)
        if isinstance(value, tuple) and value:
            value = value[-1]
        if isinstance(value, int):
            return value
    return 0


def _note(model: nn.Module) -> str:
    return (
        f"{type(model).__name__} gives no loss: the cross-entropy of tokens is taken, or the sum of"
        " squares of what is none"
    )


def _assumed(output: Any, batch: Any) -> Tensor:
    """The loss that an output carries, or one of its own size."""
    try:
        return own_loss(output, batch)
    except OutsizeError:
        pass
    made = [each for each in _tensors(output) if each.is_floating_point()]
    ids = [each for each in _tensors(batch) if not each.is_floating_point() and each.ndim == 2]
    if made and ids and made[0].shape[:2] == ids[0].shape and made[0].ndim == 3:
        return F.cross_entropy(made[0].flatten(0, 1).float(), ids[0].flatten())
    if not made:
        raise OutsizeError("its output has no numbers")
    return made[0].float().square().sum()


def _tensors(values: Any) -> list[Tensor]:
    if not isinstance(values, (Tensor, tuple, list, dict)):
        values = getattr(values, "last_hidden_state", None)
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
