"""Claim: two halves of a prompt in turns, the sums of one beside the other, over slow links.

Xiao and Su, "ISO: Overlap of Computation and Communication within Seqenence For LLM Inference",
2024. Prompts by the steps of `outsize generate` over emulated links of three rates, where the
product itself says at each rate whether halves gain; beside them sums one after the other, and
products in chunks (`--overlap 4`). The paper's own GPUs are in claims/iso.py.
"""

from __future__ import annotations

from slow_links import RATES, WHOLE, decoder, gains, mean, measured
from verdict import Figure, conclude

CLAIMED = 0.35


def main() -> None:
    model = decoder()
    found = measured(
        {
            "one after the other": (model, 0),
            "products in chunks": (model, 4),
            "as the product chooses": (model, None),
        }
    )
    prompts, _ = gains(found, "one after the other", "as the product chooses")
    spared = [1 - 1 / gain for gain in prompts]
    conclude(
        'Xiao and Su, "ISO", 2024',
        "prompts take about 35% less time on 4090 GPUs",
        f"{', '.join(f'{s:.1%}' for s in spared)} less at {', '.join(RATES)}",
        WHOLE,
        Figure(
            "less time of a prompt, mean of the rates",
            1 - 1 / mean(prompts),
            CLAIMED,
            "%",
            nothing=0.0,
            how="emulated links",
            timed=True,
            other=f"links of {', '.join(RATES)}",
        ),
    )


if __name__ == "__main__":
    main()
