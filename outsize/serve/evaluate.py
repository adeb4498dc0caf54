"""A model measured on held-out documents: loss, bits per byte, whole answers that are right.

Each document is read alone, in windows of so many tokens, the first behind the tokenizer's start;
none overlaps, so what is left of a long text begins without what came before. The most likely
token given the true ones before it is what greedy generation would say as long as it was right so
far: an answer whose every target is the most likely token is the answer that greedy generation
gives.

T tokens of a step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf, log

import torch
from torch import Tensor

from outsize.data.source import Document
from outsize.data.sources import ReadLog
from outsize.errors import OutsizeError
from outsize.serve.model import Model

LOGITS = 1 << 26  # elements of the logits of one step, at most, where a window has fewer
MOST = 4096  # tokens of a step


@dataclass(frozen=True)
class Window:
    """Part of a document: ids are read, targets said; weights of the targets, bytes of each."""

    document: int
    ids: Tensor
    targets: Tensor
    weights: Tensor
    bytes: Tensor


@dataclass
class Measured:
    """nats: of all targets, each times its weight; weight: of all targets; targets: that have one;
    bytes: of their text, times their weights; right: targets that were the likeliest token;
    documents; whole: those whose every target was."""

    nats: float = 0.0
    weight: float = 0.0
    targets: int = 0
    bytes: float = 0.0
    right: int = 0
    documents: int = 0
    whole: int = 0

    @property
    def loss(self) -> float:
        """Nats a target."""
        return self.nats / self.weight

    @property
    def bits_per_byte(self) -> float:
        """inf where the targets stand for no text."""
        return self.nats / log(2.0) / self.bytes if self.bytes else inf


def evaluate(
    model: Model,
    documents: Iterable[Document],
    start: int,
    sequence: int,
    plain: bool,
    read: ReadLog,
) -> Measured:
    """What `model` says of documents. start: the token before a text; sequence: tokens of a window;
    plain: documents are text, each of whose tokens is a target; read: what reading them left out.
    OutsizeError where there is no target, and for a loss that is no number."""
    found, wrong = Measured(), set[int]()
    windows = _windows(documents, start, sequence, plain)
    at_once = min(MOST, LOGITS // model.config.vocab) if model.home is None else 0
    for group in _groups(windows, max(sequence, at_once)):
        _measure(model, group, found, wrong)
        found.documents = group[-1].document + 1
    found.whole = found.documents - len(wrong)
    if not found.targets:
        raise OutsizeError(
            f"eval: no token of the data is a target; expected text, or answers; {read.summary()}"
        )
    if found.nats != found.nats:
        raise OutsizeError("eval: the loss is no number; the model's weights or logits are not")
    return found


def _windows(
    documents: Iterable[Document], start: int, sequence: int, plain: bool
) -> Iterator[Window]:
    for index, document in enumerate(documents):
        ids = torch.from_numpy(document.ids.astype("int64"))
        weights = torch.ones(len(ids)) if document.weights is None else torch.from_numpy(
            document.weights
        )  # fmt: skip
        assert document.widths is not None, "held-out documents know the bytes of their tokens"
        widths = torch.from_numpy(document.widths.astype("int64"))
        if plain:
            ids = torch.cat([torch.tensor([start]), ids])
            weights, widths = (torch.cat([x.new_zeros(1), x]) for x in (weights, widths))
        for first in range(0, len(ids) - 1, sequence):
            said = slice(first + 1, first + sequence + 1)
            read = ids[first : said.stop - 1][: len(ids) - 1 - first]
            yield Window(index, read, ids[said], weights[said], widths[said])


def _groups(windows: Iterable[Window], tokens: int) -> Iterator[list[Window]]:
    """Windows, in order, as many at once as have so many tokens."""
    group, size = list[Window](), 0
    for window in windows:
        if group and size + len(window.ids) > tokens:
            yield group
            group, size = [], 0
        group.append(window)
        size += len(window.ids)
    if group:
        yield group


def _measure(model: Model, group: list[Window], found: Measured, wrong: set[int]) -> None:
    """Book a step. wrong: the documents of which a target was not the likeliest."""
    bounds = [0]
    for window in group:
        bounds.append(bounds[-1] + len(window.ids))
    targets, weights, widths = (
        torch.cat([getattr(one, name) for one in group]) for name in ("targets", "weights", "bytes")
    )
    logits_TV = model.logits(torch.cat([one.ids for one in group]), tuple(bounds)).cpu()
    likeliest = logits_TV.argmax(-1)
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    picked = logits_TV.gather(1, targets[:, None])[:, 0].to(wide)
    nats = torch.logsumexp(logits_TV.to(wide), -1) - picked
    said = weights > 0
    found.nats += float((nats.double() * weights)[said].sum())
    found.weight += float(weights.double().sum())
    found.targets += int(said.sum())
    found.bytes += float((widths * weights.double()).sum())
    right = (likeliest == targets) | ~said
    found.right += int((right & said).sum())
    for window, first, last in zip(group, bounds, bounds[1:], strict=False):
        if not bool(right[first:last].all()):
            wrong.add(window.document)
