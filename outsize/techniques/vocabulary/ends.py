"""What the passes of a cut vocabulary need and give.

Every worker has a part of the input and of the output layer. For each microbatch it does an EMBED
before the first stage's forward and an EMBED_BACKWARD behind its backward, an OUTPUT_S behind the
last stage's forward and an OUTPUT_T once the sums of all workers' S are known. An EXCHANGE puts
together what all workers have:

    activations   of EMBEDs: the embedding, for the first stage's forward
    sums          of OUTPUT_S: largest logits and sums of exponentials, for OUTPUT_T
    gradients     of OUTPUT_T: the gradient of the last stage's output, for its backward (variant 1)

In variant 2 an OUTPUT_S has already made its part of that gradient, up to a factor of each token
that the sums give, so that `sums` brings it along and the backward waits for one barrier, not two.
"""

from __future__ import annotations

from functools import cache

from outsize.errors import OutsizeError
from outsize.schedule.action import Kind, State
from outsize.schedule.ends import ENDS, Ends

NAME = "vocabulary"
EMBED = Kind.add("EMBED", "own", end="first")
EMBED_BACKWARD = Kind.add("EMBED_BACKWARD", "own", adds=True, end="first")
OUTPUT_S = Kind.add("OUTPUT_S", "own", end="last")  # logits, their largest and sum
OUTPUT_T = Kind.add("OUTPUT_T", "own", adds=True, end="last")  # once all sums are known: gradients


@cache
def vocabulary(variant: int) -> Ends:
    """The ends of a pipeline. variant: 1, two barriers; 2, one."""
    if variant not in (1, 2):
        raise OutsizeError(
            f"vocabulary: variant {variant}; expected 1 (two barriers) or 2 (one barrier)"
        )
    makes = {EMBED: State.ACTIVATIONS, OUTPUT_S: State.SUMS}
    early = variant == 2  # the gradient of the input is made in S
    return Ends(
        NAME,
        variant,
        (EMBED, OUTPUT_S, OUTPUT_T, EMBED_BACKWARD),
        makes if early else makes | {OUTPUT_T: State.GRADIENTS},
        needs={OUTPUT_T: State.SUMS, Kind.SAMPLE: State.SUMS},
        enters=State.ACTIVATIONS,
        back=State.SUMS if early else State.GRADIENTS,
        given={OUTPUT_S: State.ACTIVATIONS, EMBED_BACKWARD: State.GRADIENTS},
        priced={
            EMBED: ("embed",),
            EMBED_BACKWARD: ("embed_backward",),
            OUTPUT_S: ("forward", "of_input") if early else ("forward",),
            OUTPUT_T: ("of_weight",) if early else ("of_input", "of_weight"),
        },
        holds=(OUTPUT_S, OUTPUT_T),
    )


ENDS.add(NAME, vocabulary)
