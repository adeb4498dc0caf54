"""Batches of somebody's own: how they are cut into microbatches, copied without values, and which
loss an output carries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from outsize.data import IGNORE, Batch
from outsize.errors import OutsizeError
from outsize.torch_private import tree_leaves, tree_map


def tokens_of(batch: Any, vocab: int) -> Batch:
    """Token ids as a Batch: every row a document; labels, and weights of them, shifted by one.
    OutsizeError for ids and targets that a vocabulary of `vocab` does not have."""
    made = batch if isinstance(batch, Batch) else _batch_of(batch)
    _refuse_unknown("token id", made.ids_BS, vocab)
    _refuse_unknown("target", made.targets_BS[made.targets_BS != IGNORE], vocab)
    return made


def _refuse_unknown(what: str, ids: Tensor, vocab: int) -> None:
    """Only where looking costs no wait for a device."""
    if ids.device.type != "cpu" or not ids.numel():
        return
    for found in map(int, torch.aminmax(ids)):
        if not 0 <= found < vocab:
            raise OutsizeError(
                f"batch: {what} {found} is not in the model's vocabulary; expected 0 to"
                f" {vocab - 1}: use the model's own tokenizer"
            )


def _batch_of(batch: Any) -> Batch:
    ids = batch["input_ids"] if isinstance(batch, Mapping) else batch
    labels = batch.get("labels", ids) if isinstance(batch, Mapping) else ids
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype != torch.int64:
        raise OutsizeError(
            f"batch is {_say(ids)}; expected token ids, an int64 tensor (rows, tokens)"
        )
    if not isinstance(labels, Tensor) or labels.shape != ids.shape:
        raise OutsizeError(
            f"batch: labels is {_say(labels)}; expected a target for each of its ids,"
            f" {tuple(ids.shape)}"
        )
    targets = torch.full_like(ids, IGNORE)
    targets[:, :-1] = labels[:, 1:]
    weights = batch.get("weights") if isinstance(batch, Mapping) else None
    if weights is not None:
        if not isinstance(weights, Tensor) or weights.shape != ids.shape:
            raise OutsizeError(
                f"batch: weights is {_say(weights)}; expected one for each of its labels,"
                f" {tuple(ids.shape)}"
            )
        weights = torch.cat((weights[:, 1:], weights[:, :1]), dim=1).float()
    return Batch(ids, targets, ((0, ids.shape[1]),) * ids.shape[0], weights_BS=weights)


def filled(batch: Batch, rows: int) -> Batch:
    """A batch with so many rows at least, of which those that are added have no target."""
    more = rows - len(batch.bounds)
    if more <= 0:
        return batch
    bounds = (*batch.bounds, *batch.bounds[:1] * more)
    made = batch.changed(lambda x: torch.cat((x, x[:1].expand(more, -1))), bounds, batch.noise)
    made.targets_BS[-more:] = IGNORE
    return made


def _say(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def seen_into(batch: Any) -> Any:
    """A batch whose tensors PyTorch's trees find: a mapping of a type of its own, as a tokenizer's
    BatchEncoding, is one leaf to them, and becomes a dictionary."""
    leaves = tree_leaves(batch)
    own = isinstance(batch, Mapping) and len(leaves) == 1 and leaves[0] is batch
    return dict(batch) if own else batch


class AsGiven:
    """The type in which batches were handed in: that in which a loss, and a count, see them."""

    def __init__(self) -> None:
        self._again: Callable[[Any], Any] | None = None

    def seen_into(self, batch: Any) -> Any:
        """As `seen_into`; the type of what becomes a dictionary is kept, where one makes it."""
        made, self._again = seen_into(batch), None
        if made is not batch:
            try:
                type(batch)(made)
                self._again = type(batch)
            except (TypeError, ValueError):
                pass  # it is made of something else
        return made

    def loss(self, own: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
        return lambda output, batch: own(output, self._as_handed(batch))

    def count(self, own: Callable[[Any], float]) -> Callable[[Any], float]:
        return lambda batch: own(self._as_handed(batch))

    def _as_handed(self, batch: Any) -> Any:
        return batch if self._again is None or type(batch) is not dict else self._again(batch)


def refuse_empty(batch: Any) -> None:
    """OutsizeError for a batch without a row, or rows without an element: it has no loss."""
    for item in tree_leaves(batch.ids_BS if isinstance(batch, Batch) else batch):
        if isinstance(item, Tensor) and item.ndim:
            if not item.numel():
                raise OutsizeError(
                    f"batch is empty: it begins with {_say(item)}; expected one row at least"
                )
            return


def refuse_unseen(batch: Any) -> None:
    """OutsizeError for tensors in a type of somebody's own, which PyTorch's trees do not open."""
    for item in () if isinstance(batch, Batch) else tree_leaves(seen_into(batch)):
        for name, value in getattr(item, "__dict__", {}).items():
            if isinstance(value, Tensor) and not isinstance(item, (Tensor, torch.nn.Module)):
                kind = type(item).__name__
                raise OutsizeError(
                    f"batch: {name} of a {kind} is a tensor that is not seen there, so that its"
                    " rows cannot be cut and its form not foreseen; pass tensors in tuples, lists"
                    " or dictionaries"
                )


def rows_of(batch: Any) -> int:
    """The first dimension of a batch's first tensor that has one."""
    for item in tree_leaves(seen_into(batch)):
        if isinstance(item, Tensor) and item.ndim:
            return max(1, item.shape[0])
    return 1


def rows_in(batch: Any) -> int:
    """Rows of a batch of either kind."""
    return batch.ids_BS.shape[0] if isinstance(batch, Batch) else rows_of(batch)


def has_rows(item: Any, rows: int) -> bool:
    """Whether something in a batch is a tensor with so many rows."""
    return isinstance(item, Tensor) and item.ndim > 0 and item.shape[0] == rows


def cut(batch: Any, start: int, stop: int, rows: int = 0) -> Any:
    """Rows [start, stop) of whatever in a batch has its rows, or so many; the rest as it is."""
    rows = rows or rows_of(batch)
    return tree_map(lambda item: item[start:stop] if has_rows(item, rows) else item, batch)


def empty_like(batch: Any, rows: int) -> Any:
    """A batch of the same form with `rows` rows and no values; made in a fake mode."""
    if isinstance(batch, Batch):
        ids = torch.zeros(rows, batch.ids_BS.shape[1], dtype=torch.int64)
        weights = None if batch.weights_BS is None else torch.ones(ids.shape)
        columns = {name: torch.zeros(ids.shape, dtype=x.dtype) for name, x in batch.columns.items()}
        bounds = batch.bounds[:rows]
        return Batch(ids, torch.zeros_like(ids), bounds, weights_BS=weights, columns=columns)
    all_rows = rows_of(batch)

    def like(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        shape = (rows, *item.shape[1:]) if has_rows(item, all_rows) else item.shape
        return torch.empty(shape, dtype=item.dtype, device=item.device)

    return tree_map(like, batch)


def own_loss(output: Any, batch: Any) -> Tensor:
    """The loss that an output carries: itself, or its `loss`."""
    if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
        output = output["loss"]
    loss = getattr(output, "loss", output)
    if isinstance(loss, Tensor) and loss.ndim == 0:
        return loss
    raise OutsizeError(
        f"model gives {_say(loss)} and no loss; pass loss=(output, batch) -> scalar, or labels"
    )
