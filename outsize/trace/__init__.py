"""Trace: when actions ran and what memory held, its own JSON form, its Perfetto export, several
workers' as one, and predicted against measured."""

from typing import TYPE_CHECKING

from outsize.lazy import importing

if TYPE_CHECKING:
    from outsize.trace.match import (
        Difference,
        Sum,
        alone,
        differences,
        pace_of,
        paced,
        pairs,
        sums,
        waiting,
    )
    from outsize.trace.merge import laid_out, merged
    from outsize.trace.perfetto import trace_events, write_perfetto
    from outsize.trace.text import dumps, loads, read, write
    from outsize.trace.trace import Event, Trace

__getattr__ = importing(__name__)
