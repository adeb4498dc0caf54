"""Claim: a ladder of branches hides the sums of tensor parallelism, over slow links.

Zhang et al., "Ladder-Residual", 2025. Prompts and tokens by the steps of `outsize generate` over
emulated links of three rates, plain and as a ladder; beside them products in chunks
(`--overlap 4`). The paper's own GPUs are in claims/ladder.py.
"""

from __future__ import annotations

from rewire import to_ladder
from slow_links import RATES, WHOLE, decoder, gains, mean, measured
from verdict import Figure, conclude

CLAIMED = 1.3


def main() -> None:
    model = decoder()
    ways = {
        "plain": (model, 0),
        "plain, --overlap 4": (model, 4),
        "ladder, --overlap 1": (to_ladder(model, 0), 1),
    }
    prompts, tokens = gains(measured(ways), "plain", "ladder, --overlap 1")
    conclude(
        'Zhang et al., "Ladder-Residual", 2025',
        "30% quicker at 70B over 8 GPUs",
        f"prompts {', '.join(f'{g:.2f}' for g in prompts)}x, tokens"
        f" {', '.join(f'{g:.2f}' for g in tokens)}x at {', '.join(RATES)}",
        WHOLE,
        *(
            Figure(
                f"speed of {what}, mean of the rates",
                mean(found),
                CLAIMED,
                how="emulated links",
                timed=True,
                other=f"links of {', '.join(RATES)}",
            )
            for what, found in (("prompts", prompts), ("a token", tokens))
        ),
    )


if __name__ == "__main__":
    main()
