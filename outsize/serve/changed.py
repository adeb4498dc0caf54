"""Weights that somebody changes under an open engine: an optimizer's step, a copy from elsewhere.

The next step is made by what the weights are then. Keys and values of the earlier ones are nobody's
any more; who has drawn by them is ended, so that no text is of two models.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain

import torch
from torch import Tensor

from outsize.errors import OutsizeError
from outsize.serve.asks import End
from outsize.serve.line import Line
from outsize.serve.model import Model
from outsize.torch_private import buffers_here, changes, parameters_here

_SAMPLES = 32  # numbers of each parameter
_TWO = (
    "the weights were changed while this text was drawn, which would be of two models; ask again,"
    " and change weights while nobody is answered"
)


class Watched:
    """The parameters and buffers of a model that is somebody else's. PyTorch counts the changes
    that it makes itself, but for those through `.data` or by kernels of others: some numbers of
    each tensor are looked at beside."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._note()

    def changed(self, asked: bool) -> bool:
        """Whether the weights are others than when this was asked last. asked: somebody has come
        since, for whom numbers are looked at, too. OutsizeError where they are no longer those of
        a model like it, or lie on several workers."""
        if self._now() == self._seen and not (asked and self._samples() != self._known):
            return False
        form, model = self._form, self._model
        self._note()
        if model.away:
            raise OutsizeError(
                f"the weights of a model that was loaded with {model.away} were changed under its"
                " engine; expected them as they were loaded: save them, and load them anew"
            )
        if self._form != form:
            raise OutsizeError(
                "the model has other parameters, or an adapter more or less, than when its engine"
                " was made; expected the same, with whatever values: close the engine, and make"
                " another"
            )
        return True

    def _note(self) -> None:
        named = chain(self._model.named_parameters(), self._model.named_buffers())
        self._form = (
            self._model.config, *((name, x.shape, x.dtype, x.device) for name, x in named)
        )  # fmt: skip
        self._homes = [
            home
            for module in self._model.modules()
            for home in (parameters_here(module), buffers_here(module))
            if home
        ]
        self._held = [x for home in self._homes for x in home.values() if x is not None]
        kinds = defaultdict[tuple[torch.dtype, torch.device], list[Tensor]](list)
        for x in self._held:
            if x.numel():
                kinds[x.dtype, x.device].append(_some(x))
        self._views = list(kinds.values())
        self._seen, self._known = self._now(), self._samples()

    def _now(self) -> list[tuple[int, int, int]]:
        """Which tensors they are, how often each has been changed, where it lies."""
        config = (id(self._model.config), 0, 0)
        every = (x for home in self._homes for x in home.values() if x is not None)
        return [config, *((id(x), _changes(x), x.data_ptr()) for x in every)]

    def _samples(self) -> list[bytes]:
        found = (torch.cat(views).view(torch.uint8).cpu() for views in self._views)
        return [one.numpy().tobytes() for one in found]


def begin_anew(line: Line) -> None:
    """The model is another than before, for whoever begins from now on and whose prompt is fed
    anew."""
    line.age += 1
    for request in list(line.requests.values()):
        if request.drawn:
            line.leave(request, End("error", _TWO))
        elif request.begun:
            line.interrupt(request)


def watched(model: Model) -> Watched | None:
    """None for one whose parameters are not its weights, which stay in files."""
    return None if model.away == "memory" else Watched(model)


def _changes(x: Tensor) -> int:
    return 0 if x.is_inference() else changes(x)


def _some(x: Tensor) -> Tensor:
    """Numbers from all over a tensor, or from a row of one that does not lie in one piece."""
    whole = x.detach()
    flat = whole.view(-1) if whole.is_contiguous() else whole[(0,) * (whole.dim() - 1)]
    return flat[:: max(1, flat.numel() // _SAMPLES)]
