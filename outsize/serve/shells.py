"""A decoder of whose parameters a worker has a part: others have their shapes and no memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from outsize.checkpoint.hub import Described, check_tied_head
from outsize.models.build import build, materialise, segments
from outsize.models.cuts import Cut
from outsize.models.decoder import Decoder

TOKENS = "prologue.tokens.weight"


def shells(found: Described, dtypes: Mapping[str, torch.dtype], device: torch.device) -> Decoder:
    """A decoder whose parameters have one element of memory each, not a number: who computes with
    what is not here sees it."""
    model = build(found.model.config)
    model.origin, model.words = found.model.origin, found.model.words

    def shell(name: str, x: Tensor) -> Tensor:
        dtype = dtypes[name]
        none = float("nan") if dtype.is_floating_point else 0  # codes
        return torch.full((), none, dtype=dtype, device=device).expand(x.shape)

    for segment, _ in segments(model):
        materialise(model, segment, shell)
    return model.requires_grad_(False)


def held(model: Decoder, here: Sequence[bool]) -> set[str]:
    """Names of the parameters that the segments of this worker compute with."""
    table = segments(model)
    names = {name for mine, (_, ns) in zip(here, table, strict=True) if mine for name in ns}
    return names | ({TOKENS} if here[-1] and model.config.tied else set())


def fill(
    model: Decoder,
    found: Described,
    names: set[str],
    cuts: Mapping[str, Cut],
    dtype: torch.dtype | None,
) -> None:
    """Read what this worker has: of each parameter its part alone stays."""
    wholes = dict(found.model.named_parameters())
    device = next(model.parameters()).device
    read = found.fill(dtype, device)

    def value(name: str, part: Tensor) -> Tensor:
        if name not in names:
            return part.detach()
        whole = read(name, wholes[name])
        if name == TOKENS:
            check_tied_head(found.shards, found.model.config, lambda: whole)
        cut = cuts[name]
        if cut.dim is None:
            return whole
        return cut.of(whole).clone(memory_format=torch.contiguous_format)

    for segment, inside in segments(model):
        if not names.isdisjoint(inside):
            materialise(model, segment, value)
