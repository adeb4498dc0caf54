"""Layouts that do the same are evaluated once, however they are written and whoever asks.

The key of a layout is its functional hash (Gillard et al., "Unified Functional Hashing in Automatic
Machine Learning", 2023): of all its fields what changes no term and no byte is put into one form.
An explanation searches again for every family of layouts, and most of what it meets has been met.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from outsize.foresight import memory as bytes_of
from outsize.foresight.layout import Layout
from outsize.foresight.memory import DRIVEN, Memory, Reserves
from outsize.foresight.shape import Shape
from outsize.foresight.step import Terms, layers_of
from outsize.foresight.step import terms as counted
from outsize.hardware.cluster import Cluster


@dataclass
class Known:
    """Terms and bytes of one model's layouts on parts of one cluster, by what they do. asked:
    evaluations that were wanted; made: that were carried out. kept: by its processes beside
    tensors."""

    shape: Shape
    kept: Reserves = DRIVEN
    terms_of: dict[Layout, Terms] = field(default_factory=dict)
    memory_of: dict[Layout, Memory] = field(default_factory=dict)
    asked: int = 0
    made: int = 0

    def terms(self, layout: Layout, cluster: Cluster) -> Terms:
        """cluster: the part of it that the layout takes."""
        key = functional(self.shape, layout)
        self.asked += 1
        if key not in self.terms_of:
            self.made += 1
            self.terms_of[key] = counted(self.shape, layout, cluster)
        return self.terms_of[key]

    def memory(self, layout: Layout) -> Memory:
        key = functional(self.shape, layout)
        self.asked += 1
        if key not in self.memory_of:
            self.made += 1
            self.memory_of[key] = bytes_of.memory(self.shape, layout, self.kept)
        return self.memory_of[key]


def functional(shape: Shape, layout: Layout) -> Layout:
    """The one form of all layouts that do what this one does."""
    lay = replace(layout, assumed=())
    if lay.tensor == 1 and lay.sequence_parallel:
        lay = replace(lay, sequence_parallel=False)
    if lay.shards == 1 and lay.cut_gradients:
        lay = replace(lay, cut_gradients=False)
    if lay.shards > 1 and lay.states > 1 and lay.states <= lay.shards:
        lay = replace(lay, states=1)
    if lay.recompute == "full" and lay.whole:
        lay = replace(lay, whole=0)
    if lay.recompute == "none" and lay.whole >= layers_of(shape.layers, lay.pipeline)[0]:
        lay = replace(lay, recompute="full", whole=0)
    return lay
