"""The runtime: plays a Schedule on real tensors."""

from typing import TYPE_CHECKING

from outsize.lazy import importing

if TYPE_CHECKING:
    from outsize.runtime.adopted.flow import AdoptedFlow
    from outsize.runtime.job import Job, Report
    from outsize.runtime.native import NativeFlow

__getattr__ = importing(__name__)
