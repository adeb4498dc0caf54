"""Claim: pruned weights as bitmap and non-zeros load 1.7x to 1.8x faster than dense from disk.

Joo et al., "Endor: Hardware-Friendly Sparse Format for Offloaded LLM Inference", 2024: OPT-66B
1.70x, Llama2-70B 1.78x over dense offload at half density, 2.25x and 2.37x with direct transfer
from SSD to GPU. Here the matrices of a layer are read from a tier on disk (direct I/O, checksums)
into the room in which they would be used, several in flight; the sparse ones are unpacked there
while the next are read. What comes out must equal the pruned weights bit for bit.
"""

from __future__ import annotations

import itertools
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor
from verdict import Figure, conclude

from outsize.memory import sparse as bitmap
from outsize.memory.disk import DiskStore
from outsize.memory.store import Place, pool

ROWS, COLUMNS, MATRICES, DISTINCT = 4096, 11008, 24, 4  # feed-forward matrices of a 7B Llama
DENSITY, IN_FLIGHT, ROUNDS = 0.5, 4, 5
ELEMENT = 16  # bits of a weight
CLAIMED = 1.70
# The disk here is twice as fast as the SSDs of such machines, and unpacking takes a core that
# others want. So it is measured as it is, and slowed by waiting to PACE B/s, the paper's case.
PACE = 2.5e9
# Predicted only: a path through the host moves every byte twice, one after another; a direct one
# moves it once. What that is worth is taken from the paper's own two figures, not found here.
DIRECT, DIRECT_CLAIMED = 2.25 / 1.70, 2.25


def prune(weight: Tensor, density: float) -> Tensor:
    """The largest of each row by magnitude, others zero: what is timed does not depend on which."""
    kept = round(weight.shape[1] * density)
    threshold = weight.abs().float().kthvalue(weight.shape[1] - kept, dim=1, keepdim=True).values
    return torch.where(weight.abs() > threshold, weight, 0)


class Layers:
    """Matrices on a tier, as images, and the rooms that they are read into."""

    def __init__(
        self, store: DiskStore, encode: Callable[[Tensor], Tensor], weights: Sequence[Tensor]
    ) -> None:
        self.store = store
        self.places: list[Place] = []
        for weight in weights:
            image = encode(weight.flatten())
            self.places.append(store.reserve(image.nbytes))
            store.write(self.places[-1], image)
        size = max(place.bytes for place in self.places)
        self.images = [pool(size) for _ in range(IN_FLIGHT)]

    @property
    def bytes(self) -> int:
        return sum(place.bytes for place in self.places)

    def load(self, use: Callable[[int, Tensor], None], pace: float = math.inf) -> float:
        """Seconds until every matrix has been read, at most `pace` B/s, and handed to `use`."""
        start = time.perf_counter()
        ends = itertools.accumulate(place.bytes / pace for place in self.places)
        due = [start + end for end in ends]

        def read(index: int) -> Tensor:
            place = self.places[index]
            image = self.images[index % IN_FLIGHT][: place.bytes]
            self.store.read(place, image)
            time.sleep(max(0.0, due[index] - time.perf_counter()))
            return image

        with ThreadPoolExecutor(IN_FLIGHT - 1) as readers:
            ahead = [readers.submit(read, i) for i in range(IN_FLIGHT - 1)]
            for index in range(len(self.places)):
                image = ahead.pop(0).result()
                use(index, image)
                if (following := index + IN_FLIGHT - 1) < len(self.places):
                    ahead.append(readers.submit(read, following))
        return time.perf_counter() - start


def main(folder: Path) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the other core reads
    made = [
        prune(torch.randn(ROWS, COLUMNS, dtype=torch.bfloat16), DENSITY) for _ in range(DISTINCT)
    ]
    weights = made * (MATRICES // DISTINCT)
    assert bitmap.packed_bytes(weights[0].flatten()) < weights[0].nbytes
    store = DiskStore("disk", [folder], 4 * sum(w.nbytes for w in weights))
    dense = Layers(store, lambda flat: flat.view(torch.uint8), weights)
    sparse = Layers(store, bitmap.pack, weights)
    room = pool(weights[0].nbytes).view(torch.bfloat16)

    def check(index: int, image: Tensor) -> None:
        bitmap.unpack(image, room)
        assert torch.equal(room.view(torch.int16), weights[index].flatten().view(torch.int16))

    sparse.load(check)

    def nothing(index: int, image: Tensor) -> None:
        """Dense matrices are read where they are used."""

    def unpacked(index: int, image: Tensor) -> None:
        bitmap.unpack(image, room)

    runs = [
        (dense, nothing, math.inf),
        (sparse, unpacked, math.inf),
        (sparse, nothing, math.inf),
        (dense, nothing, PACE),
        (sparse, unpacked, PACE),
    ]
    times = [[layers.load(use, pace) for layers, use, pace in runs] for _ in range(ROUNDS)]
    before, after, read, paced_before, paced_after = (min(t) for t in zip(*times, strict=True))
    unpack = min(_timed(lambda: bitmap.unpack(sparse.images[0], room)) for _ in range(5))
    store.close()
    ratio, paced = before / after, paced_before / paced_after
    predicted = dense.bytes / sparse.bytes
    by_bytes = ELEMENT / (1 + DENSITY * ELEMENT)
    conclude(
        'Joo et al., "Endor", 2024',
        f"{CLAIMED}x (OPT-66B), 1.78x (Llama2-70B); {DIRECT_CLAIMED}x with direct SSD to GPU",
        f"{paced:.2f}x at {PACE / 1e9} GB/s; as the disk is {ratio:.2f}x: {before:.3f} s "
        f"at {dense.bytes / before / 1e9:.2f} GB/s to {after:.3f} s; "
        f"reading alone {before / read:.2f}x; bytes {predicted:.3f}x fewer (formula "
        f"{by_bytes:.3f}); unpacking {room.nbytes / unpack / 1e9:.1f} GB/s on one core; direct to "
        f"a GPU not measurable here, predicted by bytes {by_bytes * DIRECT:.2f}x",
        f"{MATRICES} matrices of {ROWS} x {COLUMNS} bfloat16, density {DENSITY}, {IN_FLIGHT} in "
        f"flight, O_DIRECT with checksums, least of {ROUNDS} interleaved, on a machine "
        "shared with others; all read bit for bit",
        Figure(
            "loading over dense, at the pace of an NVMe disk",
            paced,
            CLAIMED,
            how="emulated links",
            timed=True,
            other="matrices of a 7B Llama alone",
        ),
        Figure(
            "loading over dense, Llama2-70B",
            paced,
            1.78,
            how="emulated links",
            timed=True,
            other="matrices of a 7B Llama alone",
        ),
        Figure("loading over dense, as the disk is", ratio, CLAIMED, timed=True, bound=by_bytes),
        Figure("direct from the disk to a GPU", None, DIRECT_CLAIMED),
    )


def _timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as made:
        main(Path(made))
