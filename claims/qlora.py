"""Claim: a model of Qwen2-1.5B's shape is adapted in a small memory (QLoRA under 4 GB).

Aryan, "Resource-Aware Arabic LLM Creation: Model Adaptation, Integration, and
Multi-Domain Testing", 2024: Qwen2-1.5B by LoRA beside weights in 4 bits on a GPU with 4 GB. Here
under 2.5 GiB, a control group that counts all: interpreter, libraries, page cache. The shape has
random weights, which the bytes and times of a step do not depend on.

    outsize convert DIR --weights nf4       under the cap too: one tensor at a time
    outsize train, lora rank 16             packed chats of 512 tokens, base read in its files

The peak of tensors and the time of a step are those that the run foretold before its first step,
beside those that it measured; the time is told and not judged, since a busy machine moves it.

    python claims/qlora.py [--shape 7b --cap 4GiB] [--steps 3] [--folder /tmp]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor
from verdict import Figure, conclude

from outsize.checkpoint.contents import WEIGHTS, merged, write_groups
from outsize.checkpoint.writing import write_json
from outsize.memory import format_bytes, parse_bytes
from outsize.models.build import build
from outsize.models.families import parse
from outsize.models.names import layout

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from support.cgroup import Finished, run_capped

SHAPES = {
    "1.5b": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "7b": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
COMMON = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "torch_dtype": "bfloat16",
}  # fmt: skip
PAPER = 4e9  # bytes of the GPU
RANK, TOKENS, SHARD = 16, 512, 1 << 30
BESIDE = 0.6  # GiB of the cap for the interpreter, libraries, threads, and files that are written
PEAK = 0.95  # of the foretold one at least
LIMIT = 3600.0  # seconds of a command
WORDS = ["a", "model", "is", "read", "in", "files", "while", "layers", "compute", "no", "copies"]


def write(shape: str, folder: Path) -> int:
    """A model's directory in bfloat16, one shard after another; gives its parameters."""
    model = build(parse({**COMMON, **SHAPES[shape]}), dtype=torch.bfloat16)
    values = dict(model.named_parameters())
    random_ = torch.randn(1 << 22, generator=torch.Generator().manual_seed(1)) * 0.02

    def read(name: str) -> Tensor:
        like = values[name]
        if like.dim() == 1:
            return torch.ones(like.shape) if "norm" in name else torch.zeros(like.shape)
        times = -(-like.numel() // len(random_))
        return random_.bfloat16().repeat(times)[: like.numel()].view(like.shape)

    folder.mkdir()
    tensors = merged(layout(model.config), values.__getitem__, lambda name: read(name).bfloat16())
    write_groups(folder, ((WEIGHTS, *one) for one in tensors), SHARD)
    write_json(folder / "config.json", {**COMMON, **SHAPES[shape]})
    return sum(p.numel() for p in values.values())


def chats(path: Path) -> None:
    """Some conversations, of which several are packed in a row."""
    draw = random.Random(1)

    def said() -> str:
        return " ".join(draw.choices(WORDS, k=8))

    roles = ("user", "assistant")
    lines = (
        json.dumps({"messages": [{"role": role, "content": said()} for role in roles]})
        for _ in range(64)
    )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def capped(words: list[str], cap: int) -> Finished:
    """A command of the product under a cap; SystemExit where it fails."""
    place = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    ended = run_capped([sys.executable, "-m", "outsize", *words], cap, LIMIT, place)
    if not ended.good:
        raise SystemExit(f"outsize {words[0]} {ended}; {format_bytes(ended.peak)} at most")
    return ended


def trained(base: Path, folder: Path, cap: int, steps: int) -> tuple[Finished, dict[str, float]]:
    """A run under the cap, and what it foretold and measured."""
    chats(folder / "chats.jsonl")
    (folder / "spill").mkdir()
    budget = cap - int(BESIDE * 2**30)
    values = {
        "model": base, "data": folder / "chats.jsonl", "data.chat.template": "chatml",
        "data.validation": 0, "adapt.lora.rank": RANK, "train.sequence": TOKENS,
        "train.batch_tokens": TOKENS, "train.steps": steps, "train.evaluate_every": 0,
        "sample.tokens": 0, "memory": f"{budget >> 20}MiB", "disk": folder / "spill",
        "output": folder / "run",
    }  # fmt: skip
    sets = (word for key, value in values.items() for word in ("--set", f"{key}={value}"))
    ended = capped(["train", *sets], cap)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    last = next(one for one in found if "predicted_peak_bytes" in one)
    read = [one["files_bytes_read"] for one in found if "files_bytes_read" in one]
    return ended, {**last, "read": read[-1] if read else 0}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1.5b")
    parser.add_argument("--cap", type=parse_bytes, default=5 << 29)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="outsize-qlora-", dir=options.folder) as scratch:
        folder = Path(scratch)
        count = write(options.shape, folder / "plain")
        begin = time.perf_counter()
        words = [str(folder / "plain"), "--weights", "nf4", "--into", str(folder / "base")]
        made = capped(["convert", *words], options.cap)
        converting = time.perf_counter() - begin
        shutil.rmtree(folder / "plain")
        size = sum(path.stat().st_size for path in (folder / "base").iterdir())
        ended, found = trained(folder / "base", folder, options.cap, options.steps)
    foretold, peak = found["predicted_peak_bytes"], found["measured_peak_bytes"]
    expected, step = found["predicted_step_seconds"], found["measured_step_seconds"]
    conclude(
        'Aryan, "Resource-Aware Arabic LLM Creation", 2024',
        "Qwen2-1.5B adapted by LoRA beside weights in 4 bits on a GPU with 4 GB",
        f"{count / 1e9:.2f}G parameters, {format_bytes(size)} of nf4 and bfloat16 on the disk:"
        f" {format_bytes(ended.peak)} at most while it trains, {format_bytes(made.peak)} while it"
        f" is converted ({converting:.0f} s), everything counted; tensors"
        f" {format_bytes(round(peak))}, foretold {format_bytes(round(foretold))}; a step"
        f" {step:.1f} s, foretold {expected:.1f}; {format_bytes(round(found['read']))} of"
        " files read a step",
        f"shape {options.shape}, random weights, cap {format_bytes(options.cap)} by cgroup, lora"
        f" rank {RANK} on all linears, {TOKENS} tokens of packed chats, {options.steps} steps,"
        f" {os.cpu_count()} cores",
        Figure(
            "bytes at most, everything counted", ended.peak / 1e9, PAPER / 1e9, "GB",
            nothing=count * 2 / 1e9, less=True,
        ),
        holds={
            "under the cap": max(ended.peak, made.peak) <= options.cap,
            "the peak is foretold within 5%, and never passed": PEAK <= peak / foretold <= 1.0,
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
