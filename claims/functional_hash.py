"""Claim: candidates that do the same are found by a hash and evaluated once; choices stay the same.

Gillard et al., "Unified Functional Hashing in Automatic Machine Learning", 2023. `outsize plan
--explain` searches again for every family of layouts that it gives a reason for. The searches are
carried out twice: each with what it evaluates itself, and all with what the others have evaluated,
by the functional form of a layout (outsize/foresight/planning/known.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from verdict import Figure, conclude

from outsize.errors import OutsizeError
from outsize.foresight.named import shape_of
from outsize.foresight.planning.asked import Asked, conditions
from outsize.foresight.planning.choose import Planned, choose
from outsize.foresight.planning.explain import FAMILIES
from outsize.foresight.planning.known import Known
from outsize.foresight.shape import Shape
from outsize.hardware import Cluster, parse_spec

CASES = (
    ("llama3-8b", "2 x 8 H100-SXM"), ("llama3-70b", "8 x 8 H100-SXM"),
    ("gpt3-175b", "128 x 8 A100-SXM-80 @ 25GB/s"), ("deepseek-v3", "128 x 8 H100-SXM"),
)  # fmt: skip
SEQUENCE, ROWS = 4096, 1024


@dataclass(frozen=True)
class Searched:
    """The plan of every family, evaluations, and processor seconds."""

    plans: list[Planned | None]
    made: int
    seconds: float


def searched(shape: Shape, cluster: Cluster, shared: bool) -> Searched:
    asked, one = Asked(SEQUENCE, ROWS, seconds=1e4), Known(shape)
    made, plans, begin = 0, list[Planned | None](), time.process_time()
    for name in FAMILIES:
        known = one if shared else Known(shape)
        required = asked.conditions.with_required(*conditions((name,), "family"))
        try:
            found = choose(shape, replace(asked, conditions=required), cluster, 1, known).plans
        except OutsizeError:  # nothing divides
            found = []
        plans.append(found[0] if found else None)
        made += 0 if shared else known.made
    return Searched(plans, one.made if shared else made, time.process_time() - begin)


def main() -> None:
    saved, same = [], True
    for model, spec in CASES:
        shape, cluster = shape_of(model), parse_spec(spec)
        alone, shared = (searched(shape, cluster, way) for way in (False, True))
        saved.append(alone.made / shared.made)
        same = same and alone.plans == shared.plans
        print(
            f"  (run) {model} on {spec}: {alone.made} evaluations in {alone.seconds:.2f} s, with"
            f" the hash {shared.made} in {shared.seconds:.2f} s of processor time"
        )
    conclude(
        'Gillard et al., "Unified Functional Hashing", 2023',
        "equivalent candidates occur very frequently and are not evaluated again",
        f"(run) {min(saved):.1f} to {max(saved):.1f} times fewer evaluations of layouts in the"
        f" searches of an explanation; plans {'all the same' if same else 'differ'}",
        f"{len(CASES)} models, {len(FAMILIES)} families each; one search alone meets hardly a"
        " layout twice; the paper evolves programs, and its abstract has no number",
        Figure("evaluations over those with the hash, least", min(saved), None),
        holds={"the same plans": same},
    )


if __name__ == "__main__":
    main()
