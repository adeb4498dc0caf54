"""A model of Qwen2-7B's shape adapted under 4 GiB, its base on the disk as int4.

    python benchmarks/capped_7b.py [--steps 2] [--tokens 64] [--folder /tmp]   # 20 GB, for a while

Random weights are written in bfloat16, converted by `outsize convert --weights int4` and adapted by
`outsize train` (lora rank 16, packed chats), both in a control group that counts all: interpreter,
libraries, page cache. Rows are short, since every step reads and decodes the whole base whatever
its tokens. Prints what was foretold before the first step beside what was measured. Exit code 1
where the cap or the peak was passed, or the peak is not foretold within 5%, or, but for --lenient
(a busy machine), the time of a step within 15%.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from outsize.memory import format_bytes

sys.path.insert(0, str(Path(__file__).parents[1] / "claims"))
from qlora import BESIDE, PEAK, RANK, capped, chats, write

SHAPE, FORMAT, CAP = "7b", "int4", 4 << 30
NEAR = 0.15  # of the foretold time of a step


def trained(base: Path, folder: Path, steps: int, tokens: int) -> tuple[int, dict[str, float]]:
    """Most bytes of a run under the cap, and what it foretold and measured."""
    chats(folder / "chats.jsonl")
    (folder / "spill").mkdir()
    values = {
        "model": base, "data": folder / "chats.jsonl", "data.chat.template": "plain",
        "data.validation": 0, "adapt.lora.rank": RANK, "train.sequence": tokens,
        "train.batch_tokens": tokens, "train.steps": steps, "train.evaluate_every": 0,
        "sample.tokens": 0, "memory": f"{(CAP - int(BESIDE * 2**30)) >> 20}MiB",
        "disk": folder / "spill", "output": folder / "run",
    }  # fmt: skip
    sets = (word for key, value in values.items() for word in ("--set", f"{key}={value}"))
    ended = capped(["train", *sets], CAP)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return ended.peak, next(x for x in map(json.loads, lines) if "predicted_peak_bytes" in x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--lenient", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="outsize-qlora-", dir=options.folder) as scratch:
        folder = Path(scratch)
        count = write(SHAPE, folder / "plain")
        print(f"  {count / 1e9:.2f}G parameters are written", flush=True)
        begin = time.perf_counter()
        words = [str(folder / "plain"), "--weights", FORMAT, "--into", str(folder / "base")]
        made = capped(["convert", *words], CAP).peak
        print(f"  converted in {time.perf_counter() - begin:.0f} s", flush=True)
        shutil.rmtree(folder / "plain")
        size = sum(path.stat().st_size for path in (folder / "base").iterdir())
        most, found = trained(folder / "base", folder, options.steps, options.tokens)
    foretold, peak = round(found["predicted_peak_bytes"]), round(found["measured_peak_bytes"])
    expected, step = found["predicted_step_seconds"], found["measured_step_seconds"]
    held = {
        "under the cap": max(most, made) <= CAP,
        "peak foretold within 5%, and never passed": PEAK <= peak / foretold <= 1.0,
        "time of a step foretold within 15%": abs(step / expected - 1) <= NEAR,
    }
    print(f"on the disk {format_bytes(size)}; converting {format_bytes(made)} at most")
    print(f"training    {format_bytes(most)} at most of {format_bytes(CAP)}, everything counted")
    print(f"tensors     {format_bytes(peak)}, foretold {format_bytes(foretold)}")
    print(f"a step      {step:.1f} s, foretold {expected:.1f}, of {options.tokens} tokens")
    for what, so in held.items():
        print(f"{'yes' if so else 'NO':<4}{what}")
    *memory, in_time = held.values()
    sys.exit(not (all(memory) and (in_time or options.lenient)))


if __name__ == "__main__":
    main()
