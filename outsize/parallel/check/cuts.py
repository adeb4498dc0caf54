"""The cuts of parameters that a job has, against the layouts of a declaration and the norm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from outsize.models.cuts import Cut
from outsize.parallel.check.checker import Finding
from outsize.parallel.layouts import REPLICATED, Layout, Sharded
from outsize.parallel.shards import even


def layout_of(cut: Cut) -> Layout:
    """How a parameter that is cut like this lies."""
    return REPLICATED if cut.dim is None else Sharded(cut.dim, copies=cut.shared)


def counted(cuts: Mapping[str, Cut], axis: str, size: int) -> Iterator[Finding]:
    """Parameters whose elements the norm would not count once each; of a native decoder, whose
    parts are of one span."""
    for name, cut in cuts.items():
        module, _, leaf = name.rpartition(".")
        if cut.dim is None and cut.shared != size:
            times = size / cut.shared
            what = f"it is whole on {size} workers, and the norm counts it {times:g} times"
            missing = f"shared={size}: only the first of all workers counts it"
            yield Finding(module, leaf, axis, what, missing)
        elif cut.dim is not None and not _one_part(cut, size):
            rows, parts = cut.shape[cut.dim], size // cut.shared
            what = (
                f"rows {_said(cut)} of the {rows} of dim {cut.dim} are no part of"
                f" {parts}, each shared by {cut.shared} of {size} workers: the norm counts some"
                " rows too often or never"
            )
            yield Finding(module, leaf, axis, what, "a cut whose parts make up the whole")


def _one_part(cut: Cut, size: int) -> bool:
    """Whether the rows are one of as many even parts as differ on the axis."""
    assert cut.dim is not None
    parts = max(1, size // cut.shared)
    return len(cut.spans) == 1 and cut.spans[0] in pairwise(even(0, cut.shape[cut.dim], parts))


def _said(cut: Cut) -> str:
    return " and ".join(f"{first} to {last}" for first, last in cut.spans)
