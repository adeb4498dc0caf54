"""Claim: a sliding window over layers answers over 80% sooner than Accelerate, in 90% less memory.

Li et al., "TPI-LLM: Serving 70B-scale LLMs Efficiently on Low-resource Mobile Devices", 2024: time
to first token and token latency over 80% below Accelerate, and the peak memory of Llama 2-70B 90%
lower. Here the memory scheduler alone, on one machine: a Llama shape in bfloat16, random weights,
larger than the cap (a cgroup of version 1, all of the process and its page cache counted, where
one can be made), greedy, the same prompt:

    accelerate  the model's layers on "disk" (transformers from_pretrained, its safetensors mapped)
    outsize     outsize.load(path, memory="300MiB")
    resident    outsize.load(path), without a cap: for the tokens and the memory

`python claims/tpi_llm.py` runs each in a process of its own, in turns, the model's files out of the
page cache before; two requests each, least of the rounds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from verdict import Figure, conclude

if TYPE_CHECKING:
    import outsize

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4096,
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 256,
    "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CAP, BUDGET = 1000 << 20, "300MiB"
PROMPT, NEW, REQUESTS, ROUNDS = list(range(3, 67)), 4, 2, 2
LESS_TIME, LESS_MEMORY = 0.8, 0.9  # the paper's
ONE = "one machine and sixteen layers"


Answer = dict[str, list]


def write(folder: Path) -> int:
    """The model's directory; gives its bytes."""
    import outsize
    from outsize.models.build import build
    from outsize.models.families import parse

    model = build(parse(CONFIG), dtype=torch.bfloat16).to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        nn.init.constant_(parameter, float("norm" in name))
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    outsize.save(model, folder)
    return sum(parameter.nbytes for parameter in model.parameters())


def accelerate(folder: str) -> list[Answer]:
    """Seconds of each token with the layers on disk."""
    from transformers import AutoModelForCausalLM

    where = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu",
             "model.rotary_emb": "cpu", "lm_head": "cpu"}  # fmt: skip
    with tempfile.TemporaryDirectory() as spill:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, device_map=where, offload_folder=spill
        )
        return [_asked(model) for _ in range(REQUESTS)]


def _asked(model: nn.Module) -> Answer:
    ids, past, tokens, seconds = torch.tensor([PROMPT]), None, [], []
    with torch.no_grad():
        for _ in range(NEW):
            begin = time.perf_counter()
            out = model(ids, past_key_values=past, use_cache=True, logits_to_keep=1)
            past, token = out.past_key_values, int(out.logits[0, -1].argmax())
            seconds.append(time.perf_counter() - begin)
            tokens.append(token)
            ids = torch.tensor([[token]])
    return {"tokens": tokens, "seconds": seconds}


def ours(folder: str, budget: str | None) -> list[Answer]:
    """Seconds of each token; the first one's count from the request."""
    import outsize

    model = outsize.load(folder) if budget is None else outsize.load(folder, memory=budget)
    return [_drawn(model) for _ in range(REQUESTS)]


def _drawn(model: outsize.Model) -> Answer:
    seconds, begin = [], time.perf_counter()

    def likeliest(logits_V: torch.Tensor, index: int) -> int:
        nonlocal begin
        token = int(logits_V.argmax())
        seconds.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        return token

    return {"tokens": model.generate(PROMPT, NEW, likeliest), "seconds": seconds}


def worker(what: str, folder: str, group: str) -> None:
    """One run, in this process, under the cap of a group where there is one."""
    if group:
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    budget = BUDGET if what == "outsize" else None
    answers = accelerate(folder) if what == "accelerate" else ours(folder, budget)
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
    print(json.dumps({"answers": answers, "peak": peak}))


def capped() -> str:
    """A memory cgroup with the cap, or "" where none can be made."""
    folder = Path(f"/sys/fs/cgroup/memory/outsize-claim-{os.getpid()}")
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(CAP))
    except OSError:
        return ""
    return str(folder)


def run(what: str, folder: Path, group: str) -> dict:
    for file in folder.iterdir():  # as written, it lies in the cache at somebody else's expense
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    words = [sys.executable, __file__, what, str(folder), "" if what == "resident" else group]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        folder = Path(scratch) / "model"
        size, group = write(folder), capped()
        runs: dict[str, list[dict]] = {"accelerate": [], "outsize": [], "resident": []}
        try:
            for _ in range(ROUNDS):
                for what, found in runs.items():
                    found.append(run(what, folder, group))
        finally:
            if group:
                Path(group).rmdir()
    answers = {what: [a for r in found for a in r["answers"]] for what, found in runs.items()}
    first = {what: min(a["seconds"][0] for a in found) for what, found in answers.items()}
    token = {what: min(min(a["seconds"][1:]) for a in found) for what, found in answers.items()}
    peak = {what: min(r["peak"] for r in found) for what, found in runs.items()}
    same = all(a["tokens"] == answers["resident"][0]["tokens"] for a in answers["outsize"])
    cold = min(r["answers"][0]["seconds"][0] for r in runs["outsize"])
    less = [1 - each["outsize"] / each["accelerate"] for each in (first, token)]
    spared = 1 - peak["outsize"] / peak["resident"]
    conclude(
        "TPI-LLM (Li et al., 2024), memory scheduler",
        "first token and token latency over 80% below Accelerate; peak memory -90%",
        f"first token {first['outsize']:.2f} s against {first['accelerate']:.2f} ({-less[0]:+.0%}),"
        f" others {token['outsize']:.2f} against {token['accelerate']:.2f} ({-less[1]:+.0%}),"
        f" resident {token['resident']:.2f}, ours after loading"
        f" {cold:.2f} at first; peak of the whole process {peak['outsize'] >> 20} MiB"
        f" against {peak['resident'] >> 20} resident ({-spared:+.0%}), {peak['accelerate'] >> 20}"
        f" Accelerate; tokens {'equal' if same else 'DIFFER from'} the resident run's",
        f"{size / 2**30:.2f} GiB of weights, 16 layers, one machine, budget {BUDGET}, cap"
        f" {CAP >> 20} MiB {'by cgroup' if group else 'NOT SET'}; {len(PROMPT)} + {NEW} tokens",
        Figure(
            "less time to the first token than Accelerate",
            less[0],
            LESS_TIME,
            "%",
            nothing=0.0,
            timed=True,
            other=ONE,
        ),
        Figure(
            "less time a token than Accelerate",
            less[1],
            LESS_TIME,
            "%",
            nothing=0.0,
            timed=True,
            other=ONE,
        ),
        Figure(
            "less memory than the resident model", spared, LESS_MEMORY, "%", nothing=0.0, other=ONE
        ),
        holds={"the resident run's tokens": same},
    )


if __name__ == "__main__":
    worker(*sys.argv[1:]) if len(sys.argv) > 1 else main()
