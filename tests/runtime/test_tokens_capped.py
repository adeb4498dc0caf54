"""Generation by a process whose memory the system caps below the size of the model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import outsize
from outsize.models.build import build, materialise, segments
from outsize.models.families import parse

CAP = 500 << 20  # Python, PyTorch and all
CONFIG = {
    "model_type": "llama", "vocab_size": 4096, "hidden_size": 2048, "intermediate_size": 5632,
    "num_hidden_layers": 7, "num_attention_heads": 16, "num_key_value_heads": 8,
    "max_position_embeddings": 256, "initializer_range": 0.05,
}  # fmt: skip
CODE = """
import os, sys
open(sys.argv[2] + "/cgroup.procs", "w").write(str(os.getpid()))
import torch, outsize
torch.set_num_threads(1)
with outsize.load(sys.argv[1], memory="150MiB") as model:
    print(*outsize.generate(model, [3, 1, 4, 1, 5], 2))
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory cgroup (version 1) with a hard cap."""
    folder = Path(f"/sys/fs/cgroup/memory/outsize-test-{os.getpid()}")
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(CAP))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield folder
    folder.rmdir()


def drawn(name: str, parameter: Tensor) -> Tensor:
    """Quicker by far than what a model begins with."""
    made = torch.empty(parameter.shape, dtype=parameter.dtype)
    if made.ndim < 2:
        return made.fill_(1.0)
    flat = made.flatten()
    some = torch.empty(min(len(flat), 1_000_003)).uniform_(-0.08, 0.08)  # again and again: a prime
    for start in range(0, len(flat), len(some)):
        flat[start : start + len(some)] = some[: len(flat) - start]
    return made


@pytest.mark.slow
def test_a_model_larger_than_all_the_memory_there_is(group: Path, tmp_path: Path) -> None:
    model = build(parse(CONFIG), dtype=torch.bfloat16)
    for segment, _ in segments(model):
        materialise(model, segment, drawn)
    assert sum(p.nbytes for p in model.parameters()) > 1.3 * CAP
    with torch.no_grad():
        expected = outsize.generate(model, [3, 1, 4, 1, 5], 2)
    outsize.save(model, tmp_path / "model")
    run = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path / "model"), str(group)],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    assert [int(word) for word in run.stdout.split()] == expected
    assert int((group / "memory.max_usage_in_bytes").read_text()) <= CAP
