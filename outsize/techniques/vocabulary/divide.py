"""A decoder keeps this worker's rows of its tables.

Every worker of a pipeline has rows of the token embedding and of the head (one table where they are
tied), and plays its part of both for every microbatch (rows.py). Exact: what is summed in another
order differs by rounding alone.
"""

from __future__ import annotations

from outsize.collectives import Collective
from outsize.errors import OutsizeError
from outsize.models.cuts import Cut
from outsize.models.decoder import Decoder
from outsize.parallel.divide import DIVISIONS
from outsize.parallel.sums import spans_of
from outsize.parallel.tensor.decoder import keep
from outsize.parallel.tensor.vocabulary import lookup, vocabulary
from outsize.techniques.vocabulary.ends import NAME


def cut_vocabulary(model: Decoder, line: Collective) -> dict[str, Cut]:
    """Leave of a decoder's tables this worker's rows; gives how they were cut, by name.

    line: the workers of the pipeline; exchanges run on it, beside what other lanes do. Shells and
    meta parameters stay such, values are copied. OutsizeError for fewer tokens than workers, and
    for tables that the tensor axis has cut or that are not trained.
    """
    tokens, head = model.prologue.tokens, model.epilogue.head
    if model.epilogue.vocabulary is not None:
        raise OutsizeError(
            "plan: pipeline.vocabulary cuts the vocabulary over the pipeline, and mesh.tensor has"
            " cut it already; set mesh.tensor to 1, or pipeline.vocabulary to 0"
        )
    if model.config.vocab < line.size:
        raise OutsizeError(
            f"plan: pipeline.vocabulary cuts {model.config.vocab} tokens over {line.size} workers;"
            " expected one token for each at least: set it to 0"
        )
    spans = spans_of(model.config.vocab, line)
    tables = {id(p) for p in (tokens.weight, head.weight, head.bias) if p is not None}
    cuts: dict[str, Cut] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) not in tables:
            continue
        if not parameter.requires_grad:
            raise OutsizeError(
                f"model: {name} is frozen, and pipeline.vocabulary cuts tables that are trained;"
                " set pipeline.vocabulary to 0"
            )
        cuts[name] = Cut(tuple(parameter.shape), 0, (spans[line.rank],), axis="pipeline")
    keep(model, cuts)
    tokens.lookup = lookup(line, model.config.vocab)
    model.epilogue.vocabulary = vocabulary(line, model.config.vocab)
    return cuts


DIVISIONS.add(NAME, cut_vocabulary)
