"""Derivatives of nonlinear functions kept in 4 bits for the backward pass (S2A).

Jin et al., "S2A: A Unified Framework for Parameter and Memory Efficient Transfer Learning", 2025.
Activation functions, gates and norms of a native decoder's blocks keep their derivatives, not their
inputs; what attention and trained weights keep is rounded to 8 bits, or stays whole. Least is kept
where no matrix is trained, since a matrix keeps its input: the paper trains biases, prompts and a
side network. outsize/runtime/special/derivatives.py puts it into a job.

    plan: {approximate: [four-bit-derivatives]}
    train.only: "*.bias"
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outsize.registry import setting, technique

KEY = "four-bit-derivatives"


@dataclass(frozen=True)
class FourBitDerivatives:
    """Of a run whose plan.approximate names it."""

    rest: Literal["int8", "whole"] = setting(
        "int8", "what else blocks keep for the backward pass, in 8 bits or as it is"
    )


technique(
    KEY, FourBitDerivatives, "settings of plan.approximate: [four-bit-derivatives]", exact=False,
    touches=frozenset({"the backward pass"}),
    method="outsize.runtime.special.derivatives.Derivatives",
)  # fmt: skip
