"""LoRA and QLoRA on one CPU: `outsize train` beside peft in a plain loop, TRL's SFTTrainer and
LLaMA-Factory.

One model (a Llama shape of 134M parameters), adapter values, rows of masked chats, steps and
threads for all; a process of its own for every contender and round, the order turned round each
time. The exit code is 1 where a target is missed. See README.md.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
import yaml
from support.contender_finetune import FOUND, TASK, Task
from support.figures import markdown
from support.job_data import tokenizer
from support.paths import whole_path
from support.turns import keep, turns
from support.watch_finetune import FOLDER

import outsize
from outsize.checkpoint import hub
from outsize.data.files import find_files
from outsize.data.open import open_data
from outsize.data.stream import TrainStream
from outsize.hardware.probe import user_cache
from outsize.models.build import build
from outsize.models.families import parse
from outsize.train.recipe import data_config
from outsize.train.resolve import resolve

HERE = Path(__file__).resolve().parent
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32_000,
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_key_value_heads": 12, "intermediate_size": 2048, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "bos_token_id": None, "eos_token_id": 0,
}  # fmt: skip
VOCABULARY, RANK, SEQUENCE, LR, CLIP = 14_336, 16, 512, 2e-4, 1.0
OURS = "outsize"
PEERS = {"peft": "peft_loop", "trl": "sft_trainer", "llama-factory": "llama_factory"}
TITLES = {
    OURS: "outsize train", "peft": "peft, plain loop", "trl": "TRL SFTTrainer",
    "llama-factory": "LLaMA-Factory",
}  # fmt: skip
FASTER = {"lora": 1.3, "qlora": 1.5}  # times the best peer's tokens/s
LEANER = 0.7  # of the leanest peer's bytes
TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2}  # of the last loss, relative
MIB = 2**20
LOG_LINES = 15


def chats(count: int) -> Iterator[dict[str, object]]:
    """Conversations about functions of the standard library, each longer than a row."""
    turns: list[dict[str, str]] = []
    made = 0
    for file in find_files(("stdlib",)).files:
        try:
            tree = ast.parse(file.path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if text is None:
                continue
            asked = f"What does {node.name} of {file.path.name} do?"
            turns.append({"role": "user", "content": asked})
            turns.append({"role": "assistant", "content": f"{text}\n\n{ast.unparse(node)}"})
            if sum(len(turn["content"]) for turn in turns) > 8 * SEQUENCE:
                yield {"messages": turns}
                turns, made = [], made + 1
                if made == count:
                    return


@dataclass(frozen=True)
class Contender:
    name: str
    method: str  # lora or qlora
    precision: str


@dataclass(frozen=True)
class Figures:
    """Of one round. seconds, losses: by step; peak: most bytes of the whole process."""

    seconds: list[float]
    losses: list[float]
    peak: int


@dataclass(frozen=True)
class Bench:
    folder: Path
    pythons: dict[str, str]
    steps: int
    warm: int
    rows: int
    threads: int

    @property
    def tokens(self) -> int:
        return self.rows * SEQUENCE

    def keys(self, one: Contender, output: Path) -> dict[str, object]:
        """The run file of ours."""
        coded = {"weights": "nf4"} if one.method == "qlora" else {}
        return {
            "model": str(self.folder / "weights"),
            "data": {
                "path": str(self.folder / "chats.jsonl"), "validation": 0,
                "cache": str(self.folder / "data"), "chat": {"template": "chatml"},
            },
            "adapt": {"lora": {"rank": RANK}},
            "precision": {"fp32": "float32", "bf16": "bfloat16"}[one.precision],
            "optimizer": {"lr": LR, "betas": [0.9, 0.999], "weight_decay": 0.0},
            "learning_rate": {"shape": "constant", "warmup": 0},
            "train": {
                "steps": self.steps + self.warm, "sequence": SEQUENCE,
                "batch_tokens": self.tokens, "clip": CLIP,
            },
            "sample": {"tokens": 0},
            "callbacks": ["support.watch_finetune:Watch"],
            "output": str(output),
            **coded,
        }  # fmt: skip

    def prepare(self, cache: Path) -> float:
        """Model, adapter, chats, and the rows of a run of ours as arrays for the others; the share
        of targets among tokens."""
        weights = self.folder / "weights"
        hub.save(build(parse(MODEL), seed=0), weights)
        for file in tokenizer(cache, VOCABULARY).iterdir():
            (weights / file.name).write_bytes(file.read_bytes())
        lines = (json.dumps(chat) for chat in chats((self.steps + self.warm + 1) * self.rows))
        (self.folder / "chats.jsonl").write_text("\n".join(lines), encoding="utf-8")
        model = outsize.adapt(outsize.load(weights), "lora", rank=RANK)
        outsize.save(model, self.folder / "adapter", adapter_only=True)
        file = self.folder / "shape.yaml"
        file.write_text(yaml.safe_dump(self.keys(Contender(OURS, "lora", "fp32"), Path("x"))))
        config = resolve(file).config
        data = open_data(data_config(config, str(weights)))
        stream = TrainStream(data.train, config.train.seed, self.rows, SEQUENCE)
        batches = [stream.batch(step) for step in range(self.steps + self.warm)]
        for batch in batches:
            assert batch.bounds == ((0, SEQUENCE),) * self.rows, "a row is a chat"
        ids = np.stack([batch.ids_BS.numpy() for batch in batches])
        targets = np.stack([batch.targets_BS.numpy() for batch in batches])
        labels = np.full_like(targets, -100)
        labels[..., 1:] = targets[..., :-1]
        np.savez(self.folder / "rows.npz", ids=ids, labels=labels)
        return float(np.mean(targets >= 0))

    def measure(self, one: Contender, number: int) -> Figures:
        folder = self.folder / f"{one.name}-{one.method}-{one.precision}-{number}"
        folder.mkdir()
        paths = [str(HERE)]
        if one.name == OURS:
            paths.append(str(Path(outsize.__file__).parents[1]))
            file = folder / "run.yaml"
            file.write_text(yaml.safe_dump(self.keys(one, folder / "run")), encoding="utf-8")
            command = [sys.executable, "-m", "outsize", "train", str(file)]
        else:
            task = Task(
                weights=str(self.folder / "weights"), adapter=str(self.folder / "adapter"),
                rows=str(self.folder / "rows.npz"), precision=one.precision,
                nf4=one.method == "qlora", threads=self.threads, rank=RANK, lr=LR, clip=CLIP,
            )  # fmt: skip
            (folder / TASK).write_text(json.dumps(asdict(task)), encoding="utf-8")
            command = [self.pythons[one.name], "-m", f"peers.{PEERS[one.name]}", str(folder)]
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(self.threads),
            FOLDER: str(folder),
        }  # fmt: skip
        log = folder / "log"
        with log.open("w") as out:
            child = subprocess.Popen(command, env=environment, stdout=out, stderr=out, cwd=HERE)
            _, status, used = os.wait4(child.pid, 0)
        if os.waitstatus_to_exitcode(status):
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
            raise SystemExit(f"{TITLES[one.name]} failed:\n{tail}")
        found = json.loads((folder / FOUND).read_text(encoding="utf-8"))
        return Figures(found["seconds"], found["losses"], used.ru_maxrss * 1024)


def show(found: dict[Contender, list[Figures]], bench: Bench) -> bool:
    """Tables and verdicts; whether every target is met."""
    good = True
    for method, precision in dict.fromkeys((c.method, c.precision) for c in found):
        here = {
            c.name: f for c, f in found.items() if (c.method, c.precision) == (method, precision)
        }
        rate = {
            n: median(bench.tokens / median(f.seconds[bench.warm :]) for f in each)
            for n, each in here.items()
        }
        peak = {n: median(f.peak for f in each) for n, each in here.items()}
        losses = [f.losses[-1] for each in here.values() for f in each]
        head = ("contender", "tokens/s", "peak RSS, MiB", "first loss", "last loss")
        print(f"\n## {method}, {precision}\n")
        print(
            markdown(
                head,
                [
                    (
                        TITLES[n], f"{rate[n]:,.0f}", f"{peak[n] / MIB:,.0f}",
                        f"{here[n][0].losses[0]:.4f}", f"{here[n][0].losses[-1]:.4f}",
                    )
                    for n in here
                ],
            )
        )  # fmt: skip
        spread = (max(losses) - min(losses)) / min(losses)
        verdicts = [
            (
                f"last losses differ by {spread:.1e}, relative; at most {TOLERANCE[precision]:.0e}",
                spread <= TOLERANCE[precision],
            )
        ]
        others = [n for n in here if n != OURS]
        if OURS in here and others:
            best, lean = max(others, key=rate.__getitem__), min(others, key=peak.__getitem__)
            faster, leaner = rate[OURS] / rate[best], peak[OURS] / peak[lean]
            verdicts += [
                (
                    f"{faster:.2f}x the tokens/s of {TITLES[best]}; at least {FASTER[method]}x",
                    faster >= FASTER[method],
                ),
                (
                    f"{leaner:.2f}x the memory of {TITLES[lean]}; at most {LEANER}x",
                    leaner <= LEANER,
                ),
            ]
        for text, met in verdicts:
            print(f"{'met' if met else 'MISSED'}: {text}")
            good = good and met
    return good


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--rounds", type=int, default=2)
    add("--steps", type=int, default=4, help="that count, after those that warm up")
    add("--warm", type=int, default=2)
    add("--rows", type=int, default=4, help=f"of {SEQUENCE} tokens, a step")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--methods", nargs="+", choices=tuple(FASTER), default=tuple(FASTER))
    add("--precisions", nargs="+", choices=tuple(TOLERANCE), default=("fp32",))
    add("--peers", nargs="*", choices=tuple(PEERS), default=tuple(PEERS))
    add("--peers-python", type=whole_path, help="with torch transformers peft trl bitsandbytes")
    add("--factory-python", type=whole_path, help="with torch llamafactory")
    add("--cache", type=Path, default=user_cache() / "benchmarks")
    add("--json", type=Path, help="also write every step's figures to this file")
    options = parser.parse_args()
    pythons = {name: options.peers_python for name in ("peft", "trl")}
    options.pythons = pythons | {"llama-factory": options.factory_python}
    for name in options.peers:
        if options.pythons[name] is None:
            parser.error(
                f"--peers {name}: no environment is said for it; --peers with nothing: none"
            )
    return options


def main() -> int:
    asked = parsed()
    with tempfile.TemporaryDirectory(prefix="outsize-finetune-") as folder:
        bench = Bench(
            Path(folder), asked.pythons, asked.steps, asked.warm, asked.rows, asked.threads
        )
        share = bench.prepare(asked.cache)
        contenders = [
            Contender(name, method, precision)
            for method, precision in itertools.product(asked.methods, asked.precisions)
            for name in (OURS, *asked.peers)
            if not (method == "qlora" and name == "llama-factory")  # its 4 bits are for GPUs
        ]
        print(f"{bench.rows} rows of {SEQUENCE} a step, {share:.0%} of the tokens are targets")
        found: dict[Contender, list[Figures]] = {one: [] for one in contenders}
        for number, one in turns(contenders, asked.rounds):
            begin = time.monotonic()
            found[one].append(bench.measure(one, number))
            took = time.monotonic() - begin
            print(f"  {one.method} {one.precision} {TITLES[one.name]}: {took:.0f} s", flush=True)
        good = show(found, bench)
        keep(asked.json, found)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
