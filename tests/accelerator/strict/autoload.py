"""The device in processes that know nothing of it: what a subprocess is given, so that PyTorch's
entry point of device backends, in the folder `autoload`, starts the device at `import torch`."""

from __future__ import annotations

import os
from pathlib import Path

import strict
from strict.building import cache_folder

_HERE = Path(__file__).resolve().parents[1]


def environment(
    order: str = "random",
    last: int = 0,
    seed: int = 0,
    *,
    devices: int = 1,
    device_bytes: int = 2 * strict.GIB,
) -> dict[str, str]:
    """This process's environment, with the device for whoever imports torch: `strict.start`."""
    before = os.environ.get("PYTHONPATH")
    paths = [str(_HERE / "autoload"), str(_HERE), *([before] if before else [])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
        "STRICT_CACHE": str(cache_folder().parents[1]),
        "STRICT_ORDER": order,
        "STRICT_LAST": str(last),
        "STRICT_SEED": str(seed),
        "STRICT_DEVICES": str(devices),
        "STRICT_BYTES": str(device_bytes),
    }
