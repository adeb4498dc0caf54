"""Where cases run: the device, the folder, and how both are asked."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from outsize import accelerator
from outsize.hardware import Hardware, form
from outsize.hardware.probe import probe
from outsize.texts import write_text

CHECKOUT = Path(__file__).resolve().parents[3]
STRICT_BYTES = 1 << 30  # of the device of the tests
HARDWARE = "hardware.yaml"


@dataclass(frozen=True)
class Place:
    """name: "cpu", "strict" (the device of the tests), or an accelerator as PyTorch calls it.
    folder: for what cases write."""

    name: str
    folder: str

    def begin(self) -> None:
        """Before anything else of a process."""
        torch.manual_seed(0)
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        if self.name == "strict":
            sys.path.append(str(CHECKOUT / "tests" / "accelerator"))
            import strict

            strict.load()
            strict.start("eager", device_bytes=STRICT_BYTES)

    @property
    def device(self) -> torch.device:
        return accelerator.find(self.name)

    @property
    def apart(self) -> bool:
        """Whether the device has memory of its own."""
        return self.name != "cpu"

    def hardware(self) -> Hardware:
        """As it was probed, once for all cases of a folder."""
        path = Path(self.folder, HARDWARE)
        if not path.is_file():
            write_text(form.dumps(probe(self.name, cache=self.folder)), path)
        return form.read(path)

    def settle(self) -> None:
        """Wait for all that the device was given."""
        if self.apart:
            torch.accelerator.synchronize()

    def forget_peak(self) -> None:
        if self.apart:
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats()

    def peak(self) -> int | None:
        """Most bytes of tensors on the device since `forget_peak`, by its allocator; None on a CPU,
        which has none to ask."""
        return torch.accelerator.max_memory_allocated() if self.apart else None

    def times(self, step: Callable[[int], float], count: int) -> tuple[list[float], list[float]]:
        """Seconds of `count` steps, each with nothing left on the device, and what they gave."""
        seconds, found = list[float](), list[float]()
        for number in range(count):
            self.settle()
            begin = time.perf_counter()
            found.append(step(number))
            self.settle()
            seconds.append(time.perf_counter() - begin)
        return seconds, found


def machine(place: Place) -> dict[str, object]:
    """What figures depend on, for the conditions: names, versions, bytes."""
    from outsize.hardware import host

    device = place.device
    found: dict[str, object] = {
        "kind": place.name, "device": host.processor(), "devices": 1, "torch": torch.__version__,
        "host bytes": host.memory().available, "cores": host.cores(),
        "disk bytes": host.disk_free(place.folder),
        "device bytes": host.memory().available,
    }  # fmt: skip
    if place.apart:
        named = getattr(torch.get_device_module(device), "get_device_name", None)
        found["device"] = str(named(device)) if named else device.type
        found["devices"] = torch.accelerator.device_count()
        found["device bytes"] = torch.accelerator.get_memory_info(device)[0]
    return found
