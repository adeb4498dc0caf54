"""The optimizer that is handed to `prepare`: of one of torch.optim the settings are read before
every step, and it has the states of the job."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from outsize.errors import OutsizeError
from outsize.optim import SGD, AdamW, Optimizer
from outsize.optim.parse import parse
from outsize.runtime import Job
from outsize.runtime.handlers.training import Training
from outsize.runtime.recipe import Group, Recipe
from outsize.torch_private import changes, disable_current_modes, hooks_of_steps, mark_stepped
from outsize.train.prepared import states
from outsize.train.prepared.elsewhere import Unshown


class Handed:
    """update: ours that does as it does. steps: made so far, a tensor that its states share."""

    def __init__(self, model: nn.Module, given: Optimizer | torch.optim.Optimizer | str) -> None:
        self.update = _converted(given)
        self.steps = torch.zeros(())
        self._counted = changes(self.steps)
        self._theirs = given if isinstance(given, torch.optim.Optimizer) else None
        self._model = model
        self._members: list[list[int]] = []  # of groups, when a job was made last
        self.recipe(None)  # refuses what it cannot train
        self._refuse_hooks(own=0)
        self._shown: list[states.Shown] = []
        self._unshown: Unshown | None = None  # what the optimizer has instead of states
        self._hook: RemovableHandle | None = None
        self._show: Callable[[], None] = _nothing

    def recipe(self, clip: float | None) -> Recipe:
        """How it trains."""
        theirs = self._theirs
        if theirs is None:
            return Recipe(self.update, clip)
        self._members = _members(theirs)
        return Recipe(self.update, clip, _groups_now(theirs), _group_of(self._model, theirs))

    def regrouped(self, lone: bool) -> bool:
        """Whether parameters are in other groups now than those a job was made for, so that it must
        be made anew. lone: whether it may; OutsizeError where it may not."""
        theirs = self._theirs
        if theirs is None or _members(theirs) == self._members:
            return False
        if not lone:
            raise OutsizeError(
                "optimizer has other parameters in its groups than when the job was made, whose"
                " states lie on tiers or on several workers; keep the groups, or call"
                " outsize.prepare anew"
            )
        return True

    @property
    def states(self) -> Callable[[Job], int] | None:
        """What puts the states that it has already into a job and gives the steps made; None where
        it has none."""
        theirs = self._theirs
        return (
            partial(states.taken, optimizer=theirs) if theirs is not None and theirs.state else None
        )

    def watch(self, take: Callable[[Callable[[Job], int]], None]) -> Callable[[], None]:
        """From here on states that are loaded into it are the job's, which `take` gives them to,
        and it makes no steps of its own. Gives what ends that."""
        theirs = self._theirs
        if theirs is None:
            return _nothing

        def loaded(_: object) -> None:
            self._shown, self._unshown = [], None
            take(partial(states.taken, optimizer=theirs))
            self._show()

        def refuse(*_: object) -> None:
            raise OutsizeError(
                "optimizer.step: job.step(batch) has updated the weights already, and a second"
                " update would move them by moments alone; leave optimizer.step() out of the loop"
            )

        hooks = (
            theirs.register_load_state_dict_post_hook(loaded),
            theirs.register_step_pre_hook(refuse),
        )

        def end() -> None:
            for hook in hooks:
                hook.remove()

        return end

    def follow(self, lr: float | None) -> None:
        """Take over betas, eps and momentum as they are now: torch's OneCycleLR changes them with
        every step. OutsizeError where a job's states would be others, and for a rate of a step that
        has one by the optimizer's groups."""
        if self._theirs is None:
            return
        if lr is not None:
            raise OutsizeError(
                f"lr is {lr:g} for this step, and the optimizer that prepare was given says the"
                " rate of each of its groups; set it there (param_groups, or a scheduler), or"
                " prepare with an optimizer by name"
            )
        self._refuse_hooks(own=1)
        now = _converted(self._theirs)
        if now.states != self.update.states:
            raise OutsizeError(
                "optimizer momentum has become 0, or is no longer 0: its states would be others;"
                " keep it as it was, or call outsize.prepare anew"
            )
        self.update = now

    def _refuse_hooks(self, own: int) -> None:
        """own: hooks of steps that are ours."""
        if self._theirs is not None and hooks_of_steps(self._theirs) > own:
            raise OutsizeError(
                "optimizer has a hook of its step (register_step_pre_hook, register_step_post_hook)"
                " that job.step, which makes the step, would not call; remove it, and change"
                " weights after job.step, gradients by clip= or by hooks of parameters"
            )

    def ready(self, job: Job, lr: float | None) -> float | None:
        """Set out on a step; gives its learning rate."""
        if self._theirs is None:
            return lr
        assert isinstance(job.method, Training), "an optimizer of torch's takes gradients"
        job.method.updates.groups = _groups_now(self._theirs)
        job.method.updates.optimizer = self.update
        mark_stepped(self._theirs)
        return 1.0

    def anew(self) -> None:
        """Another job is made for the same model."""
        if self._hook is not None:
            self._hook.remove()
        self._hook, self._show, self._shown = None, _nothing, []

    def count(self, steps: int) -> None:
        """So many have been made."""
        self.steps.fill_(steps)
        self._counted = changes(self.steps)

    def show(self, job: Callable[[], Job | None], views: bool) -> None:
        """After a step: it has the states of the job as they are here where those are views, which
        lie whole on the device; else copies from when its state_dict is asked for until the next
        step, and before nothing that can be read."""
        theirs = self._theirs
        if theirs is None:
            return
        if not views:
            self._shown, self._unshown = [], Unshown()
            theirs.state = self._unshown
        if self._hook is not None:
            return

        def show(*_: object) -> None:
            made = job()
            if made is None:
                return
            if not views:
                theirs.state, self._unshown = defaultdict(dict), None
            self._shown = states.shown(made, theirs, self.steps, views)

        if views:
            show()
            self._show = show
        self._hook = theirs.register_state_dict_pre_hook(show)

    def look(self, job: Job, views: bool) -> None:
        """Go on from states that have been edited in the optimizer since. views: as `show` was
        told. OutsizeError where it has copies."""
        theirs = self._theirs
        if theirs is None:
            return
        replaced = self._unshown is not None and theirs.state is not self._unshown
        if not (self._shown or replaced):
            return
        same, counted = [], changes(self.steps) == self._counted
        for one in self._shown:
            if one.same(theirs) and (counted or one.value is not self.steps):
                same.append(one)
        if len(same) == len(self._shown) and not replaced:
            return
        if not views:
            raise OutsizeError(
                "optimizer.state has been changed between two steps, which training would not see:"
                " what it has are copies of states that rest elsewhere; change what"
                " job.state_dict() gives, and hand it to job.load_state_dict"
            )
        states.counted_again(job, (one for one in same if one.key == states.STEP))
        self.count(states.taken(job, theirs))
        self._show()


def _converted(optimizer: Optimizer | torch.optim.Optimizer | str) -> Optimizer:
    if isinstance(optimizer, str):
        if optimizer == "sgd":
            return SGD()
        return parse(optimizer, AdamW.lr, AdamW.weight_decay, AdamW.betas)
    if isinstance(optimizer, Optimizer) and not isinstance(optimizer, type):
        return optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OutsizeError(
            f"optimizer is {optimizer!r}; expected one of torch.optim made over the model's"
            " parameters, one of outsize.optim, or a name as 'adamw'"
        )
    for name in ("amsgrad", "maximize", "nesterov", "dampening"):
        if any(group.get(name) for group in optimizer.param_groups):
            raise OutsizeError(f"optimizer option {name} is not supported; leave it out")
    first = optimizer.param_groups[0]
    for name in ("betas", "eps", "momentum"):
        if any(group.get(name) != first.get(name) for group in optimizer.param_groups):
            raise OutsizeError(f"optimizer groups differ in {name}; expected one value for all")
    if type(optimizer) is torch.optim.AdamW or _decays_apart(optimizer):
        return AdamW(1.0, tuple(first["betas"]), first["eps"], 0.0)
    if type(optimizer) is torch.optim.SGD:
        return SGD(1.0, first["momentum"], 0.0)
    if type(optimizer) is torch.optim.Adam:
        raise OutsizeError(
            "optimizer Adam adds its weight_decay to gradients, which is not supported; set it to"
            " 0, or take torch.optim.AdamW"
        )
    raise OutsizeError(
        f"optimizer {type(optimizer).__name__} is not supported; expected torch.optim.AdamW, Adam"
        " or SGD, 'adamw' or 'sgd'"
    )


def _decays_apart(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is an Adam that does what AdamW does."""
    return type(optimizer) is torch.optim.Adam and not any(
        group["weight_decay"] and not group.get("decoupled_weight_decay")
        for group in optimizer.param_groups
    )


def _nothing() -> None:
    """Nobody has anything to end or to show."""


def _members(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """The parameters of each group, by identity."""
    return [[id(p) for p in group["params"]] for group in optimizer.param_groups]


def _groups_now(optimizer: torch.optim.Optimizer) -> list[Group]:
    """Settings as they are now: a scheduler may have changed them."""
    with disable_current_modes():  # a rate may be a tensor, whose value a forecast has too
        return [Group(g["weight_decay"], float(g["lr"])) for g in optimizer.param_groups]


def _group_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    index = {id(p): i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
    named = dict(model.named_parameters())
    for name, p in named.items():
        if p.requires_grad and id(p) not in index:
            raise OutsizeError(
                f"parameter {name!r} is in no group of the optimizer; give it to the optimizer or"
                " set its requires_grad to False"
            )
    own = set(map(id, named.values()))
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if id(p) not in own and p.requires_grad:
            raise OutsizeError(
                f"optimizer holds a parameter of shape {tuple(p.shape)} that the"
                f" {type(model).__name__} has not, and would never update it; make it one of the"
                " model's, or leave it out of the optimizer"
            )
    return {name: index.get(id(p), 0) for name, p in named.items()}
