"""Hugging Face Accelerate's disk offload: every weight in a file, brought in module by module."""

from __future__ import annotations

import torch
from accelerate import disk_offload
from peers.mapped import decoded, model_of
from support.contest import finish, start


def main() -> None:
    task, path = start()
    model = model_of(task).eval()
    disk_offload(model, task.folder, execution_device=torch.device("cpu"))
    finish(decoded(model, task), path)


if __name__ == "__main__":
    main()
