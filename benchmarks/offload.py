"""Training and generating beyond memory, beside peers, under one hard cap each.

    python benchmarks/offload.py [--deepspeed-python PATH] [--disk DIR] [--cap 2.5GiB]

One model (a Llama shape of 0.48G parameters, float32, random weights in a Hugging Face directory),
every contender in a process of its own whose control group may hold so many bytes, page cache
included. Training, AdamW, 7.7 GB of states: Outsize with what its planner puts on disk, DeepSpeed
ZeRO-3 with parameters and optimizer on disk (from an environment of its own, see README.md), plain
PyTorch over memory-mapped files. Generating, greedy: `outsize generate --memory`, Accelerate's disk
offload, the memory-mapped files. Losses and tokens must agree. Targets against each peer: 1.5 times
as fast, at most 0.7 of the memory; exit code 1 where one is missed.

Peers may use the whole cap; Outsize is told a budget with which its group stays below 0.7 of it.
Memory is what the group held at most; page cache fills a cap by itself, so most resident bytes of
the process are printed beside it. DeepSpeed holds all gradients in memory besides page-locked
buffers: where it does not run under the cap (building its extensions in it fails as well), it runs
once more under a larger one of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from support.cgroup import Finished, run_capped
from support.contest import Answer, Task
from support.ours_offload import planned
from support.paths import whole_path
from support.streaming import median, quick_fill
from torch import Tensor

from outsize.checkpoint import hub
from outsize.memory.sizes import format_bytes, parse_bytes
from outsize.models.build import build, materialise, segments
from outsize.models.families import parse
from outsize.models.presets import PRESETS
from outsize.plan.text import to_yaml

HERE = Path(__file__).resolve().parent
LAYERS, ROWS, SEQUENCE, STEPS, PROMPT, TOKENS = 8, 2, 256, 3, 32, 8
FASTER, SMALLER = 1.5, 0.7
TOLERANCE = 2e-3  # of losses: products are summed in other orders, and updates follow
LIMIT = 600.0
# Bytes that Outsize's process has beside its budget, and some room: the interpreter and PyTorch
# (240 MiB), and in training what the C library's heap keeps of activations that are gone (290).
BESIDE = {"train": 640 << 20, "generate": 260 << 20}
MODULES = {
    "outsize": "support.ours_offload",
    "deepspeed": "peers.deepspeed_nvme",
    "mapped": "peers.mapped",
    "accelerate": "peers.accelerate_disk",
}
TRAIN, GENERATE = ("outsize", "deepspeed", "mapped"), ("outsize", "accelerate", "mapped")


@dataclass(frozen=True)
class Outcome:
    """How one contender fared. answer: None where it gave none."""

    name: str
    ended: Finished
    answer: Answer | None

    @property
    def seconds(self) -> float:
        """Of the median step or token; the first step is left out: it makes what others reuse."""
        assert self.answer is not None
        return median(self.answer.seconds[1:] or self.answer.seconds)


def write_model(folder: Path) -> None:
    """Random weights in a Hugging Face directory."""
    config = parse({**PRESETS["llama-1.1b"], "num_hidden_layers": LAYERS})
    model = build(config, None, torch.float32)
    fill = quick_fill(model, 0)

    def made(name: str, parameter: Tensor) -> Tensor:
        out = torch.empty(parameter.shape, dtype=parameter.dtype)
        fill(name, out)
        return out

    for segment, _ in segments(model):
        materialise(model, segment, made)
    hub.save(model, folder)


def forget(folder: Path) -> None:
    """Out of the page cache, where the files lie on nobody's account: each reads them itself."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def contend(name: str, task: Task, python: str, cap: int) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="outsize-offload-", dir=task.folder) as folder:
        home = Path(folder)
        (home / "states").mkdir()
        told = replace(task, folder=str(home / "states"))
        (home / "task.json").write_text(json.dumps(asdict(told)), encoding="utf-8")
        environment = {
            **os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}",
            "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(task.threads),
            "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",
        }  # fmt: skip
        command = [python, "-m", MODULES[name], str(home / "task.json"), str(home / "answer.json")]
        forget(Path(task.weights))
        ended = run_capped(command, cap, LIMIT, environment)
        answer = None
        if ended.good:
            answer = Answer(**json.loads((home / "answer.json").read_text(encoding="utf-8")))
        return Outcome(name, ended, answer)


def row(outcome: Outcome, unit: str) -> str:
    if outcome.answer is None:
        return f"{outcome.name:11} {outcome.ended}; {format_bytes(outcome.ended.peak)} at most"
    return (
        f"{outcome.name:11} {outcome.seconds:8.3f} s a {unit}, {format_bytes(outcome.ended.peak)}"
        f" in the group, {format_bytes(outcome.answer.resident)} resident"
        f"; {', '.join(f'{value:.6g}' for value in outcome.answer.outcome)}"
    )


def agree(ours: Answer, theirs: Answer, what: str) -> bool:
    if what == "generate":
        return ours.outcome == theirs.outcome
    pairs = zip(ours.outcome, theirs.outcome, strict=True)
    return all(abs(a - b) <= TOLERANCE * abs(b) for a, b in pairs)


def judge(ours: Outcome, peer: Outcome, what: str) -> bool:
    """Print the peer's targets; whether they are met. One that cannot run within the cap has lost
    on memory; one that fails otherwise is reported and counts for nothing."""
    assert ours.answer is not None
    if peer.answer is None:
        lost = peer.ended.killed or peer.ended.late
        print(
            f"  against {peer.name}: {'it cannot run in this' if lost else 'it DOES NOT RUN here'}"
        )
        return True
    same = agree(ours.answer, peer.answer, what)
    faster = peer.seconds / ours.seconds
    smaller = ours.ended.peak / peer.ended.peak
    good = same and faster >= FASTER and smaller <= SMALLER
    print(
        f"  against {peer.name}: {faster:.2f} times as fast, {smaller:.2f} of the memory,"
        f" {'losses' if what == 'train' else 'tokens'} {'agree' if same else 'DIFFER'}:"
        f" {'met' if good else 'MISSED'}"
    )
    return good


def within(cap: int, what: str) -> int:
    """The budget with which Outsize's group stays below SMALLER of a cap, whole MiB."""
    return (int(SMALLER * cap) - BESIDE[what]) >> 20 << 20


def contest(task: Task, pythons: dict[str, str], cap: int, larger: int) -> bool:
    what, unit = task.what, "step" if task.what == "train" else "token"
    names = [n for n in (TRAIN if what == "train" else GENERATE) if n in pythons]
    print(
        f"{what}: cap {format_bytes(cap)} for each, Outsize told {format_bytes(task.memory)}"
        " beside what a process takes anyway",
        flush=True,
    )
    outcomes = {}
    for name in names:
        outcomes[name] = contend(name, task, pythons[name], cap)
        print("  " + row(outcomes[name], unit), flush=True)
        if name == "deepspeed" and outcomes[name].answer is None:
            print(
                "  it keeps all gradients in memory, and page-locked buffers of its largest tensor,"
                f" two for parameters and four to update: once more under {format_bytes(larger)},"
                " which favours it",
                flush=True,
            )
            outcomes[name] = contend(name, task, pythons[name], larger)
            print("  " + row(outcomes[name], unit), flush=True)
    ours = outcomes.pop("outsize")
    if ours.answer is None:
        return False
    return all([judge(ours, peer, what) for peer in outcomes.values()])


def with_plan(task: Task) -> Task:
    """The task with what the planner makes of it, printed."""
    found = planned(task)
    print(
        f"planned: {format_bytes(found.peak)} of {format_bytes(task.memory)},"
        f" {format_bytes(found.below['disk'])} on disk, {found.seconds:.2f} s a step predicted"
    )
    return replace(task, plan=to_yaml(found.plan))


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--deepspeed-python", help="of an environment with deepspeed; see README")
    parser.add_argument(
        "--peers-python", type=whole_path, default=sys.executable, help="transformers, accelerate"
    )
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--cap", type=parse_bytes, default=5 << 29)
    parser.add_argument("--deepspeed-cap", type=parse_bytes, default=8 << 30)
    parser.add_argument("--generate-cap", type=parse_bytes, default=3 << 29)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", choices=("train", "generate"))
    return parser.parse_args(arguments)


def main() -> int:
    options = options_of(sys.argv[1:])
    pythons = dict.fromkeys(("accelerate", "mapped"), options.peers_python)
    pythons["outsize"] = sys.executable
    if options.deepspeed_python:
        pythons["deepspeed"] = options.deepspeed_python
    good, cores = True, os.cpu_count() or 1
    with tempfile.TemporaryDirectory(prefix="outsize-offload-", dir=options.disk) as home:
        weights = Path(home) / "model"
        write_model(weights)
        common = Task("", str(weights), home, 0, options.steps, ROWS, SEQUENCE, cores)
        if options.only != "generate":
            task = with_plan(replace(common, what="train", memory=within(options.cap, "train")))
            good = contest(task, pythons, options.cap, options.deepspeed_cap)
        if options.only != "train":
            cap = options.generate_cap
            task = replace(
                common, what="generate", memory=within(cap, "generate"), steps=TOKENS, rows=1,
                sequence=PROMPT,
            )  # fmt: skip
            good = contest(task, pythons, cap, cap) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
