"""Claim: a sliding window over layers serves 70B in 3.1 GB a device, and over 80% sooner than
Accelerate, in 90% less memory.

Li et al., "TPI-LLM: Serving 70B-scale LLMs Efficiently on Low-resource Edge Devices", 2024. The
star of its sums is in claims/nvrar.py.

Foretold: the least memory a device of Llama-2 70B's shape on eight devices, as `outsize plan` says
it. Run: a Llama shape in bfloat16, random weights, greedy, two requests of one prompt, after each
other; least of the rounds, the model's files out of the page cache before each.

    Accelerate  device_map="auto" in one process with all threads: layers in memory as far as they
                may be, others on disk (benchmarks/peers/accelerate_auto.py)
    Outsize     outsize.load(path, mesh="tensor=2", memory=...): two devices of one thread each

Seconds: both within half of the model's bytes, page cache and interpreters included (a cgroup of
version 1, where one can be made). Memory: Accelerate with all layers in memory, which is what it
does where they fit; a device of ours with 150 MiB for tensors; most bytes resident in a process.

    python claims/tpi_llm.py [--peers-python peers/bin/python]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from verdict import Figure, conclude

import outsize
from outsize.models.build import build
from outsize.models.families import parse

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
LLAMA_70B = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "vocab_size": 32000,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "max_position_embeddings": 4096, "torch_dtype": "float16",
}  # fmt: skip
DEVICES, SMALL = 8, "1MB"  # nothing runs in so little: the refusal says how much is needed
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4096,
    "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16,
    "num_key_value_heads": 8, "max_position_embeddings": 256, "torch_dtype": "bfloat16",
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LAYERS, WORKERS = 48, 2
PROMPT, NEW, REQUESTS, ROUNDS = 64, 4, 2, 2
INTERPRETER = 500 << 20  # bytes that Python and PyTorch take of a process
LITTLE = 150 << 20  # for a device's tensors, where memory is judged
BYTES, LESS_TIME, LESS_MEMORY = 3.1e9, 0.8, 0.9  # the paper's
HERE = f"one machine, {WORKERS} devices, {LAYERS} layers of hidden {CONFIG['hidden_size']}"


@dataclass(frozen=True)
class Ran:
    """Seconds of the tokens of each request; all tokens; most bytes resident in a process."""

    seconds: list[list[float]]
    tokens: list[int]
    resident: int

    @property
    def first(self) -> float:
        return min(one[0] for one in self.seconds)

    @property
    def token(self) -> float:
        return min(min(one[1:]) for one in self.seconds)


def foretold() -> float:
    """The least bytes a device of Llama-2 70B's shape, as `outsize plan` says."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_70B))
        words = [sys.executable, "-m", "outsize", "plan", folder, "--mesh", f"tensor={DEVICES}"]
        words += ["--memory", SMALL, "--prompt-tokens", str(PROMPT), "--max-tokens", "32"]
        said = subprocess.run(words, capture_output=True, text=True, check=False).stderr
    found = re.search(r"give ([\d,]+) bytes", said)
    assert found, said
    return float(found[1].replace(",", ""))


def write(folder: Path) -> int:
    """The model's directory; gives its bytes."""
    model = build(parse({**CONFIG, "num_hidden_layers": LAYERS}), dtype=torch.bfloat16)
    model = model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        nn.init.constant_(parameter, float("norm" in name))
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    outsize.save(model, folder)
    return sum(parameter.nbytes for parameter in model.parameters())


# -- a run -----------------------------------------------------------------------------------------


@contextmanager
def capped(cap: int) -> Iterator[Path | None]:
    """A memory cgroup with the cap, None where none can be made."""
    folder = Path(f"/sys/fs/cgroup/memory/outsize-claim-{os.getpid()}")
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(cap))
    except OSError:
        yield None
        return
    try:
        yield folder
    finally:
        folder.rmdir()


def out_of_cache(folder: Path) -> None:
    """As written, files lie in the cache at somebody else's expense."""
    for file in folder.iterdir():
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
                os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def started(words: list[str], group: Path | None, place: dict[str, str]) -> subprocess.Popen[str]:
    """A process in a group from its beginning."""
    join = [] if group is None else [f"echo $$ > {group}/cgroup.procs &&"]
    line = " ".join([*join, 'exec "$@"'])
    return subprocess.Popen(["sh", "-c", line, "sh", *words], text=True, env=os.environ | place)


def answered(every: list[subprocess.Popen[str]], path: Path) -> Ran:
    """What the first of some processes wrote."""
    codes = [one.wait() for one in every]
    assert not any(codes), f"exit codes {codes}"
    found = json.loads(path.read_text())
    seconds = found["seconds"]
    each = [seconds[i : i + NEW] for i in range(0, len(seconds), NEW)]
    return Ran(each, [int(one) for one in found["outcome"]], found["resident"])


def task(folder: Path, scratch: str, memory: int, threads: int) -> str:
    """What a contender is told: benchmarks/support/contest.py."""
    said = {
        "what": "generate", "weights": str(folder), "folder": scratch, "memory": memory,
        "steps": NEW, "rows": REQUESTS, "sequence": PROMPT, "threads": threads,
    }  # fmt: skip
    path = Path(scratch) / "task.json"
    path.write_text(json.dumps(said))
    return str(path)


def accelerate(folder: Path, python: str, memory: int, group: Path | None) -> Ran:
    """memory: for layers."""
    out_of_cache(folder)
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "answer.json"
        told = task(folder, scratch, memory, torch.get_num_threads())
        words = [python, "-m", "peers.accelerate_auto", told, str(answer)]
        ran = started(words, group, {"PYTHONPATH": str(BENCHMARKS)})
        return answered([ran], answer)


def ours(folder: Path, memory: int, group: Path | None) -> Ran:
    """memory: of each device's tensors."""
    out_of_cache(folder)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        answer = Path(scratch) / "answer.json"
        told = task(folder, scratch, memory, 1)
        every = []
        for rank in range(WORKERS):
            place = {"RANK": str(rank), "WORLD_SIZE": str(WORKERS), "OMP_NUM_THREADS": "1"}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            words = [sys.executable, __file__, "--device", told, str(answer)]
            every.append(started(words, group, place))
        return answered(every, answer)


def device(told: str, answer: str) -> None:
    """One of our devices, in this process."""
    sys.path.insert(0, str(BENCHMARKS))
    from support.contest import Answer, Task, finish

    said = Task(**json.loads(Path(told).read_text()))
    torch.set_num_threads(said.threads)
    mesh, seconds, tokens = f"tensor={WORKERS}", list[float](), list[float]()
    with outsize.load(said.weights, mesh=mesh, memory=said.memory, disk=said.folder) as model:
        ids = said.ids(0, CONFIG["vocab_size"])[0].tolist()
        for _ in range(said.rows):
            begin = time.perf_counter()

            def likeliest(logits_V: torch.Tensor, index: int) -> int:
                nonlocal begin
                token = int(logits_V.argmax())
                seconds.append(time.perf_counter() - begin)
                begin = time.perf_counter()
                return token

            tokens += map(float, model.generate(ids, said.steps, likeliest))
    if os.environ["RANK"] == "0":
        finish(Answer(seconds, tokens), Path(answer))


# -- all of them -----------------------------------------------------------------------------------


def best(runs: list[Ran]) -> Ran:
    """The least seconds of all."""
    return Ran([one for run in runs for one in run.seconds], runs[0].tokens, runs[0].resident)


def has_accelerate(python: str) -> bool:
    """Whether an interpreter has what Accelerate needs."""
    done = subprocess.run([python, "-c", "import accelerate, transformers"], check=False)
    return done.returncode == 0


def less(mine: float, theirs: float | None) -> float | None:
    return None if theirs is None else 1 - mine / theirs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--device", nargs=2, metavar=("TASK", "ANSWER"))
    options = parser.parse_args()
    if options.device:
        device(*options.device)
        return
    python, least = options.peers_python, foretold()
    peer = has_accelerate(python)
    theirs, mine = list[Ran](), list[Ran]()
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        folder = Path(scratch).resolve() / "model"
        size = write(folder)
        cap = size // 2
        with capped(cap) as group:
            for _ in range(ROUNDS):
                if peer:
                    theirs.append(accelerate(folder, python, cap - INTERPRETER, group))
                mine.append(ours(folder, cap // WORKERS - INTERPRETER, group))
        little = ours(folder, LITTLE, None)
        whole = accelerate(folder, python, 2 * size, None) if peer else None
    swift, slow = best(mine), best(theirs) if peer else None
    first = less(swift.first, slow and slow.first)
    token = less(swift.token, slow and slow.token)
    spared = less(little.resident, whole and whole.resident)
    base = f"{INTERPRETER >> 20} MiB of a process are taken to be Python's and PyTorch's"
    against = (
        "no Accelerate in the peers' Python"
        if slow is None or whole is None
        else (
            f"first token {swift.first:.2f} s against {slow.first:.2f}, others {swift.token:.2f}"
            f" against {slow.token:.2f}; a device {little.resident >> 20} MiB against"
            f" {whole.resident >> 20} MiB"
        )
    )
    conclude(
        "TPI-LLM (Li et al., 2024), memory scheduler",
        "Llama-2 70B in 3.1 GB a device; first token and token latency over 80% below Accelerate,"
        " memory 90% below",
        f"Llama-2 70B's shape in {least / 1e9:.3f} GB a device at least, foretold; {against}",
        f"{size / 2**30:.2f} GiB of weights, {HERE}, cap {cap >> 20} MiB"
        f" {'NOT SET' if group is None else 'by cgroup'}, {base}; {PROMPT} + {NEW} tokens",
        Figure(
            "memory a device of Llama-2 70B on eight", least / 1e9, BYTES / 1e9, "GB",
            nothing=140 / DEVICES, less=True, how="simulated",
        ),
        Figure(
            "less time to the first token than Accelerate", first, LESS_TIME, "%", nothing=0.0,
            timed=True, other=HERE,
        ),
        Figure(
            "less time a token than Accelerate", token, LESS_TIME, "%", nothing=0.0, timed=True,
            other=HERE,
        ),
        Figure(
            "less memory a device than Accelerate", spared, LESS_MEMORY, "%", nothing=0.0,
            other=HERE,
        ),
        holds={
            "the same tokens within either budget": all(r.tokens == little.tokens for r in mine)
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
