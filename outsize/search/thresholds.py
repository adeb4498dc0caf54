"""Thresholds: from how many tokens on what streams hides behind what computes.

A block's parameters (P bytes) come from a tier at R bytes/s while the block before computes, for t
seconds a token: hidden once tokens >= P / (R t). In layer order these are the tokens of a step,
else of a microbatch. With the update right behind the backward pass, a block's parameters and
optimizer states (S bytes) come and go while the block after it goes backward. An update apart waits
for the gradient's norm and hides behind nothing: what it moves beyond what it computes is paid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outsize.hardware import Hardware
from outsize.memory.tiers import TierSpec
from outsize.schedule import Kind
from outsize.schedule.kept import GRADIENTS, PARAMETERS
from outsize.search.pipeline_cuts import PASSES
from outsize.search.tiers import OPTIMIZER, States
from outsize.simulate import Forecast
from outsize.simulate.forecast import host_share, rate

SMALL = 0.1  # of a step: an update that takes no more of it is as good as hidden


@dataclass(frozen=True)
class Pace:
    """Of one block: seconds a token forward and backward (recompute included), of its update, and
    bytes of its states."""

    forward: float
    backward: float
    update: float
    parameters: int
    gradients: int
    optimizer: int


@dataclass(frozen=True)
class Threshold:
    """what on a tier costs less than it computes from `tokens` on; `of`: a step, or a microbatch.
    hides: whether all of it hides; else it takes less than SMALL of a step."""

    what: str
    tier: str
    tokens: float
    of: str
    hides: bool = True


def pace(made: Forecast, sizes: States) -> Pace:
    """The block whose states are largest, as a forecast computes it."""
    blocks = range(1, sizes.segments - 1) if sizes.segments > 2 else range(sizes.segments)
    block = max(blocks, key=lambda i: sum(sizes.bytes[kind][i] for kind in sizes.bytes))
    spent = dict.fromkeys((*PASSES, Kind.UPDATE), 0.0)
    for event in made.trace.events:
        if event.lane == "compute" and event.stage == block and Kind(event.kind) in spent:
            spent[Kind(event.kind)] += event.end - event.start
    tokens = made.plan.rows * made.plan.sequence
    forward = (spent[Kind.FORWARD] + spent[Kind.LOSS]) / tokens
    whole = sum(spent[kind] for kind in PASSES) / tokens
    states = (sizes.bytes[kind][block] for kind in (PARAMETERS, GRADIENTS, OPTIMIZER))
    return Pace(forward, whole - forward, spent[Kind.UPDATE], *states)


def thresholds(
    made: Forecast, sizes: States, tiers: Sequence[TierSpec], hardware: Hardware
) -> list[Threshold]:
    """For every tier: streaming of weights, updates behind the backward pass, updates apart. Where
    workers sum gradients, weights and gradients stay on the device."""
    one, alone = pace(made, sizes), not made.plan.mesh.summed
    if not alone:
        one = replace(one, parameters=0, gradients=0)
    of = "step" if made.plan.order == "layer" or made.plan.microbatches == 1 else "microbatch"
    found = []
    for tier in tiers:
        read, write = (rate(hardware, tier.name, fetch) for fetch in (True, False))
        if alone:
            found.append(Threshold("weights", tier.name, weights_from(one, read, write), of))
        name = "host update" if tier.medium == "memory" else "disk update"
        behind = update_from(one, read, write)
        found.append(Threshold(f"{name} behind the backward pass", tier.name, behind, "step"))
        late = apart_seconds(one, read, write, sizes.own)
        if tier.medium == "memory" and alone:
            late = min(late, one.update * host_share(hardware, tier.name))
        tokens = late * (1 - SMALL) / SMALL / (one.forward + one.backward)
        found.append(Threshold(f"{name} apart", tier.name, tokens, "step", False))
    return found


def weights_from(one: Pace, read: float, write: float) -> float:
    """Tokens from which a block's parameters come in time, forward and backward, and its gradients
    are gone in time."""
    forward = one.parameters / read / one.forward
    back = max(one.parameters / read, one.gradients / write) / one.backward
    return max(forward, back)


def update_from(one: Pace, read: float, write: float) -> float:
    """Tokens from which a block's update right behind its backward pass hides: optimizer states and
    parameters come, are changed by the computing thread itself, and go."""
    moves = max((one.optimizer + one.parameters) / x for x in (read, write))
    return max(0.0, moves - one.update) / one.backward


def apart_seconds(one: Pace, read: float, write: float, own: bool) -> float:
    """Seconds of a block's update when all gradients are there: gradients and states come, and
    states go, beside the computation."""
    come = one.optimizer + one.gradients + (one.parameters if own else 0)
    return max(come / read, (one.optimizer + one.parameters) / write, one.update)
