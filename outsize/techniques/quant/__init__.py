"""Formats in which a frozen model's weights are held as codes of few bits, one a file.

weights: int4            # in a run's file, beside an adapter; weights: int4:32 has groups of 32
"""

from __future__ import annotations

from dataclasses import dataclass

from outsize.models.coding import KEY
from outsize.registry import setting, technique


@dataclass(frozen=True)
class Weights:
    """What the matrices of a model's blocks are held as; embeddings, norms and head stay."""

    format: str = setting(
        "int4",
        "int8, int8-rows, int4, nf4, q8_0, q6_k, q5_k, q4_k or q4_0; int4:32: groups of 32",
    )


technique(
    KEY, Weights, "holds the frozen matrices of blocks, beside an adapter, as codes", short="format"
)
