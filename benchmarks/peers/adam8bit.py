"""The time of an 8-bit AdamW update in other packages: prints JSON by name, seconds of processor
time an update, or why there is none.

    python benchmarks/peers/adam8bit.py ELEMENTS UPDATES

Run by an environment that has them: pip install torch bitsandbytes torchao.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from statistics import median

import torch

MAKERS = {
    "bitsandbytes": ("bitsandbytes.optim", "AdamW8bit"),
    "torchao": ("torchao.optim", "AdamW8bit"),
}


def seconds(module: str, name: str, elements: int, updates: int) -> float:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(elements // 1024, 1024))
    make = getattr(importlib.import_module(module), name)
    optimizer = make([weight], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    weight.grad = torch.randn_like(weight)
    took = []
    for step in range(updates + 3):  # the first ones compile
        begin = time.process_time()
        optimizer.step()
        if step >= 3:
            took.append(time.process_time() - begin)
    return median(took)


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, float | str] = {}
    for name, where in MAKERS.items():
        try:
            found[name] = seconds(*where, int(sys.argv[1]), int(sys.argv[2]))
        except Exception as error:  # whatever a peer does: the others are timed all the same
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
