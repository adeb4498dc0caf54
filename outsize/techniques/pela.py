"""PELA: a model of low rank learns by the features and the weights of the full one, then alone.

Guo, Wang and Kankanhalli, "PELA: Learning Parameter-Efficient Models with Low-Rank Approximation",
2024 (arXiv 2310.10700). `outsize convert --factored RATIO` writes the student: each weight W of the
blocks becomes B A of its largest singular values. Before it is fine-tuned it goes on being trained
beside its frozen teacher, all its parameters, on

    its own loss + features / L * sum over blocks of the mean square of (student - teacher)
                 + perturbation / P * sum over weights of (max |B A - W| - epsilon)^2.

L blocks, whose outputs are compared; P weights that have factors. Defaults are those of the
authors' code. A token's squares are averaged over features and count as its target does: what is no
target has none, where the paper averages over all tokens of a batch. The teacher has no dropout.
The last two terms have gradients, and are no part of the loss that is reported. What comes of it is
a model like any of low rank: the teacher is not saved, and nobody needs it afterwards.

    outsize convert DIR --factored 2 --into STUDENT

    model: STUDENT                       # in a run's file
    plan: {approximate: [pela]}
    pela: {teacher: DIR}

outsize/runtime/special/distilling.py makes its steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from outsize.registry import setting, technique

KEY = "pela"


@dataclass(frozen=True)
class Pela:
    """Of a run whose plan.approximate names it."""

    teacher: str = setting("", "directory of the full model, which the student was made of")
    features: float = setting(0.1, "factor of the squares between outputs of blocks", least=0)
    perturbation: float = setting(1.0, "factor of the squares between weights", least=0)
    epsilon: float = setting(1e-3, "largest difference that weights are drawn to", least=0)


technique(
    KEY, Pela, "settings of plan.approximate: [pela]", exact=False,
    touches=frozenset({"the backward pass", "how a stage runs"}),
    method="outsize.runtime.special.distilling.Distilling",
    clashes=(
        (
            "mesh pipeline: the teacher's features go from block to block on one worker",
            lambda p: p.mesh.pipeline > 1,
        ),
    ),
)  # fmt: skip
