"""Tokens a second on one CPU: `outsize.engine` beside llama.cpp, OpenVINO GenAI and transformers.

One model (a Llama shape of random weights), prompts, new tokens, threads and bits for all; greedy;
a process of its own for every contender, batch, format and round, the order turned round each time.
The exit code is 1 where a target is missed. See README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from support.contender_decode import FOUND, TASK, Found, Task
from support.figures import markdown
from support.paths import whole_path
from support.turns import keep, turns

import outsize
from outsize.checkpoint import hub
from outsize.models.build import build
from outsize.models.families import parse
from outsize.serve.export import export

HERE = Path(__file__).resolve().parent
SHAPES = {
    "125m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
             "num_key_value_heads": 12, "intermediate_size": 2048},
    "1.1b": {"hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32,
             "num_key_value_heads": 4, "intermediate_size": 5632},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "intermediate_size": 192},
}  # fmt: skip
VOCAB = 32_000
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
    "tie_word_embeddings": False, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GGUF = {"float32": "F32", "int8": "Q8_0", "int4": "Q4_0"}
OURS = "outsize"
PEERS = {
    "llama.cpp": "decode_llama_cpp", "openvino": "decode_openvino",
    "transformers": "decode_transformers",
}  # fmt: skip
FORMATS = {"transformers": ("float32",)}  # of those that have not all
FASTER, MIB = 1.1, 2**20
LOG_LINES = 15


@dataclass(frozen=True)
class Case:
    name: str
    format: str
    batch: int


@dataclass(frozen=True)
class Figures:
    """rate: new tokens a second behind the first ones; prompt: tokens of prompts a second."""

    rate: float
    prompt: float
    ready: float
    peak: int
    tokens: list[int]


@dataclass(frozen=True)
class Bench:
    folder: Path
    pythons: dict[str, str]
    shape: str
    prompt: int
    new: int
    threads: int
    again: int
    eights: bool

    def prepare(self, formats: list[str]) -> int:
        """The weights, as everybody reads them; gives how many there are in products."""
        model = build(parse({**MODEL, **SHAPES[self.shape]}), seed=0)
        hub.save(model, self.folder / "weights")
        for format in formats:
            export(self.folder / "weights", f"gguf:{GGUF[format]}", self.gguf(format))
        counted = sum(p.numel() for p in model.parameters() if p.dim() > 1)
        return counted - model.prologue.tokens.weight.numel()

    def gguf(self, format: str) -> Path:
        return self.folder / f"{format}.gguf"

    def measure(self, one: Case, number: int) -> Figures:
        folder = self.folder / f"{one.name}-{one.format}-{one.batch}-{number}"
        folder.mkdir()
        seeded = random.Random(7)
        prompts = [
            [1, *(seeded.randrange(3, VOCAB) for _ in range(self.prompt - 1))]
            for _ in range(one.batch)
        ]
        task = Task(
            str(self.folder / "weights"), str(self.gguf(one.format)), one.format, prompts,
            self.new, self.threads, self.again, self.eights,
        )  # fmt: skip
        (folder / TASK).write_text(json.dumps(asdict(task)), encoding="utf-8")
        paths = [str(HERE)]
        if one.name == OURS:
            paths.append(str(Path(outsize.__file__).parents[1]))
            command = [sys.executable, "-m", "support.ours_decode", str(folder)]
        else:
            command = [self.pythons[one.name], "-m", f"peers.{PEERS[one.name]}", str(folder)]
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(self.threads),
        }  # fmt: skip
        log = folder / "log"
        with log.open("w") as out:
            child = subprocess.Popen(command, env=environment, stdout=out, stderr=out, cwd=HERE)
            status = child.wait()
        if status:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
            raise SystemExit(f"{one.name} failed:\n{tail}")
        found = Found(**json.loads((folder / FOUND).read_text(encoding="utf-8")))
        rate = one.batch * (self.new - 1) / (found.whole - found.first)
        prompt = one.batch * self.prompt / found.first
        return Figures(rate, prompt, found.ready, found.peak, found.tokens)


def show(found: dict[Case, list[Figures]], weights: int) -> bool:
    """A table for each format and batch, and verdicts; whether every target is met."""
    good = True
    for format, batch in dict.fromkeys((c.format, c.batch) for c in found):
        here = {c.name: f for c, f in found.items() if (c.format, c.batch) == (format, batch)}
        rate = {n: median(f.rate for f in each) for n, each in here.items()}
        prompt = {n: median(f.prompt for f in each) for n, each in here.items()}
        print(f"\n## {format}, batch {batch}\n")
        head = ("contender", "tokens/s", "prompt tokens/s", "peak RSS, MiB", "first token, s")
        print(markdown(head, [
            (n, f"{rate[n]:,.1f}", f"{prompt[n]:,.0f}",
             f"{median(f.peak for f in here[n]) / MIB:,.0f}",
             f"{median(f.ready for f in here[n]):.1f}")
            for n in here
        ]))  # fmt: skip
        flops = 2 * weights * rate.get(OURS, 0.0)
        print(
            f"ours: 2 x {weights:,} weights x tokens/s = {flops / 1e9:.1f} GFLOP/s;"
            f" weights read {rate.get(OURS, 0.0) / batch:.1f} times a second"
        )
        others = [n for n in here if n != OURS]
        if OURS in here and others:
            for what, own in (("tokens/s", rate), ("prompt tokens/s", prompt)):
                best = max(others, key=own.__getitem__)
                ratio, wanted = own[OURS] / own[best], FASTER if what == "tokens/s" else 1.0
                met = ratio >= wanted
                good = good and met
                print(f"{'met' if met else 'MISSED'}: {ratio:.2f}x the {what} of {best};"
                      f" at least {wanted}x")  # fmt: skip
        if format == "float32" and len({tuple(f[0].tokens) for f in here.values()}) > 1:
            print("tokens of the first request differ: float32 rounds otherwise in each")
    return good


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--shape", choices=tuple(SHAPES), default="125m")
    add("--formats", nargs="+", choices=tuple(GGUF), default=tuple(GGUF))
    add("--batches", nargs="+", type=int, default=(1, 8, 16))
    add("--rounds", type=int, default=2)
    add("--again", type=int, default=2, help="times in a process, of which the best counts")
    add("--prompt", type=int, default=128)
    add("--new", type=int, default=128)
    add("--threads", type=int, default=torch.get_num_threads())
    add(
        "--a8",
        action="store_true",
        help="let OpenVINO and us round what codes are multiplied by"
        " to 8 bits (llama.cpp always does)",
    )
    add("--llama-cpp-python", type=whole_path, help="with llama-cpp-python")
    add("--openvino-python", type=whole_path, help="with openvino-genai optimum-intel nncf")
    add("--transformers-python", type=whole_path, help="with torch transformers")
    add("--json", type=Path, help="also write every figure to this file")
    options = parser.parse_args()
    named = {
        "llama.cpp": options.llama_cpp_python, "openvino": options.openvino_python,
        "transformers": options.transformers_python,
    }  # fmt: skip
    options.pythons = {name: python for name, python in named.items() if python is not None}
    return options


def main() -> int:
    asked = parsed()
    with tempfile.TemporaryDirectory(prefix="outsize-decode-") as folder:
        bench = Bench(
            Path(folder), asked.pythons, asked.shape, asked.prompt, asked.new, asked.threads,
            asked.again, asked.a8,
        )  # fmt: skip
        weights = bench.prepare(list(asked.formats))
        cases = [
            Case(name, format, batch)
            for format in asked.formats
            for batch in asked.batches
            for name in (OURS, *asked.pythons)
            if format in FORMATS.get(name, GGUF)
        ]
        print(f"{asked.shape}: prompts of {asked.prompt}, {asked.new} new tokens,"
              f" {asked.threads} threads")  # fmt: skip
        found: dict[Case, list[Figures]] = {one: [] for one in cases}
        for number, one in turns(cases, asked.rounds):
            found[one].append(bench.measure(one, number))
            rate = found[one][-1].rate
            print(f"  {one.format} {one.batch} {one.name}: {rate:.1f} tokens/s", flush=True)
        good = show(found, weights)
        keep(asked.json, found)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
