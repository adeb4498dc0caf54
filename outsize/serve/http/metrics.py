"""What the engine counts, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from outsize.kernels.native import reads
from outsize.serve.engine import Engine

_COUNTED = {
    "steps": "Steps of the engine.",
    "prompt": "Tokens of prompts that were fed.",
    "kept": "Tokens of prompts that were found in kept pages.",
    "drawn": "Tokens that were drawn.",
    "drafted": "Tokens of drafts.",
    "accepted": "Tokens of drafts that came true.",
    "interrupted": "Requests whose pages were taken by an older one.",
    "evicted": "Pages of the cache that went below, to host memory or a disk.",
    "fetched": "Pages that came back from below.",
    "lost": "Pages that could not come back, and were computed again.",
    "refused": "Requests that were refused: the queue was full, or they would have been late.",
    "busy": "Seconds in steps.",
    "foretold": "Seconds in steps, as foretold.",
}


class _Engine:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine, (begun, waiting) = self._engine, self._engine.busy
        pages = engine.line.pages
        used = engine.steps.bytes * pages.used // pages.count
        for name, meaning in _COUNTED.items():
            yield CounterMetricFamily(
                f"outsize_{name}", meaning, value=float(getattr(engine.line.counts, name))
            )
        native = reads(engine.model.prologue.tokens.weight)
        failed = engine.below is not None and bool(engine.below.fault)
        gauges = {
            "requests_running": ("Requests that have begun.", begun),
            "requests_waiting": ("Requests in the queue.", waiting),
            "pages": ("Pages of the cache.", engine.line.pages.count),
            "pages_left": ("Pages that no request has.", engine.line.pages.left),
            "cache_bytes": ("Bytes of pages that have been used by now.", used),
            "pages_below": ("Pages that lie below the cache.", engine.line.pages.below),
            "below_failed": ("Whether what lay below cannot be had any more.", failed),
            "native": ("Whether steps are this machine's own kernels'; else PyTorch's.", native),
        }
        for name, (meaning, value) in gauges.items():
            yield GaugeMetricFamily(f"outsize_{name}", meaning, value=float(value))


def metrics_of(engine: Engine) -> Callable[[], bytes]:
    """What writes them out."""
    registry = CollectorRegistry()
    registry.register(_Engine(engine))
    return lambda: generate_latest(registry)
