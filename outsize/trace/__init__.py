"""Trace: when actions ran and what memory held, its own JSON form, and its Perfetto export."""

from outsize.trace.perfetto import trace_events, write_perfetto
from outsize.trace.text import dumps, loads, read, write
from outsize.trace.trace import Event, Trace

__all__ = ["Event", "Trace", "dumps", "loads", "read", "trace_events", "write", "write_perfetto"]
