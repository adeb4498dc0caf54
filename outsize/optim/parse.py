"""Optimizers by the names that runs use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outsize.errors import OutsizeError
from outsize.optim.muon import Muon
from outsize.optim.optimizer import SGD, AdamW, Optimizer
from outsize.optim.schedule import Shape
from outsize.registry import Registry, setting, technique


@dataclass(frozen=True)
class Common:
    """What a run says of any optimizer. warmup: steps in which the learning rate rises."""

    lr: float
    weight_decay: float
    betas: tuple[float, float]
    warmup: int = 0

    def adamw(self) -> AdamW:
        """The AdamW of these numbers."""
        return AdamW(self.lr, self.betas, weight_decay=self.weight_decay)


# From what a run says of any optimizer, and the settings under the name of this one (None: none).
Maker = Callable[[Common, Any], Optimizer]
OPTIMIZERS: Registry[Maker] = Registry("optimizer")
# Learning rates that a run has where it says none, from what AdamW would have.
RATES: Registry[Callable[[float], float]] = Registry("learning rate of the optimizer")
# What follows the warm-up where a run does not say it, and why.
SCHEDULES: Registry[tuple[Shape, str]] = Registry("schedule of the optimizer")


def parse(
    name: str,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    settings: Any = None,
    warmup: int = 0,
) -> Optimizer:
    """The optimizer of a run. settings: those under its name; None: its defaults."""
    return OPTIMIZERS.get(name)(Common(lr, weight_decay, betas, warmup), settings)


def check_approximate(optimizer: Optimizer, names: tuple[str, ...]) -> None:
    """Refuse an optimizer that changes the maths where `approximate` does not name it, and a name
    there without its optimizer."""
    own = optimizer.approximate
    if own is not None and own not in names:
        raise OutsizeError(
            f"plan: approximate is {list(names)}; the optimizer {own} changes the maths: name {own}"
            " there (plan.approximate), or take another optimizer"
        )
    for name in names:
        if name != own and OPTIMIZERS.find(name) is not None:
            raise OutsizeError(
                f"plan: approximate holds {name}, which is not the optimizer of this run; leave it"
                f" out, or set optimizer.name to {name}"
            )


@dataclass(frozen=True)
class SGDSettings:
    momentum: float = setting(0.9, "what the mean of gradients keeps of itself", 0)


@dataclass(frozen=True)
class MuonSettings:
    momentum: float = setting(Muon.momentum, "what the mean of gradients keeps of itself", 0)


def _sgd(common: Common, settings: SGDSettings | None) -> SGD:
    """Runs that say no momentum are of the time when betas[0] was it."""
    momentum = common.betas[0] if settings is None else settings.momentum
    return SGD(common.lr, momentum, common.weight_decay)


def _muon(common: Common, settings: MuonSettings | None) -> Muon:
    """The betas are those of the AdamW that updates the rest; lr serves both."""
    momentum = (settings or MuonSettings()).momentum
    return Muon(common.lr, momentum, weight_decay=common.weight_decay, rest=common.adamw())


OPTIMIZERS.add("adamw", lambda common, _: common.adamw())
OPTIMIZERS.add("muon", _muon)
OPTIMIZERS.add("sgd", _sgd)
_STATES = frozenset({"optimizer states"})
technique("muon", MuonSettings, "settings of optimizer.name: muon", touches=_STATES)
technique("sgd", SGDSettings, "settings of optimizer.name: sgd", touches=_STATES)
