"""Reports that a person looks at: the timeline page, and the figures it shows."""

from outsize.report.timeline import timeline, write_timeline
from outsize.report.totals import KindTotal, busy, totals
from outsize.report.units import binary_bytes, seconds
