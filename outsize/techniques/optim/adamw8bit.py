"""AdamW whose moments are kept in 8 bits by blocks.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021 (arXiv 2110.02861): each
moment of a parameter is one byte, a code of a dynamic tree table, and each block of consecutive
elements has one float32 scale, its largest magnitude. An update makes numbers of them, updates as
AdamW does, and rounds the new moments. 2.03 bytes of states for a parameter in place of 8.

As in the authors' package (bitsandbytes) blocks have 256 elements (in the paper 2048), the last
block of a parameter is as short as it comes, and parameters of less than 4096 elements have 32-bit
states. So do embeddings, as the paper asks; the rest of its stable embedding is a model's and no
optimizer's (`stable_embedding: true`). Other than there, the head has 32-bit states too (it is the
embedding, where the two are tied, and its rows lie on all workers where a pipeline cuts the
vocabulary), and weights decay before the update, as in torch.optim.AdamW.

Blocks are of a parameter's own elements, so that the bits are the same however chunks are cut. On
the tensor axis a worker has parts of blocks: there every worker updates the whole parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from outsize.errors import OutsizeError
from outsize.kernels import blockwise
from outsize.kernels.blockwise import MOST, ZERO, Moments, update
from outsize.optim import OPTIMIZERS, Common, Optimizer, StateSpec
from outsize.optim.optimizer import AdamW, Rates
from outsize.registry import setting, technique

NAME = "adamw8bit"
_MEAN, _SQUARE, _SCALE = "exp_avg", "exp_avg_sq", "scale"


@dataclass(frozen=True)
class Settings:
    block: int = setting(256, "elements that share a scale: a power of two", 32, MOST)
    least: int = setting(4096, "elements from which a matrix has states of 8 bits", 1)

    def __post_init__(self) -> None:
        if self.block & (self.block - 1) or not 32 <= self.block <= MOST:
            raise OutsizeError(
                f"{NAME}.block is {self.block}; expected a power of two from 32 to {MOST}"
            )


@dataclass(frozen=True)
class AdamW8Bit:
    """lr, betas, eps and weight_decay are those of `rest`, the AdamW of all other parameters."""

    rest: AdamW = field(default_factory=AdamW)
    settings: Settings = field(default_factory=Settings)
    approximate: ClassVar[str] = NAME

    @property
    def lr(self) -> float:
        return self.rest.lr

    @property
    def weight_decay(self) -> float:
        return self.rest.weight_decay

    @property
    def grain(self) -> int:
        return self.settings.block

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Matrices, and stacks of matrices, of enough elements."""
        return len(shape) >= 2 and prod(shape) >= self.settings.least

    @property
    def states(self) -> tuple[StateSpec, ...]:
        block = self.settings.block
        return (
            StateSpec(_MEAN, torch.uint8, initial=ZERO),
            StateSpec(f"{_MEAN}_{_SCALE}", torch.float32, block),
            StateSpec(_SQUARE, torch.uint8),
            StateSpec(f"{_SQUARE}_{_SCALE}", torch.float32, block),
        )

    def update(
        self, weights: Tensor, gradients: Tensor, state: Mapping[str, Tensor], rates: Rates
    ) -> None:
        moments = Moments(*(state[spec.name] for spec in self.states))
        numbers = blockwise.Rates(
            rates.lr, self.rest.betas, self.rest.eps, rates.weight_decay, rates.step
        )
        update(weights, gradients, moments, self.settings.block, numbers)


def _make(common: Common, settings: Settings | None) -> Optimizer:
    return AdamW8Bit(common.adamw(), settings or Settings())


technique(
    NAME,
    Settings,
    "both moments of AdamW in 8 bits, with a scale for each block (arXiv 2110.02861)",
    exact=False,
    touches=frozenset({"optimizer states"}),
)
OPTIMIZERS.add(NAME, _make)
