"""Somebody's own module while a job has it: what the automatic rules cut of it on the tensor axis
and what they leave whole, its caches, and its own forward, which may not be called."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from outsize import accelerator
from outsize.errors import OutsizeError
from outsize.models.plugged import record_of
from outsize.parallel.automatic.derive import Derived, derive
from outsize.runtime.adopted.flow import arguments
from outsize.torch_private import buffers_here, changes
from outsize.train.prepared.elsewhere import Asked, forget, hide, show

Blocks = Sequence[tuple[str, nn.Module]]


def derived_of(model: nn.Module, blocks: Blocks, batch: Any, size: int) -> dict[str, Derived]:
    """What `size` workers can cut of a model's blocks when it is called with this batch, by path.

    OutsizeError where that is nothing, with the reason; where a weight that would be cut has
    another use; where the batch makes the model remember.
    """
    if record_of(model) is not None:
        raise OutsizeError(
            f"mesh: tensor is {size}, and the {type(model).__name__} has an adapter plugged in,"
            " whose layers are cut nowhere; put all workers on the data axis"
        )
    args, kwargs = arguments(batch, model)
    with accelerator.undrawn(model.parameters()):  # what it draws up to its first block
        found = derive(model, size, args, kwargs, [path for path, _ in blocks])
    check_derived(model, found, size, kwargs)
    return found


def check_derived(
    model: nn.Module, found: Mapping[str, Derived], size: int, kwargs: Mapping[str, Any]
) -> None:
    """OutsizeError where nothing is cut, or a weight with another use."""
    if not any(derived.groups for derived in found.values()):
        raise OutsizeError(
            f"mesh: tensor is {size}, but nothing of {type(model).__name__} can be cut:"
            f" {_reason(found)}; {_remedy(model, kwargs)}"
        )
    _refuse_ties(model, found)


def without_caches(model: nn.Module) -> Callable[[], None]:
    """Switch off the caches of keys and values that a Hugging Face decoder makes in every forward:
    nothing of training reads them, and what changes while a block runs cannot be computed again.
    Gives what switches them on again."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    on = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    for config in on:
        config.use_cache = False

    def undo() -> None:
        for config in on:
            config.use_cache = True

    return undo


def without_sparse(model: nn.Module) -> Callable[[], None]:
    """Have embeddings give gradients as wide as their weights, which is what is summed here: the
    numbers are those of sparse ones. Gives what sets them back."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    on = [module for module in model.modules() if isinstance(module, kinds) and module.sparse]
    for module in on:
        module.sparse = False

    def undo() -> None:
        for module in on:
            module.sparse = True

    return undo


class Buffers:
    """A module's buffers as a step began, to go back to. Those that the first step leaves as they
    were are not copied later, but for running statistics, whose changes PyTorch does not count."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._moved: set[tuple[int, str]] | None = None  # by the first step; None before it
        self._began: list[tuple[dict[str, Tensor | None], str, Tensor, int, Tensor | None]] = []

    def begin(self) -> None:
        """A step begins."""
        self._began = [
            (home, name, buffer, changes(buffer), buffer.detach().clone() if copied else None)
            for module in self._model.modules()
            for home in (buffers_here(module),)
            for name, buffer in home.items()
            if buffer is not None
            for copied in (isinstance(module, _NormBase) or self._moves(home, name),)
        ]

    def _moves(self, home: dict[str, Tensor | None], name: str) -> bool:
        return self._moved is None or (id(home), name) in self._moved

    def ended(self) -> None:
        """It has gone through."""
        if self._moved is None:
            self._moved = {
                (id(home), name)
                for home, name, buffer, _, copy in self._began
                if home.get(name) is not buffer or copy is None or not torch.equal(buffer, copy)
            }
        self._began = []

    def back(self) -> bool:
        """Go back. False where one has changed that was not copied."""
        for home, name, buffer, version, copy in self._began:
            if copy is not None:
                buffer.detach().copy_(copy)
            elif changes(buffer) != version:
                return False
            home[name] = buffer
        return True


@contextmanager
def unpacked(batch: Any) -> Iterator[None]:
    """While a Hugging Face decoder runs without values: it is told that its rows are one document
    each, which it looks up in the positions that it has made itself. Without them it would make a
    mask of S x S, which a step has not. Nothing is said where the batch brings positions or a
    mask."""
    masks = sys.modules.get("transformers.masking_utils")
    brings = isinstance(batch, Mapping) and {"position_ids", "attention_mask"} & set(batch)
    if masks is None or brings or "find_packed_sequence_indices" not in vars(masks):
        yield
        return
    asked = vars(masks)["find_packed_sequence_indices"]
    vars(masks)["find_packed_sequence_indices"] = lambda position_ids: None
    try:
        yield
    finally:
        vars(masks)["find_packed_sequence_indices"] = asked


def _reason(found: Mapping[str, Derived]) -> str:
    for path, derived in found.items():
        for module, reason in derived.left.items():
            return f"{path}.{module}: {' '.join(reason.split())}"
    return "no linear layer of its blocks feeds another"


def _remedy(model: nn.Module, kwargs: Mapping[str, Any]) -> str:
    asked = kwargs.get("use_cache", getattr(getattr(model, "config", None), "use_cache", False))
    if asked:
        return "its forward makes a cache: put use_cache=False into the batch"
    if model.training and any(isinstance(m, nn.Dropout) and m.p for m in model.modules()):
        return "set its dropout to 0, or put all workers on the data axis"
    return "put all workers on the data axis"


def _refuse_ties(model: nn.Module, found: Mapping[str, Derived]) -> None:
    """The rules look at one block at a time: a weight with another use would be cut there too."""
    cut = {f"{path}.{name}" for path, derived in found.items() for name in derived.parameters}
    by_weight: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_weight.setdefault(id(parameter), []).append(name)
    for names in by_weight.values():
        if len(names) > 1 and cut.intersection(names):
            raise OutsizeError(
                f"{names[0]} and {names[1]} are one weight, which the tensor axis would cut for one"
                " of them; put all workers on the data axis"
            )


def said(sizes: Mapping[str, int], found: Mapping[str, Derived]) -> str:
    """One line: how much of a model is cut, and which rows stay whole for which reason. sizes:
    elements of its whole parameters, by name."""
    cut = [f"{path}.{name}" for path, derived in found.items() for name in derived.parameters]
    part = sum(sizes.get(name, 0) for name in cut) / sum(sizes.values())
    size = next(iter(found.values())).size
    left = dict(item for derived in found.values() for item in derived.left.items())
    text = f"tensor={size}: {part:.0%} of the parameters are cut; the rest is whole on every worker"
    reasons = (f"{module} ({' '.join(reason.split())})" for module, reason in left.items())
    return "; ".join((text, *reasons))


class Guard:
    """Refuses a module's own forward and state_dict while they would tell of other values than the
    module's. why: what is the matter, and what to call instead. So it does with parameters whose
    values are not here."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._ours = False  # the forward at hand is the job's
        self._hidden: Mapping[str, nn.Parameter] = {}
        self._watched: Mapping[str, nn.Parameter] = {}

    @contextmanager
    def computing(self) -> Iterator[None]:
        """While the job computes."""
        within, self._ours = self._ours, True
        self._show()
        try:
            yield
        finally:
            self._ours = within
            if not within:
                self._hide()

    def hidden(
        self, parameters: Mapping[str, nn.Parameter], watched: Mapping[str, nn.Parameter]
    ) -> None:
        """These, by name, and no others, have values while the job computes only; who asks for the
        `data` of those that are watched is noted."""
        self._show()
        forget(self._watched.values())
        self._hidden, self._watched = parameters, watched
        if not self._ours:
            self._hide()

    def _show(self) -> None:
        show((*self._hidden.values(), *self._watched.values()))

    def _hide(self) -> None:
        hide(self._hidden)
        hide(self._watched, Asked)

    def forward(self, why: str) -> Any:
        """Refuse it from now on, until the handle that this gives is removed."""

        def refuse(*_: Any) -> None:
            if not self._ours:
                raise OutsizeError(f"{type(self._model).__name__}: {why}")

        return self._model.register_forward_pre_hook(refuse)

    def state_dict(self, why: str) -> Any:
        """The same of its state_dict."""

        def refuse(*_: Any) -> None:
            raise OutsizeError(f"{type(self._model).__name__}: {why}")

        return self._model.register_state_dict_pre_hook(refuse)
