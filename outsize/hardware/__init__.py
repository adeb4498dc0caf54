"""Hardware: devices, memory tiers and links with their rates; clusters; a catalogue; a probe.

`outsize.hardware.probe` imports PyTorch and is imported by its users themselves.
"""

from typing import TYPE_CHECKING

from outsize.lazy import importing

if TYPE_CHECKING:
    from outsize.hardware.cluster import Cluster, Group, Level
    from outsize.hardware.form import dumps, loads, read
    from outsize.hardware.hardware import (
        Attention,
        Device,
        Hardware,
        Link,
        Matmul,
        Measured,
        Rate,
        Slowed,
        Talked,
        Tier,
    )
    from outsize.hardware.named import catalogue, names
    from outsize.hardware.spec import parse_spec, read_cluster

__getattr__ = importing(__name__)
