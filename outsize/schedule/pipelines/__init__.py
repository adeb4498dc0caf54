"""Pipeline schedules: each a function of devices and microbatches that gives a Pipeline."""

from outsize.schedule.pipelines.bitpipe import bitpipe
from outsize.schedule.pipelines.breadth_first import breadth_first
from outsize.schedule.pipelines.chimera import chimera
from outsize.schedule.pipelines.controllable import v_half, v_min
from outsize.schedule.pipelines.costs import EQUAL, Costs
from outsize.schedule.pipelines.dualpipe import dualpipe, dualpipe_v
from outsize.schedule.pipelines.gpipe import gpipe
from outsize.schedule.pipelines.hanayo import hanayo
from outsize.schedule.pipelines.interleaved import interleaved
from outsize.schedule.pipelines.one_f_one_b import one_f_one_b
from outsize.schedule.pipelines.pipeline import Pipeline, pipeline
from outsize.schedule.pipelines.registry import NAMES, Shape, make, named
from outsize.schedule.pipelines.skip_pipe import skip_pipe
from outsize.schedule.pipelines.uniform import uniform
from outsize.schedule.pipelines.zb_v import zb_v
from outsize.schedule.pipelines.zero_bubble import zb_2p, zb_h1, zb_h2, zero_bubble

__all__ = [
    "EQUAL",
    "NAMES",
    "Costs",
    "Pipeline",
    "Shape",
    "bitpipe",
    "breadth_first",
    "chimera",
    "dualpipe",
    "dualpipe_v",
    "gpipe",
    "hanayo",
    "interleaved",
    "make",
    "named",
    "one_f_one_b",
    "pipeline",
    "skip_pipe",
    "uniform",
    "v_half",
    "v_min",
    "zb_2p",
    "zb_h1",
    "zb_h2",
    "zb_v",
    "zero_bubble",
]
