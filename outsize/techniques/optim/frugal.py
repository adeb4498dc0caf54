"""FRUGAL: AdamW in a subspace of each matrix, the sign of the gradient in all the rest.

Zmushko et al., "FRUGAL: Memory-Efficient Optimization by Reducing State Overhead for Scalable
Training", 2024 (arXiv 2411.07837). The part with states is a share of each matrix: rows of it as
it lies, drawn at random; a random subspace; or that of the gradient's leading singular vectors.
It is drawn anew every `gap` updates, and its moments begin anew with it. What is not in it moves
by signs, and needs no state. Embeddings, the head and vectors have AdamW. As the authors' code,
whose blocks are whole layers, and are not here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from outsize.optim import OPTIMIZERS, Common, Optimizer, StateSpec, subspace
from outsize.optim.optimizer import AdamW, Rates
from outsize.registry import setting, technique

NAME = "frugal"
_MAKES: Mapping[str, Callable[[Tensor, int, str], Tensor]] = {
    "rows": subspace.chosen,
    "random": subspace.orthogonal,
    "svd": lambda g_MN, rank, _: subspace.leading(g_MN, rank),
}


@dataclass(frozen=True)
class Settings:
    subspace: Literal["rows", "random", "svd"] = setting(
        "rows", "what AdamW has: rows of a matrix, any subspace, or the leading singular vectors"
    )
    rank: int | None = setting(
        None, "of the subspace; open: a quarter of a matrix's shorter side", 1
    )
    gap: int = setting(200, "updates for which a subspace stays", 1)
    others: float = setting(1.0, "factor on the learning rate of what moves by signs", 0)


@dataclass(frozen=True)
class Frugal(subspace.Subspaced):
    """lr, betas, eps and weight_decay are those of `rest`, the AdamW of all other parameters."""

    rest: AdamW = field(default_factory=AdamW)
    settings: Settings = field(default_factory=Settings)
    approximate: ClassVar[str] = NAME

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """Rows are drawn anew at each update, by a name; another projector is kept."""
        kept = self.settings.subspace != "rows"
        return (self.projector, *self.moments) if kept else self.moments

    def update(
        self, weights: Tensor, gradients: Tensor, state: Mapping[str, Tensor], rates: Rates
    ) -> None:
        own = self.settings
        switch, since = divmod(rates.step - 1, own.gap)
        start = subspace.correction(self.rest, since + 1)
        for matrix in subspace.matrices(weights, gradients, state, rates.name):
            g_MN = matrix.gradient_MN
            if not since:
                for moment in matrix.moments:
                    moment.zero_()
            p_MK = self._projector(matrix, switch, fresh=not since)
            low_KN = p_MK.T @ g_MN
            towards_KN = subspace.adam(matrix, low_KN, self.rest) * start
            others_MN = (g_MN - p_MK @ low_KN).sign_()
            towards_MN = (p_MK @ towards_KN).add_(others_MN, alpha=own.others)
            matrix.move(towards_MN, rates.lr, rates.lr * rates.weight_decay)

    def _projector(self, matrix: subspace.Matrix, switch: int, fresh: bool) -> Tensor:
        kept = matrix.projector if subspace.PROJECTOR in matrix.states else None
        if kept is not None and not fresh:
            return kept
        rank, make = len(matrix.moments[0]), _MAKES[self.settings.subspace]
        made = make(matrix.gradient_MN, rank, f"{matrix.name}.{switch}")
        return made if kept is None else kept.copy_(made)


def _make(common: Common, settings: Settings | None) -> Optimizer:
    return Frugal(common.adamw(), settings or Settings())


technique(
    NAME,
    Settings,
    "AdamW in a subspace of each matrix, signs elsewhere (arXiv 2411.07837)",
    exact=False,
    touches=frozenset({"optimizer states"}),
)
OPTIMIZERS.add(NAME, _make)
