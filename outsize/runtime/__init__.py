"""The runtime: plays a Schedule on real tensors."""

from outsize.runtime.adopted import AdoptedFlow
from outsize.runtime.job import Job, Report
from outsize.runtime.native import NativeFlow

__all__ = ["AdoptedFlow", "Job", "NativeFlow", "Report"]
