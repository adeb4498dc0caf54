"""Steps between some of which the two factors of each product are made anew of their product.

Factors B (M, K) and A (K, N) become U sqrt(S) and sqrt(S) V', where B A = U S V': the model
computes what it did, to rounding. With them the optimizer's states may begin anew, and its rate
rise again. Glentis et al., 2025 (arXiv 2505.22922): outsize/techniques/wirings says more of it.

Every worker reads whole factors, as a checkpoint does, and makes the same ones of them: the
same numbers wherever they rest. Between two steps there are no activations; one block's factors are
there twice then.

    plan: {approximate: [refactored]}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from outsize.errors import OutsizeError
from outsize.models.low_rank import LowRank
from outsize.plan import Plan
from outsize.runtime.flow import Flow
from outsize.runtime.recipe import Recipe
from outsize.runtime.special.counted import Counted
from outsize.runtime.storage.states import Fill

if TYPE_CHECKING:
    from outsize.runtime.job import Job

NOTES, LAST = "refactoring", "last"  # of a checkpoint: steps made before the last time
LOW = 1e-3  # of the learning rate, where it begins to rise


@runtime_checkable
class Restarting(Protocol):
    """Settings of a technique. gap: steps from one time to the next. reset: states begin anew.
    recovery: steps in which the learning rate rises."""

    @property
    def gap(self) -> int: ...

    @property
    def reset(self) -> bool: ...

    @property
    def recovery(self) -> int: ...


class Refactoring(Counted):
    """Steps as usual, and what is done before some of them: see outsize/runtime/method.py."""

    noted, said = NOTES, "its refactoring is"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._last = 0
        self._own = _restarting(job.plan, job.recipe)

    @staticmethod
    def freeze(flow: Flow, plan: Plan, recipe: Recipe) -> None:
        """Nothing is frozen. OutsizeError for a model without factors that are trained."""
        if not any(_pairs(flow)):
            raise OutsizeError(
                "plan.approximate holds refactored, but no two factors of a weight are trained; set"
                " factored_weights, or an adapter of low rank"
            )

    def ready(
        self, batch: Any, cuts: Sequence[tuple[int, int]], factor: float, lr: float | None
    ) -> None:
        own = self._own
        if self._steps % own.gap == 0 and self._steps > self._last:
            self._anew()
            self._last = self._steps
        lr = self._optimizer.lr if lr is None else lr
        super().ready(batch, cuts, factor, lr * self._risen())

    def _risen(self) -> float:
        """The part of its learning rate that a step has."""
        done, recovery = self._steps - self._last, self._own.recovery
        if not (self._last and self._own.reset) or done >= recovery:
            return 1.0
        return LOW + (1 - LOW) * done / max(1, recovery - 1)

    @torch.no_grad()
    def _anew(self) -> None:
        """Every worker calls it, between two steps."""
        self.settle()
        held, pool = self._job.held, self._job.weight_pool
        segments = dict.fromkeys(chunk.table.segment for chunk in pool.chunks)
        pairs = list(_pairs(self._job.flow))
        for segment in segments:
            mine = [i for i, chunk in enumerate(pool.chunks) if chunk.table.segment == segment]
            self._segment(mine, pairs)
        for index, chunk in enumerate(pool.chunks if self._own.reset else ()):
            kept, table = pool.placement.chunks.kept, chunk.table
            for what in kept.names(table):
                held.replace(index, (what,), "", _filled(kept.spec(table, what).initial))
            chunk.steps = {}
        self.mend()

    def _segment(self, mine: Sequence[int], pairs: Sequence[tuple[str, str]]) -> None:
        """The factors of some chunks, which have both of a pair or none."""
        held, pool = self._job.held, self._job.weight_pool
        old: dict[str, Tensor] = {}
        for index in mine:
            table = pool.chunks[index].table
            flat = pool.read(index, next(held.weights_of(index)))
            old |= {slot.name: flat[slot.offset : slot.offset + slot.numel] for slot in table.slots}
        made = dict[str, Tensor]()
        for names in pairs:
            if names[0] in old:
                whole = (self._whole(name, old[name]) for name in names)
                made |= zip(names, balanced(*whole), strict=True)

        def fill(name: str, out: Tensor) -> None:
            if name in made:
                out.copy_(self._job.whole_tensors.local(name, made[name]))
            else:
                out.copy_(old[name].view(out.shape))

        for index in mine:
            if not made.keys().isdisjoint(slot.name for slot in pool.chunks[index].table.slots):
                held.replace(index, tuple(held.weights_of(index)), "", fill)

    def _whole(self, name: str, flat: Tensor) -> Tensor:
        """Of what lies here of a parameter, the whole of it."""
        shape = self._job.owners[name].shape
        return self._job.whole_tensors.whole(name, flat.view(shape))

    def beside(self) -> Mapping[str, int]:
        return {LAST: self._last}

    def recall(self, notes: Mapping[str, Any]) -> None:
        super().recall(notes)
        self._last = notes.get(NOTES, {}).get(LAST, 0)
        if self._last > self._steps:
            raise OutsizeError(
                f"checkpoint: {self.said} {notes[NOTES]!r}; expected no more steps than were made"
            )


def balanced(a_KN: Tensor, b_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of the same product: sqrt(S) V' and U sqrt(S), in their dtype. The largest element of
    each column of U is above 0, as singular vectors have no sign of their own. Factors of nothing
    stay: of both at 0, neither would ever have a gradient."""
    wide = torch.promote_types(a_KN.dtype, torch.float32)
    q_NK, r_KK = torch.linalg.qr(a_KN.T.to(wide))
    q_MK, l_KK = torch.linalg.qr(b_MK.to(wide))
    u_KK, s_K, v_KK = torch.linalg.svd(l_KK @ r_KK.T)
    if not float(s_K[0]):
        return a_KN, b_MK
    u_MK, v_KN = q_MK @ u_KK, v_KK @ q_NK.T
    sign_K = u_MK.gather(0, u_MK.abs().argmax(0, keepdim=True))[0].sign()
    root_K = s_K.sqrt() * sign_K
    return (root_K[:, None] * v_KN).to(a_KN.dtype), (u_MK * root_K).to(b_MK.dtype)


def _filled(value: float) -> Fill:
    return lambda _, out: out.fill_(value)


def _restarting(plan: Plan, recipe: Recipe) -> Restarting:
    own = (recipe.of(name) for name in plan.approximate)
    return next(one for one in own if isinstance(one, Restarting))


def _pairs(flow: Flow) -> Iterator[tuple[str, str]]:
    """The names of A and B of each product whose factors are both trained."""
    for name, module in flow.model.named_modules():
        both = isinstance(module, LowRank)
        if both and module.a.weight.requires_grad and module.b.weight.requires_grad:
            yield f"{name}.a.weight", f"{name}.b.weight"
