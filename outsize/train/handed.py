"""The optimizer that was handed to `prepare`: its settings are read before every step, and where it
is one of torch.optim it has the states of the job."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from outsize.optim import Optimizer
from outsize.runtime import Job
from outsize.runtime.handlers.training import Training
from outsize.runtime.recipe import Recipe
from outsize.torch_private import mark_stepped
from outsize.train import kept
from outsize.train.optimizers import converted, group_of, groups_now


class Handed:
    """update: ours that does as it does. steps: made so far, a tensor that its states share."""

    def __init__(self, model: nn.Module, given: Optimizer | torch.optim.Optimizer | str) -> None:
        self.update = converted(given)
        self.steps = torch.zeros(())
        self._theirs = given if isinstance(given, torch.optim.Optimizer) else None
        self._model = model
        self.recipe(None)  # refuses what it cannot train
        self._hook: RemovableHandle | None = None

    def recipe(self, clip: float | None) -> Recipe:
        """How it trains."""
        theirs = self._theirs
        if theirs is None:
            return Recipe(self.update, clip)
        return Recipe(self.update, clip, groups_now(theirs), group_of(self._model, theirs))

    @property
    def states(self) -> Callable[[Job], int] | None:
        """What puts the states that it has already into a job and gives the steps made; None where
        it has none."""
        theirs = self._theirs
        return (
            partial(kept.taken, optimizer=theirs) if theirs is not None and theirs.state else None
        )

    def ready(self, job: Job, lr: float | None) -> float | None:
        """Set out on a step; gives its learning rate."""
        if self._theirs is None:
            return lr
        assert isinstance(job.method, Training), "an optimizer of torch's takes gradients"
        job.method.updates.groups = groups_now(self._theirs)
        mark_stepped(self._theirs)
        return 1.0

    def anew(self) -> None:
        """Another job is made for the same model."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def show(self, job: Callable[[], Job | None], views: bool) -> None:
        """After the first step: it has the states of the job as they are here where those are
        views, which lie whole on the device; else when its state_dict is asked for."""
        theirs = self._theirs
        if theirs is None or self._hook is not None:
            return

        def show(*_: object) -> None:
            made = job()
            if made is not None:
                kept.shown(made, theirs, self.steps)

        if views:
            show()
        self._hook = theirs.register_state_dict_pre_hook(show)
