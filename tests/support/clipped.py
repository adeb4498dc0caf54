"""A loss of coefficients by target and of several models, and the same written for autograd."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Clipped:
    """The clipped objective of a policy ("Proximal policy optimization algorithms", 2017), with a
    penalty towards a reference model: what a loss needs of several models, by target."""

    columns = ("advantage", "old", "reference")
    clip = 0.2
    penalty = 0.1

    def of(self, entropy_C, columns):
        logp_C = -entropy_C
        advantage_C, old_C = columns["advantage"], columns["old"]
        ratio_C = (logp_C - old_C).exp()
        apart_C = columns["reference"] - logp_C
        inside_C = (
            ratio_C * advantage_C <= ratio_C.clamp(1 - self.clip, 1 + self.clip) * advantage_C
        )
        gain_C = (
            torch.where(inside_C, ratio_C, ratio_C.clamp(1 - self.clip, 1 + self.clip))
            * advantage_C
        )
        loss_C = -gain_C + self.penalty * (apart_C.exp() - apart_C - 1)
        by_logp_C = -ratio_C * advantage_C * inside_C + self.penalty * (1 - apart_C.exp())
        return loss_C, -by_logp_C


def plainly(logp_T, columns):
    """The same of log-probabilities, for autograd."""
    ratio_T = (logp_T - columns["old"]).exp()
    kept_T = ratio_T.clamp(0.8, 1.2)
    gain_T = torch.minimum(ratio_T * columns["advantage"], kept_T * columns["advantage"])
    apart_T = columns["reference"] - logp_T
    return -gain_T + 0.1 * (apart_T.exp() - apart_T - 1)
