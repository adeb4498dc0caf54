"""Products of branches in chunks of tokens, beside their sums over the tensor axis.

Pati et al., "T3: Transparent Tracking & Triggering", 2024. How a branch does it is
outsize/parallel/tensor/overlap.py. Bit for bit what the sums give one after the other.
"""

from __future__ import annotations

from outsize.collectives.axes import Clash
from outsize.parallel.tensor.beside import BESIDE
from outsize.parallel.tensor.overlap import overlap_of
from outsize.plan import Plan
from outsize.plan.settings import PLAN_SETTINGS, PlanSetting

NAME = "overlap"
CHUNKS = 4
LEAST = 64  # tokens of a chunk: a smaller product costs more than its sum hides


def quicker(plan: Plan) -> tuple[int, ...]:
    """Chunks that are worth a forecast."""
    return (CHUNKS,) if plan.microbatch_size * plan.sequence >= CHUNKS * LEAST else ()


BESIDE.add(NAME, overlap_of)
PLAN_SETTINGS.add(
    NAME,
    PlanSetting(
        NAME,
        "chunks of tokens whose sums over the tensor axis run beside the next one's product; 0:"
        " one after the other",
        (
            Clash(
                "and sequence_parallel is set, while activations rest below the device: they would"
                " leave before they have come",
                lambda plan: plan.sequence_parallel and plan.rests_below("activations"),
                "set it to 0",
            ),
        ),
        axis="tensor",
        native="whose own code takes its sums",
        quicker=quicker,
        draws=(0, 0, 2, 3),
    ),
)
