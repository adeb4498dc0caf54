"""Hardware: devices, memory tiers and links with their rates; a catalogue; a probe.

`outsize.hardware.probe` imports PyTorch and is imported by its users themselves.
"""

from outsize.hardware.catalogue import catalogue, names
from outsize.hardware.form import dumps, loads, read
from outsize.hardware.hardware import (
    Attention,
    Device,
    Hardware,
    Link,
    Matmul,
    Measured,
    Rate,
    Tier,
)
