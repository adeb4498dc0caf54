"""Workers that meet as torchrun's do, in a module that other processes can import by its name."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import torch

from outsize.collectives import Mesh, from_environment


def variables(port: int, **more: str) -> dict[str, str]:
    return {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            **more}  # fmt: skip


def meet_twice(rank: int, port: int, pipe: Connection) -> None:
    served = {"RANK": str(rank), "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    sums = []
    for turn in (1, 2):
        time.sleep(0.3 * (1 - rank))  # the other one is first to look at what is there
        world = from_environment(Mesh(data=2), variables(port, **served))
        total = world.group((0, 1)).all_reduce(torch.tensor([float(turn + rank)]))
        sums.append(total.item())
        world.close()
    pipe.send(sums)
