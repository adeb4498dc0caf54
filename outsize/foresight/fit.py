"""Constants from runs that were measured: least squares in logarithms, held to their priors.

Each publication counts as one voice, whatever its number of rows; a large error counts by its size,
not by its square (Huber). Gauss-Newton with damping, differences taken numerically: a fit of all
rows takes a second, so that constants can be fitted anew without each publication in turn.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from outsize.foresight.constants import Array, Batch, Model

NOISE = 0.05  # of a published step time, in logarithms
BEND = 2.5  # deviations from which an error counts by its size
STEPS = 40
STILL = 1e-6
SMALL = 1e-5  # of logarithms: a difference that stands for a derivative


def fit(
    model: Model, batch: Batch, measured: Array, publications: list[str], start: Array | None = None
) -> Array:
    """Constants (logarithms) that lie best between priors and measured seconds. start: where the
    search begins; at the priors where nothing is said."""
    voice = _voices(publications)
    constants, damping = (model.centre if start is None else start).copy(), 1e-2
    wanted = np.log(measured)

    def errors(at: Array) -> Array:
        made: Array = (np.log(model.seconds(batch, at).total) - wanted) / NOISE
        return made

    def cost(at: Array, found: Array) -> float:
        size = np.abs(found)
        each = np.where(size < BEND, size**2, 2 * BEND * size - BEND**2)
        held = ((at - model.centre) / model.deviation) ** 2
        return float((voice * each).sum() + held.sum())

    found = errors(constants)
    now = cost(constants, found)
    for _ in range(STEPS):
        by = slopes(model, batch, constants) / NOISE
        weight = voice * np.where(np.abs(found) < BEND, 1.0, BEND / np.maximum(np.abs(found), BEND))
        left = by.T @ (weight[:, None] * by) + np.diag(model.deviation**-2.0)
        right = by.T @ (weight * found) + (constants - model.centre) / model.deviation**2
        step = np.linalg.solve(left + damping * np.diag(np.diag(left)), right)
        tried = constants - np.clip(step, -0.5, 0.5)
        after = errors(tried)
        then = cost(tried, after)
        if then < now:
            done = now - then < STILL * now
            constants, found, now, damping = tried, after, then, max(damping / 5, 1e-9)
            if done:
                break
        else:
            damping *= 8
            if damping > 1e6:
                break
    return constants


def _voices(publications: list[str]) -> Array:
    """Weights of rows: of a publication with n of them they add up to the root of n."""
    count = {name: publications.count(name) for name in set(publications)}
    return np.array([count[name] ** -0.5 for name in publications])


def slopes(model: Model, batch: Batch, at: Array) -> Array:
    """Of the logarithm of every run's seconds by every constant. A constant multiplies one lane of
    the runs that it applies to, so that one difference for each lane says all."""
    lanes, now = list(dict.fromkeys(model.lanes)), np.log(model.seconds(batch, at).total)
    ones = np.ones((len(now), len(lanes)))
    every = replace(model, lanes=(*model.lanes, *lanes), applies=np.hstack([model.applies, ones]))
    found = {}
    for lane, moved in zip(lanes, SMALL * np.eye(len(lanes)), strict=True):
        made = every.seconds(batch, np.concatenate([at, moved])).total
        found[lane] = (np.log(made) - now) / SMALL
    by_constant: Array = np.array([found[lane] for lane in model.lanes]).T * model.applies
    return by_constant
