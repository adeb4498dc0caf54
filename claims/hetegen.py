"""Claim: sharing each linear layer between host and device answers up to 317% faster than offload.

Zhao et al., "HeteGen: Heterogeneous Parallel Inference for Large Language Models on
Resource-Constrained Devices", 2024: an A10 beside a CPU, OPT, batch 1. Without a GPU two things
are shown. Measured: two threads of this machine, one core each, are host and device, and a disk of
PACE B/s (made by waiting) is the link; the rates of the parts are measured one by one, the split
follows from them, and the layer must take the time that they foretell and less than either end
alone. Simulated: the formula with the rates of the paper's kind of machine.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from verdict import verdict

from outsize.hardware.catalogue import catalogue
from outsize.memory.disk import DiskStore
from outsize.memory.split import Rates, SplitLinear, host_rows, split
from outsize.memory.store import Place, pool
from outsize.models.linear import Linear

# So many tokens that the host passes about three times the weights a second that the link does, as
# an A10's host does with one token; with one token this disk is a tenth of a core here.
SIZE, TOKENS, ROUNDS = 4096, 24, 40
PACE = 2.5e9
WITHIN, GAIN = 0.2, 1.1  # of the foretold time; over the better of the two ends
# The paper's machine as public data sheets give it: an A10's memory; a link of the same kind as in
# the catalogue's cards with PCIe 4, of which 0.8 is reached (as the catalogue's factor for memory).
A10_BANDWIDTH, REACHED, CLAIMED = 600e9, 0.8, 4.17


class Paced:
    """A store whose reads take at least bytes / PACE seconds."""

    def __init__(self, store: DiskStore) -> None:
        self.store = store

    def reserve(self, nbytes: int) -> Place:
        return self.store.reserve(nbytes)

    def write(self, place: Place, data: Tensor, at: int = 0) -> None:
        self.store.write(place, data, at)

    def read(self, place: Place, out: Tensor, at: int = 0) -> None:
        start = time.perf_counter()
        self.store.read(place, out, at)
        time.sleep(max(0.0, out.nbytes / PACE - (time.perf_counter() - start)))


def least(*calls: Callable[[], object]) -> list[float]:
    """Seconds of the fastest run of each call, taking turns, so that all meet the same machine."""
    spent = [[_timed(call) for call in calls] for _ in range(ROUNDS)]
    return [min(times) for times in zip(*spent, strict=True)]


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def simulated() -> str:
    """The gain over bringing everything to the device, and the host rate that the claim needs."""
    link = catalogue("L40S").links[0].bandwidth.value * REACHED
    gains = []
    for host in (40e9, 80e9, 120e9):
        rates = Rates(host, link, A10_BANDWIDTH * REACHED)
        gain = rates.seconds(1, 0) / rates.seconds(1, split(rates))
        gains.append(f"{gain:.2f}x at {host / 1e9:.0f} GB/s")
    return f"link {link / 1e9:.1f} GB/s: {', '.join(gains)} of the host's memory"


def main(folder: Path) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    weight, x = torch.randn(SIZE, SIZE), torch.randn(TOKENS, SIZE)
    expected = F.linear(x.double(), weight.double())
    disk = DiskStore("disk", [folder], 6 * weight.nbytes)
    store, room = Paced(disk), pool(weight.nbytes)
    with ThreadPoolExecutor(1) as host, torch.no_grad():

        def of(rows: int) -> SplitLinear:
            linear = Linear(SIZE, SIZE)
            linear.weight.data = weight.clone()
            return SplitLinear(linear, rows, store, room, host)

        ends = of(0), of(SIZE)
        away = room.view(torch.float32).view(SIZE, SIZE)
        place = store.reserve(weight.nbytes)
        store.write(place, weight)
        parts = (
            lambda: host.submit(F.linear, x, weight).result(),
            lambda: store.read(place, away),
            lambda: F.linear(x, away),
        )
        rates = Rates(*(weight.nbytes / t for t in least(*parts)))
        rows = host_rows(rates, SIZE, weight[0].nbytes)
        both = of(rows)
        worst = float((both(x).double() - expected).abs().max() / expected.abs().max())
        whole = (lambda: ends[0](x), lambda: ends[1](x), lambda: both(x))
        *spent, device, alone, shared = least(*parts, *whole)
        rates = Rates(*(weight.nbytes / t for t in spent))
    disk.close()
    foretold = rates.seconds(weight.nbytes, rows / SIZE)
    verdict(
        'Zhao et al., "HeteGen", 2024',
        f"up to 317% over other offloading ({CLAIMED}x), A10 and CPU, OPT, batch 1",
        f"{device / shared:.2f}x over bringing all to the device, {alone / shared:.2f}x over the "
        f"host alone ({device * 1e3:.1f}, {alone * 1e3:.1f}, shared {shared * 1e3:.1f} ms; "
        f"foretold {foretold * 1e3:.1f} ms, {shared / foretold - 1:+.0%}); relative difference "
        f"{worst:.0e}. "
        f"Simulated by formula, A10: {simulated()}",
        abs(shared / foretold - 1) <= WITHIN and min(device, alone) / shared >= GAIN,
        f"{SIZE} x {SIZE} float32, {TOKENS} tokens, host and device are threads of one core each, "
        f"link a disk held to {PACE / 1e9} GB/s; rates of host, link, device "
        f"{rates.host / 1e9:.1f}, {rates.link / 1e9:.1f}, {rates.device / 1e9:.1f} GB/s of weight, "
        f"{rows} rows on the host; least of {ROUNDS} taking turns, machine shared with others",
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as made:
        main(Path(made))
