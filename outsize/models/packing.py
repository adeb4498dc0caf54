"""Weights of a model that one engine alone serves, packed in their place: kernels/eights.py."""

from __future__ import annotations

from dataclasses import replace

from outsize.models.coding import CODES
from outsize.models.decoder import Decoder
from outsize.models.linear import held


def pack(model: Decoder) -> None:
    """For a model that nobody else has: its codes lie otherwise than files have them from then on,
    where this processor reads them better so. What they stand for stays, and a model whose weights
    are not in memory as a whole."""
    from outsize.kernels import eights

    if model.away:
        return
    packed = set[int]()  # a weight may be of several blocks
    for _, one in held(model):
        laid = one.laid() if one.coded is not None and one.coded.eights else None
        if laid is None or one.coded is None:
            continue
        where = laid.blocks_NB.data_ptr()
        own = where == one.get_parameter(CODES).data_ptr()  # not a copy
        if where in packed or (own and eights.pack(laid, one.sizes[0])):
            packed.add(where)
            one.coded = replace(one.coded, packed=True)
